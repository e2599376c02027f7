"""Makes reads and syncs of single files hang, in a process that preloads a library."""

import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_suffix(".c")


class HangingDisk:
    """Makes files hang, by name."""

    def __init__(self, directory: Path) -> None:
        """Compiles the preloaded library; skips the test if there is no compiler."""
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            pytest.skip("it takes a C compiler")
        self._markers = directory / "hangs"
        self._markers.mkdir(parents=True)
        library = directory / "hanging_disk.so"
        flags = ["-O1", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, "-o", library, _SOURCE, "-ldl"], check=True)
        self.environment = {
            "LD_PRELOAD": str(library),
            "STORESVC_TEST_HANGS": str(self._markers),
        }
        """Environment variables of the process."""

    def hang(self, file: Path) -> None:
        """Makes reads and syncs of a file hang."""
        (self._markers / file.name).touch()

    def go_on(self, file: Path) -> None:
        """Ends all hangs."""
        (self._markers / file.name).unlink()
