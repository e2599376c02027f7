"""Saves and restores the items of one step: trees, JSON values, files of handlers.

A manager keeps a record of the items, metrics and metadata of a step: the item
``orbax`` of the checkpoint, a JSON value. A tree is stored in the tree of the
checkpoint, below the name of its item, or at the root if it is the only one and has
Orbax's default name. A JSON item is an item of the checkpoint; so are the files of a
handler, as one archive for each process. Names of items in a store are narrower than
Orbax's, so the record has both. A step that was saved by other means has no record, and
its tree is the default item.

A handler, such as Grain's, writes files into a directory. They become an archive of the
zip format, without compression and without times, so that equal files are equal bytes
and are stored once. An archive from a store is checked before anything is written: it
can neither leave the directory nor grow.

A ``StepPath`` names a step, an item of it, or a folder or a file that a handler wrote,
as loops form it from ``manager.directory``, and reads as a path does. It is no path of
a file system: ``os.fspath`` rejects it, as no file is there.

>>> (manager.directory / "100" / "iter").exists()
True
"""

import io
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias, get_args

from etils.epath.stat_utils import StatResult

from storesvc.format.keys import MAX_ENCODED_BYTES
from storesvc_client._api.run import Run, get_parts
from storesvc_client._items.values import PerProcess
from storesvc_client.errors import (
    DataLossError,
    InvalidRequestError,
    MismatchError,
    NotFoundError,
)
from storesvc_client.orbax.step_errors import StepMissingError

if TYPE_CHECKING:
    from storesvc_client._restore.checkpoint import OpenCheckpoint

MAX_FILES: Final = 10_000
"""Maximum files of one item; a checkpoint with more belongs into its tree."""

_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
"""First time that a zip archive can have."""


def pack_files(place: str, folder: Path) -> bytes:
    paths = sorted(path for path in folder.rglob("*") if not path.is_dir())
    if len(paths) > MAX_FILES:
        raise InvalidRequestError(
            f"{place}: expected at most {MAX_FILES} files of its handler, got "
            f"{len(paths)}; save arrays with StandardSave"
        )
    size = 0
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for path in paths:
            name = path.relative_to(folder).as_posix()
            if path.is_symlink() or not path.is_file():
                raise InvalidRequestError(
                    f"{place}: expected files of its handler, got {name!r}, which is "
                    "something else"
                )
            size += path.stat().st_size
            if size > MAX_ENCODED_BYTES:
                raise InvalidRequestError(
                    f"{place}: expected at most {MAX_ENCODED_BYTES} bytes of its "
                    f"handler, got more at {name!r}; save arrays with StandardSave"
                )
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), path.read_bytes())
    return packed.getvalue()


def read_files(place: str, archives: Sequence[bytes]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for data in archives:
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                entries = _check_entries(place, archive)
                found = {each.filename: archive.read(each) for each in entries}
        except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError) as e:
            raise _damage(place, str(e)) from e
        for name, contents in found.items():
            if files.setdefault(name, contents) != contents:
                raise MismatchError(
                    f"{place}: expected each process to save other files, or equal "
                    f"ones, got two at {name!r}; restore with as many processes as "
                    "saved it"
                )
    return files


def _check_entries(place: str, archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Returns the entries of an archive that can be written as they are."""
    entries = archive.infolist()
    names = [entry.filename for entry in entries]
    if len(entries) > MAX_FILES or len(set(names)) != len(names):
        raise _damage(place, "too many files, or two of one name")
    folders = {
        str(above) for name in names for above in PurePosixPath(name).parents[:-1]
    }
    for entry in entries:
        name = entry.filename
        parts = name.split("/")  # of a relative path that stays where it is written
        is_plain = {"", ".", ".."}.isdisjoint(parts) and not {"\0", "\\"} & set(name)
        if not is_plain or name in folders:
            raise _damage(place, f"a file {name!r}")
        is_stored = entry.compress_type == zipfile.ZIP_STORED
        if not is_stored or entry.file_size != entry.compress_size:
            raise _damage(place, f"a file {name!r} of another size")
    return entries


def _damage(place: str, got: str) -> DataLossError:
    return DataLossError(
        f"{place}: expected the archive of a handler's files, got {got}; its writer "
        "did not follow the contract, use another checkpoint"
    )


RECORD: Final = "orbax"
"""Item of a checkpoint that has the record."""

DEFAULT_ITEM: Final = "default"
"""Name that Orbax gives to the only item of a step."""

_VERSION: Final = 1

Kind: TypeAlias = Literal["tree", "json", "files"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One item of Orbax in a step."""

    kind: Kind
    place: str
    """Name of the item of the checkpoint; of a tree its first key, "" at the root."""
    custom_metadata: Any = None
    """Metadata that the caller saved with a tree, a value of JSON."""
    handler: str | None = None
    """Class of version 1 that wrote the files; None: a handler of version 0."""

    def value(self) -> dict[str, Any]:
        return {name: each for name, each in asdict(self).items() if each is not None}

    @classmethod
    def parse(cls, row: Any) -> "Part":
        """Returns the part of a value of JSON; raises what another value causes."""
        kind, place = row["kind"], row["place"]
        if kind not in get_args(Kind) or type(place) is not str:
            raise ValueError(f"an item is {row!r}")
        more = {name: row.get(name) for name in ("custom_metadata", "handler")}
        return cls(kind=kind, place=place, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Items, metrics and metadata of a step."""

    parts: Mapping[str, Part]
    """By the name that Orbax's callers use."""
    metrics: Any = None
    custom_metadata: Any = None

    @property
    def is_default(self) -> bool:
        """True if the step has one unnamed item."""
        return DEFAULT_ITEM in self.parts

    def value(self) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "items": {name: part.value() for name, part in self.parts.items()},
            "metrics": self.metrics,
            "custom_metadata": self.custom_metadata,
        }

    @classmethod
    def parse(cls, place: str, value: Any) -> "StepRecord":
        try:
            if value["version"] != _VERSION:
                raise ValueError(f"its version is {value['version']!r}")
            return cls(
                parts={name: Part.parse(row) for name, row in value["items"].items()},
                metrics=value["metrics"],
                custom_metadata=value["custom_metadata"],
            )
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise DataLossError(
                f"{place} item {RECORD!r}: expected a record of version {_VERSION} "
                f"that storesvc_client.orbax wrote, got another value ({e}); upgrade "
                "storesvc, or restore with run.restore"
            ) from e


def plan_parts(
    kinds: Mapping[str, Kind], *, default: str, is_default: bool
) -> dict[str, Part]:
    """Returns the places of the items of a step.

    Args:
        kinds: Kind of each item, by name.
        default: Name of an item whose tree is stored at the root ...
        is_default: ... if it is the only one.
    """
    parts: dict[str, Part] = {}
    for name, kind in kinds.items():
        if not name:
            raise InvalidRequestError("items: expected names, got an empty one")
        if kind == "tree":
            at_root = is_default and name == default and len(kinds) == 1
            parts[name] = Part(kind=kind, place="" if at_root else name)
        else:
            taken = {part.place for part in parts.values()} | {RECORD}
            parts[name] = Part(kind=kind, place=_item_name(name, taken))
    return parts


def _item_name(name: str, taken: Iterable[str]) -> str:
    """Returns a name that an item of a checkpoint may have."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    base = plain if plain[:1].isalpha() else f"item-{plain}".strip("-")
    found, number = base, 1
    while found in taken:
        number += 1
        found = f"{base}-{number}"
    return found


@dataclass(frozen=True, slots=True)
class TreeContent:
    """A pytree of arrays."""

    kind: ClassVar[Kind] = "tree"
    tree: Any
    custom_metadata: Any = None
    """A value of JSON that is kept with it."""


@dataclass(frozen=True, slots=True)
class JsonContent:
    """A value of JSON."""

    kind: ClassVar[Kind] = "json"
    value: Any


@dataclass(frozen=True, slots=True)
class FilesContent:
    """Files that a function writes into a folder."""

    kind: ClassVar[Kind] = "files"
    write: Callable[[Path], object]
    handler: str | None = None
    """Class of version 1 that writes them."""


Content: TypeAlias = TreeContent | JsonContent | FilesContent


def step_contents(
    place: str,
    step: int,
    contents: Mapping[str, Content],
    *,
    default: str,
    is_default: bool,
    metrics: Any,
    custom_metadata: Any,
) -> tuple[Any, dict[str, Any]]:
    """Returns the tree and the items of a step, for ``Run.save``; lets handlers write
    their files now.

    Args:
        place: Name of the step, for messages.
        step: Its number.
        contents: The items by the name that Orbax's callers use.
        default: Name of an item whose tree is stored at the root ...
        is_default: ... if it is the only one.
        metrics: Metrics of the step, a value of JSON, or None.
        custom_metadata: Metadata of the step, a value of JSON, or None.
    """
    import jax

    kinds = {name: content.kind for name, content in contents.items()}
    parts = plan_parts(kinds, default=default, is_default=is_default)
    tree: Any = {}
    items: dict[str, Any] = {}
    for name, content in contents.items():
        part = parts[name]
        match content:
            case TreeContent(tree=found, custom_metadata=custom):
                parts[name] = replace(part, custom_metadata=custom)
                if not jax.tree.leaves(found, is_leaf=lambda x: x is None):
                    raise InvalidRequestError(  # as Orbax does
                        f"{place} item {name!r}: expected a tree with leaves, got none"
                    )
                if part.place:
                    tree[part.place] = found
                else:
                    tree = found
            case JsonContent(value=value):
                items[part.place] = value
            case FilesContent(write=write, handler=handler):
                parts[name] = replace(part, handler=handler)
                with _folder(step, name, part) as folder:
                    write(folder)
                    packed = pack_files(f"{place} item {name!r}", folder)
                items[part.place] = PerProcess(packed)
    record = StepRecord(parts=parts, metrics=metrics, custom_metadata=custom_metadata)
    items[RECORD] = record.value()
    return tree, items


def read_record(opened: "OpenCheckpoint") -> StepRecord:
    """Returns the record of a step; that of a plain checkpoint if it has none."""
    if RECORD not in opened.items:
        return StepRecord(parts={DEFAULT_ITEM: Part(kind="tree", place="")})
    return StepRecord.parse(opened.name, opened.items[RECORD])


def restore_files(
    opened: "OpenCheckpoint", name: str, part: Part, read: Callable[[Path], Any]
) -> Any:
    """Returns what a function reads from a folder with the files of an item.

    The files of all processes that saved some are in it, as they were in one directory
    when they were saved.
    """
    place = f"{opened.name} item {name!r}"
    files = read_files(place, opened.items.per_process(part.place))
    with _folder(opened.info.step, name, part) as folder:
        for file, contents in files.items():
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(contents)
        return read(folder)


@contextmanager
def _folder(step: int, name: str, part: Part) -> Iterator[Path]:
    """Creates a folder whose parent is named as the step: handlers read the name."""
    with tempfile.TemporaryDirectory(prefix="storesvc-orbax-") as root:
        folder = Path(root, str(step), name if name.isidentifier() else part.place)
        folder.mkdir(parents=True)
        yield folder


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
        address = get_parts(self.run).stub.connection.address
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
