"""docs/tutorial.md: a reader who does what it says sees what it shows.

The scripts are written into a folder, and the commands run there in the order of the
page, over one store.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.document_blocks import ROOT, blocks_of, commands_of, steady

BLOCKS = blocks_of(ROOT / "docs" / "tutorial.md")
STORE = "/tmp/ckpts"
ADDRESS = "127.0.0.1:7070"
SECONDS = 120


class Reader:
    """Does what the page says, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = os.environ | {"COLUMNS": "80"}
        self._server: subprocess.Popen[str] | None = None
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]

    def write(self, name: str, text: str) -> None:
        (self._folder / name).write_text(self._adapted(text))

    def run(self, command: str) -> str:
        """Returns what a command prints, as a shell does that shows it."""
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            self._environment[name] = self._adapted(value)
            return ""
        if command == "kill %1":
            return self._stop()
        if command.endswith(" &"):
            return self._start(command.removesuffix(" &"))
        process = self._process(command)
        printed, _ = process.communicate(timeout=SECONDS)
        assert process.returncode in (0, -signal.SIGKILL), printed
        killed = "Killed\n" if process.returncode else ""
        return self._restored(printed + killed)

    def _process(self, command: str) -> subprocess.Popen[str]:
        program, _, rest = self._adapted(command).partition(" ")
        module = "" if program == "python" else " -m storesvc_client.cli"
        return subprocess.Popen(
            f"exec {sys.executable}{module} {rest}",
            shell=True,
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _start(self, command: str) -> str:
        self._server = self._process(command)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return ""
            assert self._server.poll() is None
            time.sleep(0.1)
        raise AssertionError("the server of the tutorial does not start")

    def _stop(self) -> str:
        assert self._server is not None
        self._server.terminate()
        printed, _ = self._server.communicate(timeout=SECONDS)
        assert 0 == self._server.returncode, printed
        return ""

    def close(self) -> None:
        if self._server is not None and self._server.poll() is None:
            self._server.kill()
            self._server.communicate()

    def _adapted(self, text: str) -> str:
        text = text.replace(STORE, str(self._folder / "ckpts"))
        return text.replace(ADDRESS, f"127.0.0.1:{self._port}").replace(
            "--port 7070", f"--port {self._port}"
        )

    def _restored(self, text: str) -> str:
        return text.replace(str(self._folder / "ckpts"), STORE)


@contextmanager
def reader(folder: Path) -> Iterator[Reader]:
    found = Reader(folder)
    try:
        yield found
    finally:
        found.close()


@pytest.mark.slow
def test_the_tutorial_shows_what_a_reader_sees(tmp_path: Path) -> None:
    with reader(tmp_path) as someone:
        for block in BLOCKS:
            if block.language == "python":
                someone.write(block.title, block.text)
            elif block.language == "console":
                for command, output in commands_of(block.text):
                    assert steady(output) == steady(someone.run(command)), command


def test_each_script_of_the_tutorial_is_run_by_a_command_of_it() -> None:
    scripts = [block.title for block in BLOCKS if block.language == "python"]
    text = "".join(block.text for block in BLOCKS if block.language == "console")

    assert len(scripts) >= 4
    assert sorted(scripts) == sorted(set(re.findall(r"\$ python (\S+)", text)))
