"""A server whose file system calls are counted, logged, and made to fail."""

import errno
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Final

from soak.outcomes import CannotRunError
from tests.support.server_process import ServerProcess

WRITES: Final = "create,mkdir,write,truncate"
"""Kinds of calls that allocate space."""


class WatchedServer(ServerProcess):
    """A server of a root that preloads ``syscalls.c``."""

    def __init__(self, root: Path, directory: Path, *arguments: str) -> None:
        super().__init__(root, directory, "--log-level", "error", *arguments)
        self._control = directory / "control"
        self._serial = count()
        self.calls_log = directory / "calls"
        """Log with a line for each call that changed a file."""
        self.environment = {
            "LD_PRELOAD": str(compiled("syscalls.c")),
            # with its parent directory, which has the name of a new root
            "SOAK_ROOT": str(root.parent),
            "SOAK_CONTROL": str(self._control),
        }

    def log_calls(self) -> None:
        """Logs the calls from the next start on."""
        self.environment["SOAK_LOG"] = str(self.calls_log)

    def kill_at(self, number: int) -> None:
        """Kills it before a call by number; the next call is 1."""
        self._break(f"kill {number} once all")

    def fail_at(
        self, number: int, error: int, *, kinds: str, all_that_follow: bool
    ) -> None:
        """Makes a call of some kinds fail, optionally also all later ones."""
        assert error in errno.errorcode
        more = "on" if all_that_follow else "once"
        self._break(f"{error} {number} {more} {kinds}")

    def mend(self) -> None:
        """Ends all failures."""
        self._break("0 0 once all")

    def _break(self, what: str) -> None:
        partial = self._control.with_suffix(".partial")
        partial.write_text(f"{next(self._serial)} {what}\n")
        partial.rename(self._control)


@contextmanager
def watched(root: Path, *arguments: str) -> Iterator[WatchedServer]:
    """Makes a server of a root that is not started, with more arguments."""
    with tempfile.TemporaryDirectory(prefix="storesvc-soak-") as scratch:
        server = WatchedServer(root, Path(scratch), *arguments)
        yield server
        if server.is_running:
            server.kill()


@cache
def compiled(source: str) -> Path:
    """Compiles a file of this folder; returns the library."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise CannotRunError("it takes a C compiler: install gcc")
    library = Path(tempfile.mkdtemp(prefix="storesvc-soak-")) / f"{source}.so"
    path = Path(__file__).with_name(source)
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", library, path, "-ldl"], check=True
    )
    return library
