"""storectl hold: a command that runs while a checkpoint is held."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

import storesvc_client as store
from tests.support.command_line import (
    COMMAND,
    document,
    printed,
    refusal,
    storectl,
    table,
)
from tests.support.server_process import ServerProcess

PATIENCE_SECONDS = 30

Start: TypeAlias = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def saved(run: store.Run) -> store.Run:
    """A run with the steps 1 and 2."""
    for step in (1, 2):
        run.save(step, {"w": step}).result()
    return run


def until(condition: Callable[[], bool]) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def start(server_address: str) -> Iterator[Start]:
    """Starts ``storectl hold`` as a process; kills those that are left."""
    started: list[subprocess.Popen[str]] = []

    def start_hold(*arguments: str, address: str = "") -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [*COMMAND, "-s", address or server_address, "hold", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start_hold
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_checkpoint_is_held_while_a_command_runs_and_no_longer(
    server_address: str, saved: store.Run
) -> None:
    saved.tags.set("best", 1)
    script = 'echo "$STORECTL_HELD"; read line; exit 7'
    arguments = (f"{saved.name}@best", "--owner", "eval 1")
    process = subprocess.Popen(
        [*COMMAND, "-s", server_address, "hold", *arguments, "--", "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert f"{saved.name}@1\n" == process.stdout.readline()

    header, row = table(printed(server_address, "hold", saved.name))
    (found,) = document(server_address, "hold", saved.name)
    saved.tags.delete("best")
    kept = refusal(server_address, "rm", "--purge", f"{saved.name}@1")
    process.communicate("\n")

    assert ["HOLD", "STEP", "OWNER", "EXPIRES"] == header
    assert ["1", "eval 1"] == row[1:3]
    assert [row[0], 1, "eval 1"] == [found[k] for k in ("id", "step", "owner")]
    assert f"kept by hold {found['id']}" in kept
    assert 7 == process.returncode
    assert [] == document(server_address, "hold", saved.name)
    assert f"{saved.name}@1 purged\n" == printed(
        server_address, "rm", "--purge", f"{saved.name}@1"
    )


@pytest.mark.slow
def test_a_hold_is_renewed_while_the_command_runs(
    server_address: str, saved: store.Run, start: Start
) -> None:
    process = start(f"{saved.name}@1", "--ttl", "1s", "--", "sleep", "60")
    until(lambda: bool(document(server_address, "hold", saved.name)))
    (first,) = document(server_address, "hold", saved.name)
    time.sleep(2.5)

    (later,) = document(server_address, "hold", saved.name)
    kept = refusal(server_address, "rm", "--purge", f"{saved.name}@1")
    process.terminate()

    assert first["expire_time"] < later["expire_time"]
    assert f"kept by hold {first['id']}" in kept
    assert 128 + signal.SIGTERM == process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_the_command_and_its_exit_code_comes_back(
    number: signal.Signals, server_address: str, saved: store.Run, start: Start
) -> None:
    script = (
        "import signal, sys\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(42))\n"
        "print('ready', flush=True)\n"
        "signal.pause()"
    )
    process = start(f"{saved.name}@1", "--", sys.executable, "-c", script)
    assert process.stdout is not None
    assert "ready\n" == process.stdout.readline()

    process.send_signal(number)

    assert 42 == process.wait()
    assert [] == document(server_address, "hold", saved.name)


def test_a_command_that_a_signal_ends_counts_as_shells_count(
    server_address: str, saved: store.Run
) -> None:
    path = f"{saved.name}@1"

    result = storectl(server_address, "hold", path, "--", "sh", "-c", "kill -9 $$")

    assert 128 + signal.SIGKILL == result.exit_code


@pytest.mark.slow
def test_ctrl_c_at_a_terminal_reaches_the_command_once(
    server_address: str, saved: store.Run
) -> None:
    script = (
        "import os, signal, time\n"
        "count = 0\n"
        "def hear(*_):\n"
        "    global count\n"
        "    count += 1\n"
        "signal.signal(signal.SIGINT, hear)\n"
        "os.kill(os.getppid(), signal.SIGSTOP)\n"
        "print('ready', flush=True)\n"
        "while not count: time.sleep(0.05)\n"
        # storectl hears of it only now
        "os.kill(os.getppid(), signal.SIGCONT)\n"
        "time.sleep(1)\n"
        "raise SystemExit(40 + count)"
    )
    path = f"{saved.name}@1"
    arguments = ["-s", server_address, "hold", path, "--", sys.executable, "-c", script]
    spawn = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
    terminal = subprocess.Popen(
        [sys.executable, "-c", spawn, *COMMAND, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert terminal.stdin is not None
    assert terminal.stdout is not None
    assert terminal.stdout.readline().startswith(b"ready")

    terminal.stdin.write(b"\x03")
    terminal.stdin.flush()
    terminal.communicate()

    assert 41 == terminal.returncode


@pytest.mark.slow
def test_a_lost_hold_is_reported(server_address: str, saved: store.Run) -> None:
    path, name = f"{saved.name}@1", saved.name
    ended = (
        "import storesvc_client as store, time\n"
        f"with store.connect({server_address!r}) as client:\n"
        f"    run = client.run({name!r})\n"
        "    (hold,) = run.holds.list()\n"
        "    run.holds.release(hold.id)\n"
        "time.sleep(1.5)"
    )

    arguments = ["hold", path, "--ttl", "1s", "--", sys.executable, "-c", ended]
    result = storectl(server_address, *arguments)

    assert 1 == result.exit_code
    assert f"storectl: the hold on {path} was lost: " in result.stderr


@pytest.mark.slow
def test_a_hold_of_a_client_that_is_gone_is_ended_by_its_id(
    server_address: str, saved: store.Run, start: Start
) -> None:
    process = start(f"{saved.name}@1", "--", "sh", "-c", "echo; sleep 1")
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.wait()
    (found,) = document(server_address, "hold", saved.name)
    delete = ["hold", saved.name, "--delete"]

    said = printed(server_address, *delete, found["id"])

    assert f"hold {found['id']} on {saved.name}@1 deleted\n" == said
    assert "no hold" in refusal(server_address, *delete, found["id"])
    assert "no hold" in refusal(server_address, *delete, "mine")
    nothing = storectl(server_address, "hold", saved.name)
    assert "storectl: no holds\n" == nothing.stderr


def test_a_command_that_cannot_run_has_the_exit_code_of_a_shell(
    server_address: str, saved: store.Run, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("no program")

    for command, code in (("no-such-command", 127), (str(text), 126)):
        result = storectl(server_address, "hold", f"{saved.name}@1", "--", command)

        assert code == result.exit_code
        assert result.stderr.startswith(f"storectl: {command}: ")
    assert [] == document(server_address, "hold", saved.name)


def test_an_absent_checkpoint_is_not_held_and_no_command_runs(
    server_address: str, saved: store.Run, tmp_path: Path
) -> None:
    saved.delete(1)
    made = tmp_path / "made"

    for which, said in (("1", "was deleted"), ("7", "does not exist"), ("x", "no tag")):
        path = f"{saved.name}@{which}"
        assert said in refusal(server_address, "hold", path, "--", "touch", str(made))
    assert not made.exists()


def test_a_hold_of_no_time_is_rejected(server_address: str, saved: store.Run) -> None:
    for ttl in ("0s", "-1s", "31d"):
        arguments = ["hold", f"{saved.name}@1", "--ttl", ttl, "--", "true"]
        assert "ttl: expected" in refusal(server_address, *arguments)


@pytest.mark.slow
def test_a_hold_lasts_through_a_restart_of_the_server(
    start_server: Callable[..., ServerProcess], start: Start
) -> None:
    server = start_server()
    with store.connect(server.address) as client:
        client.run("prod/tiny").save(1, {"w": 1}).result()
        hold = ("prod/tiny@1", "--ttl", "6s", "--", "sleep", "4")
        process = start(*hold, address=server.address)
        until(lambda: bool(list(client.run("prod/tiny").holds.list())))
        server.kill()
        server.start()

        assert 0 == process.wait()


@pytest.mark.parametrize(
    "line",
    [
        *("hold", "hold a", "hold a/b@10", "hold a/b@10 --", "hold a/b -- true"),
        *("hold a/b@10 --json -- true", "hold a/b@10 --delete 0", "hold a/b --ttl 1h"),
        *("hold a/b --owner me", "hold a/b@10 --ttl long -- true"),
        "hold a/b@10:params/** -- true",
    ],
)
def test_contradictory_arguments_are_wrong_usage(line: str) -> None:
    result = storectl("127.0.0.1:1", *line.split())

    assert (2, "") == (result.exit_code, result.stdout)
