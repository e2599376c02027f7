"""storectl changes checkpoints: tags, updates, deletion, undeletion, purges."""

import errno
import json
import os
import pty
import subprocess
import sys
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from storesvc_client.cli.group import COMMANDS
from tests.support.command_line import (
    document,
    printed,
    refusal,
    storectl,
    table,
)
from tests.support.contract import Writer

COMMAND = [sys.executable, "-m", "storesvc_client.cli"]


@pytest.fixture
def saved(run: store.Run) -> store.Run:
    """A run with the steps 10, 20 and 30, of which a leaf stays the same."""
    same = np.ones(1000, np.float32)
    for step in (10, 20, 30):
        tree = {"params": {"same": same, "w": np.full(3, step, np.float32)}}
        run.save(step, tree, metrics={"loss": 3 - step / 100}).result()
    return run


@pytest.fixture
def ask(server_address: str) -> Callable[..., Any]:
    """Returns what a command prints as JSON."""
    return lambda *arguments: document(server_address, *arguments)


@pytest.fixture
def output(server_address: str) -> Callable[..., str]:
    """Returns what a command prints."""
    return lambda *arguments: printed(server_address, *arguments)


@pytest.fixture
def refused(server_address: str) -> Callable[..., str]:
    """Returns the error message of a command."""
    return lambda *arguments: refusal(server_address, *arguments)


def steps(found: list[dict[str, Any]]) -> list[int]:
    return [checkpoint["step"] for checkpoint in found]


# --- tags -------------------------------------------------------------------------


def test_a_path_takes_a_tag_in_place_of_a_step(
    saved: store.Run, output: Callable[..., str], ask: Callable[..., Any]
) -> None:
    said = output("tag", f"{saved.name}@20", "best")

    assert f"{saved.name}@best is step 20\n" == said
    assert 20 == ask("stat", f"{saved.name}@best")["step"]
    (leaf,) = ask("ls", f"{saved.name}@best:params/w")
    assert "params/w" == leaf["key"]
    (summary,) = ask("get", f"{saved.name}@best:**/w")
    assert 20 == summary["max"]
    assert output("tree", f"{saved.name}@best").startswith(f"{saved.name}@20 ")
    assert output("verify", f"{saved.name}@best").startswith(f"{saved.name}@20: ")


def test_tags_are_listed_by_name_and_move(
    saved: store.Run, output: Callable[..., str], ask: Callable[..., Any]
) -> None:
    output("tag", f"{saved.name}@10", "prod", "--protected")
    output("tag", f"{saved.name}@10", "best")
    output("tag", f"{saved.name}@latest", "best")

    header, best, prod = table(output("tag", saved.name))

    assert ["TAG", "STEP", "SET", "PROTECTED"] == header
    assert ["best", "30", "no"] == [best[0], best[1], best[3]]
    assert ["prod", "10", "yes"] == [prod[0], prod[1], prod[3]]
    first, _ = ask("tag", saved.name)
    assert ["best", 30, False] == [first[k] for k in ("name", "step", "protected")]
    assert first["update_time"].endswith("Z")


def test_a_tag_is_deleted_by_its_name(
    saved: store.Run, output: Callable[..., str], ask: Callable[..., Any]
) -> None:
    for name in ("one", "two"):
        output("tag", f"{saved.name}@10", name)

    assert f"tag one of {saved.name} deleted\n" == output(
        "tag", saved.name, "one", "--delete"
    )
    gone = ask("tag", saved.name, "two", "--delete")

    assert {"run": saved.name, "tag": "two", "deleted": True} == gone
    assert [] == ask("tag", saved.name)


def test_a_protected_tag_moves_with_its_etag_and_stays_protected(
    saved: store.Run,
    output: Callable[..., str],
    ask: Callable[..., Any],
    refused: Callable[..., str],
) -> None:
    name, path = saved.name, f"{saved.name}@20"
    etag = ask("tag", f"{name}@10", "prod", "--protected")["etag"]

    assert f"'storectl tag {name} --json' shows" in refused("tag", path, "prod")
    assert "--etag" in refused("tag", name, "prod", "--delete")
    assert f"{name}@prod is step 20, protected\n" == output(
        "tag", path, "prod", "--etag", etag
    )
    assert "it has changed since" in refused("tag", path, "prod", "--etag", etag)
    # as it is in JSON, and as a shell that took the quotes off passes it on
    (moved,) = ask("tag", name)
    bare = moved["etag"].strip('"')
    free = ask("tag", path, "prod", "--unprotected", "--etag", bare)
    assert not free["protected"]


def test_an_absent_tag_is_an_error_that_names_similar_tags(
    saved: store.Run, output: Callable[..., str], refused: Callable[..., str]
) -> None:
    output("tag", f"{saved.name}@10", "best")

    for arguments in (
        ["stat", f"{saved.name}@bets"],
        ["get", f"{saved.name}@bets:**"],
        ["tag", f"{saved.name}@bets", "good"],
        ["tag", saved.name, "bets", "--delete"],
    ):
        sentence = refused(*arguments)
        assert f"has no tag bets; did you mean {saved.name}@best?" in sentence


def test_a_deleted_checkpoint_cannot_be_tagged_or_updated(
    saved: store.Run, output: Callable[..., str], refused: Callable[..., str]
) -> None:
    path = f"{saved.name}@10"
    output("rm", path)

    assert "undelete it before" in refused("tag", path, "best")
    assert "undelete it before" in refused("update", path, "--pin")


@pytest.mark.parametrize(
    "arguments",
    [
        ["tag", "{run}"],
        ["tag", "{run}@10", "best"],
        ["ls", "{run}", "--deleted"],
        ["stat", "{run}@10"],
        ["update", "{run}@10", "--pin"],
        ["rm", "{run}@10"],
        ["undelete", "{run}@10"],
        ["hold", "{run}"],
        ["hold", "{run}@10", "--", "true"],
        ["uploads", "{run}"],
    ],
)
def test_a_run_that_is_not_there_is_one_sentence(
    arguments: list[str], refused: Callable[..., str]
) -> None:
    name = "tests/no-such-run"

    assert name in refused(*(text.format(run=name) for text in arguments))


# --- updates ----------------------------------------------------------------------


def test_update_sets_what_is_given_and_leaves_the_rest(
    saved: store.Run, output: Callable[..., str], ask: Callable[..., Any]
) -> None:
    path = f"{saved.name}@20"
    output("update", path, "--label", "stage=a=b c", "--label", "by=me", "--pin")

    both = ["--metric", "eval/loss=2.5", "--remove-label", "by", "--remove-label", "x"]
    text = output("update", path, *both)

    assert [
        [path],
        ["pinned", "yes"],
        ["metrics", "eval/loss=2.5 loss=2.8"],
        ["labels", "stage='a=b c'"],
    ] == table(text)
    found = ask("update", path, "--unpin", "--remove-metric", "loss")
    assert [False, {"eval/loss": 2.5}] == [found["pinned"], found["metrics"]]


@pytest.mark.slow
def test_updates_at_once_lose_nothing(server_address: str, saved: store.Run) -> None:
    path = f"{saved.name}@20"
    update = [*COMMAND, "-s", server_address, "update", path, "--json"]

    updates = [
        subprocess.Popen([*update, "--metric", f"m{n}={n}"], stdout=subprocess.DEVNULL)
        for n in range(4)
    ]

    assert [0] * 4 == [process.wait() for process in updates]
    metrics = saved.checkpoint(20).metrics
    assert {f"m{n}": n for n in range(4)} | {"loss": 2.8} == metrics


# --- deletion ---------------------------------------------------------------------


def test_rm_prints_how_to_undelete_and_until_when(
    saved: store.Run, output: Callable[..., str], ask: Callable[..., Any]
) -> None:
    path = f"{saved.name}@20"

    said = output("rm", path, "--purge-delay", "12h")

    start, end = f"{path} deleted; until ", f": storectl undelete {path}\n"
    assert said.startswith(start)
    assert said.endswith(end)
    until = datetime.fromisoformat(said.removeprefix(start).removesuffix(end))
    assert abs(until - datetime.now(UTC) - timedelta(hours=12)) < timedelta(minutes=5)
    assert [30, 10] == steps(ask("ls", saved.name))
    assert f"{path} undeleted\n" == output("undelete", path)
    assert [30, 20, 10] == steps(ask("ls", saved.name))


def test_rm_takes_several_checkpoints_and_continues_after_an_error(
    server_address: str, saved: store.Run, ask: Callable[..., Any]
) -> None:
    saved.tags.set("best", 10)
    paths = [f"{saved.name}@{step}" for step in (10, 20, 25, 30)]

    result = storectl(server_address, "rm", *paths, "--json")

    assert 1 == result.exit_code
    one, other = (
        json.loads(line)["error"]["message"] for line in result.stderr.splitlines()
    )
    assert one.startswith(f"{paths[0]} is kept by tag best; ")
    assert other.startswith(f"{paths[2]} does not exist; ")
    assert [30, 20] == steps(ask("ls", saved.name, "--deleted"))
    assert [20, 30] == steps(ask("undelete", paths[1], paths[3]))


def test_a_pinned_or_tagged_checkpoint_is_not_deleted(
    saved: store.Run, refused: Callable[..., str]
) -> None:
    saved.update(10, pinned=True)
    saved.tags.set("best", 20)

    for options in [], ["--purge"]:
        assert "is kept by a pin" in refused("rm", f"{saved.name}@10", *options)
        assert "is kept by tag best" in refused("rm", f"{saved.name}@20", *options)
    assert [30, 20, 10] == [checkpoint.step for checkpoint in saved.checkpoints()]


def test_deleted_ones_are_listed_with_their_times(
    saved: store.Run, output: Callable[..., str], server_address: str
) -> None:
    nothing = storectl(server_address, "ls", saved.name, "--deleted")
    assert ("", "storectl: no deleted checkpoints\n") == (
        nothing.stdout,
        nothing.stderr,
    )
    output("rm", f"{saved.name}@10", f"{saved.name}@20", "--purge-delay", "0s")

    header, newest, oldest = table(output("ls", saved.name, "--deleted"))

    assert ["STEP", "DELETED", "PURGE", "SIZE", "loss", "LABELS"] == header
    assert ["20", "10"] == [newest[0], oldest[0]]
    assert "2.8" in newest


def test_a_purge_is_permanent_and_frees_the_step(
    saved: store.Run,
    output: Callable[..., str],
    ask: Callable[..., Any],
    refused: Callable[..., str],
) -> None:
    path = f"{saved.name}@20"
    output("rm", f"{saved.name}@10")

    assert f"{path} purged\n" == output("rm", "--purge", path)
    (other,) = ask("rm", "--purge", "--yes", f"{saved.name}@10")

    assert [10, True] == [other["step"], other["purged"]]
    assert f"{path} does not exist" in refused("undelete", path)
    assert [] == ask("ls", saved.name, "--deleted")
    saved.save(20, {"w": 1}).result()


def test_a_purge_of_what_is_held_leaves_it_deleted(
    saved: store.Run, refused: Callable[..., str], ask: Callable[..., Any]
) -> None:
    path = f"{saved.name}@20"

    with saved.holds.create(20, owner="eval"):
        sentence = refused("rm", "--purge", path)

    assert sentence.startswith(f"{path} is kept by hold ")
    assert "by eval; " in sentence
    assert "until then it stays deleted and can be undeleted" in sentence
    assert [20] == steps(ask("undelete", path))


def on_a_terminal(answer: bytes, *arguments: str) -> tuple[int, str]:
    """Returns the exit code and the output of a command whose prompt is answered."""
    inside, outside = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdin=outside, stdout=outside, stderr=outside
    )
    os.close(outside)
    os.write(inside, answer)
    written = b""
    try:  # a terminal whose last writer has gone answers with an error
        while part := os.read(inside, 4096):
            written += part
    except OSError as e:
        assert errno.EIO == e.errno
    os.close(inside)
    return process.wait(), written.decode()


@pytest.mark.slow
def test_a_purge_asks_on_a_terminal(server_address: str, saved: store.Run) -> None:
    arguments = ["-s", server_address, "rm", "--purge", f"{saved.name}@20"]

    code, text = on_a_terminal(b"\n", *arguments)
    assert 1 == code
    assert f"Purge {saved.name}@20 permanently? [y/N]" in text
    assert 20 == saved.checkpoint(20).step

    code, text = on_a_terminal(b"y\n", *arguments)
    assert 0 == code
    assert f"{saved.name}@20 purged" in text
    code, text = on_a_terminal(b"", *arguments[:-1], "--yes", f"{saved.name}@10")
    assert (0, f"{saved.name}@10 purged") == (code, text.strip())


# --- stat -------------------------------------------------------------------------


def test_stat_shows_uid_tags_and_base_of_a_checkpoint(
    saved: store.Run, output: Callable[..., str], ask: Callable[..., Any]
) -> None:
    path = f"{saved.name}@20"
    saved.tags.set("good", 20)
    saved.tags.set("best", 20)
    saved.update(20, pinned=True, labels={"stage": "final"})

    rows = dict(row for row in table(output("stat", path))[1:])
    found = ask("stat", path)

    tags = "best (by local), good (by local)"
    assert [tags, "yes", "stage=final", "loss=2.8"] == [
        rows[name] for name in ("tags", "pinned", "labels", "metrics")
    ]
    assert [f"{saved.name}@10", "16 B"] == [rows["base"], rows["own"]]
    assert rows["shared"].startswith("3.9 KiB (4,00")
    assert [["best", "good"], 10, True] == [
        found[name] for name in ("tags", "base_step", "pinned")
    ]
    assert found["stored_bytes"] == found["own_bytes"] + found["shared_bytes"]


def test_stat_shows_a_deleted_checkpoint_too(
    saved: store.Run, output: Callable[..., str], ask: Callable[..., Any]
) -> None:
    path = f"{saved.name}@20"
    output("rm", path)

    rows = table(output("stat", path))
    found = ask("stat", path)

    assert {"deleted", "purge"} < {row[0] for row in rows}
    assert found["delete_time"] < found["purge_time"]
    assert "kinds" not in found  # its leaves are not for reading


# --- uploads ----------------------------------------------------------------------


def test_live_uploads_are_listed_and_aborted(
    server_address: str,
    saved: store.Run,
    output: Callable[..., str],
    ask: Callable[..., Any],
    refused: Callable[..., str],
) -> None:
    writer = Writer(server_address, saved.name, 40, writers=2)
    upload = writer.begin(owner="host a").name.rpartition("/")[2]

    header, row = table(output("uploads", saved.name))
    (found,) = ask("uploads", saved.name)

    titles = ["UPLOAD", "STEP", "BEGAN", "RENEWED", "WRITERS", "WAITS FOR", "OWNER"]
    assert titles == header
    assert [upload, "40", "0 of 2", "0, 1", "host a"] == [*row[:2], *row[4:7]]
    assert [0, 1] == found["unfinished_writers"]
    assert [upload, "live", "600s"] == [found[k] for k in ("id", "state", "lease")]
    abort = ["uploads", saved.name, "--abort", upload]
    assert f"upload {upload} of {saved.name}@40 aborted\n" == output(*abort)
    assert "has already ended" in refused(*abort)
    assert [] == ask("uploads", saved.name)


def test_uploads_of_all_runs_are_listed_even_of_those_without_a_checkpoint(
    server_address: str,
    saved: store.Run,
    output: Callable[..., str],
    ask: Callable[..., Any],
) -> None:
    namespace = f"uploads-{uuid.uuid4().hex[:8]}"
    began = {}
    for name in (f"{namespace}/a", f"{namespace}/b", saved.name):
        writer = Writer(server_address, name, 40)
        began[name] = writer.begin().name.rpartition("/")[2]

    header, first, second = table(output("uploads", namespace))
    everywhere = {found["run"]: found["id"] for found in ask("uploads")}

    assert ["RUN", "UPLOAD", "STEP"] == header[:3]
    of_namespace = [[n, i, "40"] for n, i in began.items() if n != saved.name]
    assert of_namespace == [first[:3], second[:3]]
    assert began == {name: everywhere[name] for name in began}
    none = storectl(server_address, "uploads", f"{namespace}-other")
    assert (0, "", "storectl: no uploads\n") == (
        none.exit_code,
        none.stdout,
        none.stderr,
    )


def test_du_shows_a_run_whose_first_save_is_in_progress(
    server_address: str, output: Callable[..., str], ask: Callable[..., Any]
) -> None:
    namespace = f"uploads-{uuid.uuid4().hex[:8]}"
    Writer(server_address, f"{namespace}/first", 1).begin()

    header, row = table(output("du", namespace))

    assert ["RUN", "CHECKPOINTS", "UPLOADS"] == header[:3]
    assert [f"{namespace}/first", "0", "1"] == row[:3]
    assert 1 == ask("du", f"{namespace}/first")["upload_count"]


def test_only_a_live_upload_can_be_aborted(
    server_address: str,
    saved: store.Run,
    ask: Callable[..., Any],
    refused: Callable[..., str],
) -> None:
    committed = saved.checkpoint(10).uid
    abort = ["uploads", saved.name, "--abort"]

    assert f"'storectl rm {saved.name}@10'" in refused(*abort, committed)
    assert "has no upload 0000" in refused(*abort, "0" * 32)
    assert "expected 32 lower-case hexadecimal digits" in refused(*abort, "x")
    upload = Writer(server_address, saved.name, 40).begin().name.rpartition("/")[2]
    assert "ended" == ask(*abort, upload)["state"]
    assert 10 == saved.checkpoint(10).step


# --- wrong usage ------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["tag", "a/b@10"],
        ["tag", "a/b", "best"],
        ["tag", "a/b", "--delete"],
        ["tag", "a/b@10", "best", "--delete"],
        ["tag", "a/b@10", "latest"],
        ["tag", "a/b@10", "1st"],
        ["tag", "a/b@10:params/**", "best"],
        ["stat", "a/b@best."],
        ["stat", "a/b@"],
        ["ls", "--deleted"],
        ["ls", "a", "--deleted"],
        ["ls", "a/b@10", "--deleted"],
        ["update", "a/b@10"],
        ["update", "a/b@10", "--label", "stage"],
        ["update", "a/b@10", "--label", "=x"],
        ["update", "a/b@10", "--metric", "loss=low"],
        ["update", "a/b@10", "--label", "x=1", "--remove-label", "x"],
        ["rm"],
        ["rm", "a/b"],
        ["rm", "a/b@latest"],
        ["rm", "a/b@best"],
        ["rm", "a/b@10:params/**"],
        ["rm", "a/b@10", "--purge-delay", "soon"],
        ["rm", "a/b@10", "--purge-delay", "3"],
        ["rm", "a/b@10", "--purge-delay", "3d", "--purge"],
        ["rm", "a/b@10", "--yes"],
        ["undelete", "a/b@latest"],
        ["uploads", "a", "--abort", "0" * 32],
        ["uploads", "--abort", "0" * 32],
        ["uploads", "a/b@10"],
    ],
)
def test_contradictory_arguments_are_wrong_usage(arguments: list[str]) -> None:
    result = storectl("127.0.0.1:1", *arguments)

    assert (2, "") == (result.exit_code, result.stdout)


@pytest.mark.parametrize("delay", ["-1s", "366d", "999999999d"])
def test_a_delay_out_of_bounds_is_one_sentence(
    delay: str, saved: store.Run, refused: Callable[..., str]
) -> None:
    sentence = refused("rm", f"{saved.name}@10", "--purge-delay", delay)

    assert "purge_delay" in sentence
    assert "expected" in sentence
    assert 10 == saved.checkpoint(10).step


def test_the_summary_of_each_command_fits_into_the_list_of_commands() -> None:
    text = storectl("127.0.0.1:1", "--help").stdout

    listed = text.partition("Commands:")[2].splitlines()[1:]
    assert list(COMMANDS) == [line.split()[0] for line in listed]
    assert [] == [line for line in listed if line.endswith("...")]


def test_a_checkpoint_that_is_not_deleted_is_not_undeleted(
    run: store.Run, server_address: str
) -> None:
    run.save(1, {"x": 1}).result()

    result = storectl(server_address, "undelete", f"{run.name}@1")

    assert (1, f"storectl: {run.name}@1 is not deleted\n") == (
        result.exit_code,
        result.stderr,
    )
