"""``storectl console`` prints its address, serves, and ends with Ctrl-C."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

import storesvc_client as store
from tests.support.command_line import refusal

COMMAND = [sys.executable, "-m", "storesvc_client.cli"]


@pytest.fixture
def root(tmp_path: Path) -> str:
    """The root of a store with one run."""
    with store.connect(tmp_path.as_uri()) as client:
        client.run("prod/small").save(5, {"w": np.ones(3, np.float32)}).result()
    return tmp_path.as_uri()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_interrupted(root: str, number: int) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--store", root, "console", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        with httpx.Client(follow_redirects=True, verify=False) as browser:
            page = browser.get(address)
        process.send_signal(number)
        _, notes = process.communicate(timeout=60)
    finally:
        process.kill()

    assert address.startswith("http://127.0.0.1:")
    assert 200 == page.status_code
    assert "/r/prod/small@5" in page.text
    assert 0 == process.returncode, notes
    assert f"storectl: console of {root}; Ctrl-C ends it\n" == notes


def test_a_port_in_use_is_explained(root: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        message = refusal(root, "console", "--port", str(port))

    assert f"127.0.0.1:{port}" in message
    assert "--port" in message


def test_a_store_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    assert "holds no store" in refusal(f"{tmp_path}/absent", "console", "--port", "0")


def test_without_its_packages_it_names_the_extra(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        "storesvc_client.cli.commands.serve.find_spec",
        lambda name: None if name == "starlette" else found(name),
    )

    message = refusal(root, "console", "--port", "0")

    assert "starlette" in message
    assert "pip install 'storesvc[console]'" in message


@pytest.mark.slow
def test_other_commands_do_not_load_the_console(root: str) -> None:
    program = (
        "import sys\n"
        "from storesvc_client.cli import main\n"
        f"main(['--store', {root!r}, 'ls'], standalone_mode=False)\n"
        "print(*sys.modules)"
    )

    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    modules = set(run.stdout.splitlines()[-1].split())
    assert set() == modules & {"starlette", "jinja2", "uvicorn"}
    assert not [name for name in modules if name.startswith("storesvc_client.console")]
