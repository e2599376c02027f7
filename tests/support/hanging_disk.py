"""A disk of which single files hang, in a process that is started with it."""

import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_suffix(".c")


class HangingDisk:
    """Lets files hang by their name."""

    def __init__(self, directory: Path) -> None:
        """Compiles what is preloaded; skips the test where there is no compiler."""
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
        """For the process."""

    def hang(self, file: Path) -> None:
        """Lets reads and syncs of a file hang from now on."""
        (self._markers / file.name).touch()

    def go_on(self, file: Path) -> None:
        """Lets them go on."""
        (self._markers / file.name).unlink()
