"""Types lines into a real zsh, and reads what its completion makes of them."""

import os
import pty
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_SECONDS: Final = 60.0
"""Maximum time of one completion."""

_SETUP: Final = """\
autoload -Uz compinit && compinit -u -D
PS1='> '
eval "$(_STORECTL_COMPLETE=zsh_source storectl)"
show() {{ print -rn -- "$BUFFER" > {folder}/part; mv {folder}/part {folder}/line }}
zle -N show
bindkey '^X' show
bindkey '^I' complete-word
touch {folder}/ready
"""


class ZshLine:
    """A zsh at a terminal, whose storectl is the one under test."""

    def __init__(self, terminal: int, folder: Path) -> None:
        self._terminal = terminal
        self._folder = folder

    def completed(self, line: str) -> str:
        """Returns the line after the key Tab, and clears it."""
        found = self._folder / "line"
        found.unlink(missing_ok=True)
        os.write(self._terminal, f"{line}\t\x18".encode())
        text = _read(found)
        os.write(self._terminal, b"\x15")
        return text


@contextmanager
def zsh_line(folder: Path, store: str) -> Iterator[ZshLine]:
    """Starts a zsh whose storectl uses a store.

    Args:
        folder: An empty directory.
        store: The store.
    """
    command = folder / "storectl"
    command.write_text(
        f'#!/bin/sh\nexec {sys.executable} -m storesvc_client.cli "$@"\n'
    )
    command.chmod(0o755)
    (folder / ".zshrc").write_text(_SETUP.format(folder=folder))
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "ZDOTDIR": str(folder),
        "STORECTL_STORE": store,
        "TERM": "xterm",
    }
    zsh = shutil.which("zsh")
    assert zsh
    terminal, inside = pty.openpty()
    # Not pty.fork(): a fork of a process with JAX may block.
    process = subprocess.Popen(
        ["setsid", "--ctty", zsh, "-i"],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env=environment,
    )
    os.close(inside)
    ended = threading.Event()
    thread = threading.Thread(target=_drain, args=(terminal, ended))
    thread.start()
    try:
        _read(folder / "ready")
        yield ZshLine(terminal, folder)
    finally:
        ended.set()
        thread.join()
        process.kill()
        process.wait()
        os.close(terminal)


def _read(file: Path) -> str:
    deadline = time.monotonic() + _SECONDS
    while not file.exists():
        assert time.monotonic() < deadline, file
        time.sleep(0.05)
    return file.read_text()


def _drain(terminal: int, ended: threading.Event) -> None:
    """Reads what the shell shows, so that it does not wait."""
    while not ended.is_set():
        if select.select([terminal], [], [], 0.05)[0]:
            try:
                os.read(terminal, 1 << 16)
            except OSError:  # the shell has ended
                return
