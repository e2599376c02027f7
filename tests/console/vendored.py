"""Fetches the files of other projects that the console serves.

``python -m tests.console.vendored`` fetches the versions that ``VENDORED.toml`` names
with ``npm pack``, and writes the files and their sums. To update one, change its
version there, run this, and read the difference.
"""

import re
import subprocess
import tarfile
import tempfile
import tomllib
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import storesvc_client.console

STATIC: Final = Path(storesvc_client.console.__file__).parent / "static"
LIST: Final = STATIC / "VENDORED.toml"


def entries() -> list[dict[str, Any]]:
    """Returns the files that the list names."""
    found: list[dict[str, Any]] = tomllib.loads(LIST.read_text())["file"]
    return found


def sum_of(content: bytes) -> str:
    """Returns the sum of a file."""
    return sha256(content).hexdigest()


def _fetched(package: str, version: str, source: str, folder: Path) -> bytes:
    packed = folder / f"{package}-{version}.tgz"
    if not packed.exists():
        command = ["npm", "pack", f"{package}@{version}", "--silent"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    with tarfile.open(packed) as archive:
        member = archive.extractfile(f"package/{source}")
        assert member is not None, f"{packed.name} has no file {source}"
        return member.read()


def main() -> None:
    """Fetches the files."""
    text = LIST.read_text()
    with tempfile.TemporaryDirectory() as folder:
        for entry in entries():
            content = _fetched(
                entry["package"], entry["version"], entry["source"], Path(folder)
            )
            (STATIC / entry["path"]).write_bytes(content)
            text = re.sub(entry["sha256"], sum_of(content), text)
    LIST.write_text(text)


if __name__ == "__main__":
    main()
