"""A server with an audit log."""

import json
from pathlib import Path
from typing import Any

from tests.support.server_process import ServerProcess


class Audited:
    """A server with an audit log."""

    def __init__(self, tmp_path: Path, log: Path, *arguments: str) -> None:
        self.file = log
        self.server = ServerProcess(
            tmp_path / "store", tmp_path, "--audit-log", str(log), *arguments
        )
        self.server.start()

    def entries(self, *, after: int = 0) -> list[dict[str, Any]]:
        """Returns the lines of the log, after some that are no entries."""
        lines = self.file.read_bytes().splitlines()
        return [json.loads(line) for line in lines[after:]]

    def calls(self) -> list[tuple[str, str]]:
        """Returns the stage and the method of each call."""
        return [
            (entry["stage"], entry["method"])
            for entry in self.entries()
            if "method" in entry
        ]
