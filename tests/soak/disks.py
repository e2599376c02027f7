"""A disk as a power cut leaves it: what was never synced may be gone.

Replays the log of ``syscalls.c``. A write is durable once its file was synced; a name
(of a file, a folder, a renamed or removed one) once the folder that holds it was. A
file whose sync failed has lost what was not durable before: the kernel reports it
once, and forgets the pages.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePath


class Survivors(Enum):
    """What of the unsynced survives, at the extremes."""

    NOTHING = "nothing unsynced survived"
    NAMES = "all names survived, and no unsynced byte"
    BYTES = "all bytes survived, and no unsynced name"


@dataclass(frozen=True, slots=True)
class Change:
    """A line of the log."""

    kind: str
    error: int
    path: str
    more: str
    data: bytes


@dataclass(eq=False)
class File:
    """A file."""

    now: bytes = b""
    durable: bytes = b""


@dataclass(eq=False)
class Folder:
    """A folder."""

    now: "dict[str, File | Folder]" = field(default_factory=dict)
    durable: "dict[str, File | Folder]" = field(default_factory=dict)


def read_log(log: Path) -> list[Change]:
    """Returns the changes of a log."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [_parse(line) for line in lines]


class Disk:
    """A folder, from what is durable in it, through changes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._top = _durable(root)

    def apply(self, changes: Iterable[Change]) -> None:
        """Makes changes."""
        for change in changes:
            self._apply(change)

    def lay_out(self, directory: Path, survivors: Survivors) -> None:
        """Writes what a power cut would leave of the folder."""
        _lay_out(self._top, directory, survivors)

    def _apply(self, change: Change) -> None:
        folder, name = self._folder_of(change.path)
        node = folder.now.get(name) if folder else self._top
        if change.kind == "sync":
            _sync(node, is_done=not change.error)
            return
        if change.error or folder is None:
            return
        match change.kind:
            case "create":
                folder.now[name] = File()
            case "mkdir":
                folder.now[name] = Folder()
            case "unlink" | "rmdir":
                del folder.now[name]
            case "rename":
                target, new = self._folder_of(change.more)
                assert target is not None
                target.now[new] = folder.now.pop(name)
            case "write" if isinstance(node, File):
                at = int(change.more)
                held = node.now.ljust(at, b"\0")
                node.now = held[:at] + change.data + held[at + len(change.data) :]
            case "truncate" if isinstance(node, File):
                length = int(change.more)
                node.now = node.now[:length].ljust(length, b"\0")

    def _folder_of(self, path: str) -> tuple[Folder | None, str]:
        """The folder that holds a path, and its name there; None for the top."""
        parts = PurePath(path).relative_to(self._root).parts
        if not parts:
            return None, ""
        node: File | Folder | None = self._top
        for part in parts[:-1]:
            node = node.now.get(part) if isinstance(node, Folder) else None
        return (node if isinstance(node, Folder) else None), parts[-1]


def _sync(node: File | Folder | None, *, is_done: bool) -> None:
    if isinstance(node, Folder) and is_done:
        node.durable = dict(node.now)
    elif isinstance(node, File) and is_done:
        node.durable = node.now
    elif isinstance(node, File):
        node.now = node.durable


def _names(folder: Folder, survivors: Survivors) -> "dict[str, File | Folder]":
    return folder.now if survivors is Survivors.NAMES else folder.durable


def _lay_out(folder: Folder, directory: Path, survivors: Survivors) -> None:
    directory.mkdir(parents=True)
    for name, node in _names(folder, survivors).items():
        if isinstance(node, Folder):
            _lay_out(node, directory / name, survivors)
        else:
            kept = node.now if survivors is Survivors.BYTES else node.durable
            (directory / name).write_bytes(kept)


def _durable(directory: Path) -> Folder:
    """A folder that is on the disk since long."""
    found = dict(_children(directory))
    return Folder(now=found, durable=dict(found))


def _children(directory: Path) -> "Iterator[tuple[str, File | Folder]]":
    for path in directory.iterdir():
        if path.is_dir():
            yield path.name, _durable(path)
        else:
            data = path.read_bytes()
            yield path.name, File(data, data)


def _parse(line: str) -> Change:
    kind, error, path, more, data = line.split("\t")
    return Change(kind, int(error), path, more, bytes.fromhex(data))
