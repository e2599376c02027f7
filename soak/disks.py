"""A disk after a power cut: changes that were never synced may be lost.

Replays the log of ``syscalls.c``. A write is durable once its file is synced; a new,
renamed or removed name is durable once its directory is synced. A file whose sync
failed loses its unsynced writes: the kernel reports the error once, and drops the
pages.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from pathlib import Path, PurePath
from typing import Final

from soak import promises

EVERY: Final = int(os.environ.get("SOAK_EVERY", "1"))
"""The power is cut after every so many calls, and after the last."""


class Survivors(Enum):
    """Extreme cases of the unsynced changes that survive."""

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
    """Returns the changes in a log."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [_parse(line) for line in lines]


class Disk:
    """The files of a directory, durable and current, after changes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._top = _durable(root)

    def apply(self, changes: Iterable[Change]) -> None:
        """Applies changes."""
        for change in changes:
            self._apply(change)

    def lay_out(self, directory: Path, survivors: Survivors) -> None:
        """Writes the directory as a power cut would leave it."""
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
        """Returns the directory of a path, and its name there; None for the top."""
        parts = PurePath(path).relative_to(self._root).parts
        if not parts:
            return None, ""
        node: File | Folder | None = self._top
        for part in parts[:-1]:
            node = node.now.get(part) if isinstance(node, Folder) else None
        return (node if isinstance(node, Folder) else None), parts[-1]


def cut_states(
    disk: Disk,
    changes: Sequence[Change],
    expect: Callable[[int], object] = lambda _: None,
) -> Iterator[tuple[int, str, Path]]:
    """Yields each state that a power cut could leave, once: the number of the call
    before the cut, the name of the point, and a folder with the state.

    Args:
        disk: The disk before the changes.
        changes: Calls that change it.
        expect: Returns what to expect after a call; equal states differ by it.
    """
    seen = set[bytes]()
    with promises.scratch_folder() as scratch:
        for number, change in enumerate(changes, start=1):
            disk.apply([change])
            if number % EVERY and number < len(changes):
                continue
            for survivors in Survivors:
                cut = scratch / f"cut-{number}-{survivors.name}"
                disk.lay_out(cut, survivors)
                digest = _digest(cut, expect(number))
                if digest not in seen:
                    seen.add(digest)
                    point = f"after call {number} ({change.kind}) {survivors.value}"
                    yield number, point, cut


def _digest(directory: Path, expected: object) -> bytes:
    """Returns a digest of the files of a disk, and of what to expect there."""
    state = blake2b(repr(expected).encode())
    for path in sorted(directory.rglob("*")):
        state.update(repr(path.relative_to(directory)).encode())
        if path.is_file():
            state.update(b"%d " % path.stat().st_size + path.read_bytes())
    return state.digest()


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
    """Returns a directory that is durable."""
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
