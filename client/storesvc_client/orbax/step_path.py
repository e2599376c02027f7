"""A path in a run, as loops form it from ``manager.directory``.

>>> (manager.directory / "100" / "iter").exists()
True

It names a step, an item of it, or a folder or a file that a handler wrote, and reads as
a path does. It is no path of a file system: ``os.fspath`` rejects it, as no file is
there.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from etils.epath.stat_utils import StatResult

from storesvc_client._api.run import Run
from storesvc_client.errors import InvalidRequestError, NotFoundError
from storesvc_client.orbax.handler_files import read_files
from storesvc_client.orbax.step_errors import StepMissingError
from storesvc_client.orbax.step_items import read_record


@dataclass(frozen=True, slots=True)
class StepPath:
    """The run itself, or a step, an item, or something that a handler wrote in it.

    Reading what is not there raises ``StepMissingError``.
    """

    run: Run
    parts: tuple[str, ...] = ()
    """Step, item, and the parts of the name of a file."""

    def __truediv__(self, part: object) -> "StepPath":
        more = [each for each in str(part).split("/") if each not in ("", ".")]
        return StepPath(self.run, (*self.parts, *more))

    def __lt__(self, other: "StepPath") -> bool:
        return self.parts < other.parts

    def __str__(self) -> str:
        address = self.run._session.connection.address  # noqa: SLF001 - for messages
        return "/".join((f"{address}#{self.run.name}", *self.parts))

    @property
    def name(self) -> str:
        """Last part; of the run its name."""
        return self.parts[-1] if self.parts else self.run.name

    @property
    def parent(self) -> "StepPath":
        """The path above; of the run itself."""
        return StepPath(self.run, self.parts[:-1])

    def joinpath(self, *parts: object) -> "StepPath":
        """Returns a path below."""
        return self / "/".join(map(str, parts))

    def exists(self) -> bool:
        """Returns whether the run, or what is named in it, is there."""
        return _read(self) is not None

    def is_dir(self) -> bool:
        """Returns whether there may be something below it."""
        return isinstance(_read(self), list)

    def is_file(self) -> bool:
        """Returns whether it is a file of a handler."""
        return isinstance(_read(self), bytes)

    def iterdir(self) -> "Iterator[StepPath]":
        """Returns the steps of the run, the items of a step, or what its handler wrote
        at the top of an item or a folder."""
        found = _read(self)
        if not isinstance(found, list):
            raise self._missing("a run, a step or an item")
        return (self / child for child in found)

    def glob(self, pattern: str) -> "Iterator[StepPath]":
        """Returns what matches a pattern below it, as ``pathlib.Path.glob`` does."""
        found = [self]
        for part in pattern.split("/"):
            if part == "**":
                found = [each for path in found for each in _walk(path)]
            else:
                below = [child for path in found for child in _list(path)]
                found = [child for child in below if fnmatchcase(child.name, part)]
        return iter(found)

    def rglob(self, pattern: str) -> "Iterator[StepPath]":
        """Returns what matches a pattern at any depth below it."""
        return self.glob(f"**/{pattern}")

    def read_bytes(self) -> bytes:
        """Returns the contents of a file of a handler."""
        found = _read(self)
        if not isinstance(found, bytes):
            raise self._missing("a file of a handler")
        return found

    def read_text(self, encoding: str | None = None) -> str:
        """Returns the text of a file of a handler."""
        return self.read_bytes().decode(encoding or "utf-8")

    def open(self, mode: str = "r", encoding: str | None = None) -> Any:
        """Returns a file of a handler, open to be read."""
        if mode not in ("r", "rt", "rb"):
            raise InvalidRequestError(
                f"{self}: mode: expected 'r' or 'rb', as a step is written once, got "
                f"{mode!r}; save the change as another step"
            )
        contents = io.BytesIO(self.read_bytes())
        return contents if mode == "rb" else io.TextIOWrapper(contents, encoding)

    def stat(self) -> StatResult:
        """Returns whether it is a folder, its bytes, and the time of the commit."""
        found = _read(self)
        if found is None:
            raise self._missing("something that was saved")
        info = self.run.open(int(self.parts[0])).info if self.parts else None
        return StatResult(
            is_directory=isinstance(found, list),
            length=len(found) if isinstance(found, bytes) else 0,
            mtime=0 if info is None else int(info.commit_time.timestamp()),
        )

    def _missing(self, expected: str) -> StepMissingError:
        return StepMissingError(f"{self}: expected {expected}, got none")


def _walk(path: StepPath) -> Iterator[StepPath]:
    """Returns a path and all below it."""
    yield path
    for child in _list(path):
        yield from _walk(child)


def _list(path: StepPath) -> list[StepPath]:
    """Returns what is at the top of a folder; [] if there is none."""
    found = _read(path)
    return [path / child for child in found] if isinstance(found, list) else []


def _read(path: StepPath) -> list[str] | bytes | None:
    """Returns the names at the top of a folder, or the contents of a file; None if
    nothing is there."""
    if not path.parts:
        try:
            path.run.info()
        except NotFoundError:
            return None
        return [str(step) for step in path.run.steps()]
    step, *below = path.parts
    if not (step.isascii() and step.isdecimal() and str(int(step)) == step):
        return None
    try:
        opened = path.run.open(int(step))
    except NotFoundError:
        return None
    parts = read_record(opened).parts
    if not below:
        return [*parts]
    part = parts.get(below[0])
    if part is None:
        return None
    files = {}
    if part.kind == "files":
        place = f"{opened.name} item {below[0]!r}"
        files = read_files(place, opened.items.per_process(part.place))
    name = "/".join(below[1:])
    if name in files:
        return files[name]
    start = f"{name}/" if name else ""
    inside = [each.removeprefix(start) for each in files if each.startswith(start)]
    if not inside and name:
        return None
    return sorted({each.split("/")[0] for each in inside})
