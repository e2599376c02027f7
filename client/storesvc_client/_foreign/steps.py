"""Finds the folders of steps below a location, and builds the tree of one step.

The name of a folder states its step, unless its ``metadata.json`` does.

>>> step_of("run-200"), step_of("step_0100"), step_of("100"), step_of("model-7")
(200, 100, 100, None)

The files that describe a step need not change when its elements do. So the digest of a
step covers the stamps of its data files too, unless a file with the checksums or the
names of all of them is part of it.

The tree has the rows in the order and by the rules of ``tree.proto``. Two names of a
checkpoint can become one key, or one the ancestor of the other; such a step is
rejected, and both names are in the message.

A label of a checkpoint has at most 256 bytes; custom metadata of Orbax may be of any
length. A mount has labels of any length. An import stores each longer one as an item,
a text, named by its label: "orbax.custom_metadata" becomes "orbax-custom-metadata".
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain, count
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import numpy as np
import xxhash
from numpy.typing import NDArray

from storesvc.format.grids import Region
from storesvc.format.keys import (
    InvalidItemError,
    InvalidKeyError,
    ItemName,
    is_item,
    join_key,
)
from storesvc.format.trees import (
    InvalidTreeError,
    Leaf,
    Tree,
    pack_leaves,
    unpack_leaves,
)
from storesvc.storage.threads import Threads
from storesvc_client._foreign.bounded_json import parse_object
from storesvc_client._foreign.foreign_step import ForeignArray, ForeignRoot, ForeignStep
from storesvc_client._foreign.locations import Location
from storesvc_client._foreign.raw_chunks import PlainArray
from storesvc_client._items.values import encode_item
from storesvc_client._values.arguments import MAX_TEXT_BYTES
from storesvc_client.errors import DataLossError, NotFoundError, PreconditionError
from storesvc_proto.v1 import tree_pb2 as pb

_STEP: Final = re.compile(
    r"(?:(?:checkpoint|ckpt|global_step|run|step)[-_]?)?([0-9]{1,18})"
)


def parse_step(name: str) -> int | None:
    """Returns the step that the name of a folder states; None if it states none."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def folders_in(names: Iterable[str]) -> list[str]:
    """Returns the folders among names, which end in "/" there."""
    return [name.removesuffix("/") for name in names if name.endswith("/")]


def _index_steps(
    location: Location, steps: Iterable[tuple[int | None, str]]
) -> dict[int, str]:
    """Returns the folder of each step; rejects two folders of one step."""
    found: dict[int, str] = {}
    for step, folder in steps:
        if step is not None and found.setdefault(step, folder) != folder:
            raise PreconditionError(
                f"{location.url}: expected one folder of step {step}, got "
                f"{found[step]!r} and {folder!r}; give the URL of one of them"
            )
    return found


def url_parts(url: str) -> list[str]:
    """Returns the names of the folders in a URL."""
    return [part for part in unquote(urlsplit(url).path).split("/") if part]


def relative_path(path: object, *, what: str) -> str:
    """Returns a path below a step that a file of the step names."""
    parts = path.split("/") if isinstance(path, str) else [".."]
    if any(part in ("", ".", "..") or _UNSAFE.search(part) for part in parts):
        raise DataLossError(
            f"{what}: expected a path below the folder of the step, got "
            f"{ascii(path)[:200]}"
        )
    return "/".join(parts)


def file_name(name: object, *, what: str) -> str:
    """Returns the name of a file in a folder, which a file there names."""
    found = relative_path(name, what=what)
    if "/" in found:
        raise DataLossError(
            f"{what}: expected a file in the same folder, got {ascii(name)[:200]}"
        )
    return found


_UNSAFE: Final = re.compile(r"[\x00-\x1f\x7f\\]|^[A-Za-z]:$")


METADATA: Final = "metadata.json"
"""File in which levanter and eformer state the step; both write it last."""

MAX_METADATA_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetadata:
    """Contents of ``metadata.json``."""

    data: bytes
    """The bytes of the file."""
    fields: Mapping[str, Any]
    step: int | None
    """None if it states none; eformer writes -1 where its caller named none."""
    create_time: datetime | None
    """None if the time has no zone."""


class FolderRoot(ForeignRoot):
    """A root whose steps are folders of a location."""

    def __init__(
        self,
        location: Location,
        scheme: str,
        *,
        find: Callable[[Location], dict[int, str]],
        read: Callable[[Location, str, int], ForeignStep],
        absent: str = "finished step {step}",
        file: str = "",
    ) -> None:
        """Lists nothing yet.

        Args:
            location: The location.
            scheme: Name of the format.
            find: Returns the folder of each finished step.
            read: Reads what describes the step of a folder.
            absent: What a location without a step does not have, for the message.
            file: Name of the one file in the location that is the checkpoint, if any.
        """
        self._location = location
        self._find = find
        self._read = read
        self._absent = absent
        self.url = f"{scheme}:{join(location.url, file)}"

    def steps(self) -> Sequence[int]:
        return sorted(self._find(self._location))

    def open(self, step: int) -> ForeignStep:
        folder = self._find(self._location).get(step)
        if folder is None:
            absent = self._absent.format(step=step)
            raise NotFoundError(f"{self.url}: there is no {absent}")
        return self._read(self._location, folder, step)


def named_steps(
    location: Location,
    *,
    is_finished: Callable[[str, Sequence[str]], bool],
    expected: str,
) -> dict[int, str]:
    """Returns the folder of each step that the name of a folder states.

    The location itself may be a step, which is step 0 if its name states none.

    Args:
        location: Where to search.
        is_finished: Returns whether a folder, of which the names are given, is a step.
        expected: What a location of the format holds, for the message.
    """
    names = location.names()
    if is_finished("", names):
        return {_parse_url_step(location) or 0: ""}
    steps = _index_steps(location, ((parse_step(f), f) for f in folders_in(names)))
    found = {
        step: folder
        for step, folder in steps.items()
        if is_finished(folder, location.names(folder))
    }
    _check_found(location, names, found, is_finished, expected)
    return found


def stated_steps(
    location: Location,
    *,
    is_finished: Callable[[str, Sequence[str]], bool],
    expected: str,
) -> dict[int, str]:
    """Returns the folder of each step that a ``metadata.json`` states; takes what
    ``named_steps`` does.

    The name of at least one of the folders must be that of a step, else each is a
    checkpoint by itself, such as the best ones of several runs.
    """
    names = location.names()
    if is_finished("", names):
        return {_stated_step(location, "", names): ""}
    below = {folder: location.names(folder) for folder in folders_in(names)}
    finished = [folder for folder in below if is_finished(folder, below[folder])]
    if all(parse_step(folder) is None for folder in finished):
        finished = []  # each is a checkpoint by itself, or all are of different runs
    steps = ((_stated_step(location, each, below[each]), each) for each in finished)
    found = _index_steps(location, steps)
    _check_found(location, names, found, is_finished, expected)
    return found


def names_text(names: Sequence[str]) -> str:
    """Returns what a message shows of the names at a location."""
    if not names:
        return "nothing: there is no such folder, or it is empty"
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def read_metadata(location: Location, folder: str) -> StepMetadata:
    """Reads the ``metadata.json`` of a step."""
    path = join(folder, METADATA)
    what = place(location, path)
    data = location.read(path, limit=MAX_METADATA_BYTES)
    fields = parse_object(data, what=what)
    step = fields.get("step")
    if step is not None and (type(step) is not int or not -1 <= step < 2**63):
        raise DataLossError(f"{what}: expected a step, got {ascii(step)[:80]}")
    return StepMetadata(
        data=data,
        fields=fields,
        step=None if step == -1 else step,
        create_time=_time(fields.get("timestamp"), what),
    )


def place(location: Location, folder: str) -> str:
    """Returns the URL of a folder or file of a location."""
    return f"{location.url}/{folder}" if folder else location.url


def join(folder: str, name: str) -> str:
    """Returns the path of a name in a folder; "" is the location, or the folder,
    itself."""
    return f"{folder}/{name}" if folder and name else folder or name


def _check_found(
    location: Location,
    names: Sequence[str],
    found: Mapping[int, str],
    is_finished: Callable[[str, Sequence[str]], bool],
    expected: str,
) -> None:
    """Rejects a location without any step, finished or not: its URL is a wrong one."""
    if found:
        return
    # Folders that look like steps may be runs, such as run-1/ with step-100/.
    begun = [folder for folder in folders_in(names) if parse_step(folder) is not None]
    if not begun or any(
        is_finished(folder, location.names(folder))
        for run in begun
        for name in folders_in(location.names(run))
        if parse_step(name) is not None
        for folder in [join(run, name)]
    ):
        raise NotFoundError(
            f"{location.url}: expected {expected}, got {names_text(names)}; check the "
            "location and the format"
        )


def _stated_step(location: Location, folder: str, names: Sequence[str]) -> int:
    step = read_metadata(location, folder).step if METADATA in names else None
    if step is None:
        step = parse_step(folder) if folder else _parse_url_step(location)
    return step or 0


def _parse_url_step(location: Location) -> int | None:
    (last,) = url_parts(location.url)[-1:] or [""]
    return parse_step(last)


def _time(text: Any, what: str) -> datetime | None:
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
    except (TypeError, ValueError) as e:
        raise DataLossError(
            f"{what}: expected a time, got {ascii(text)[:80]} as timestamp"
        ) from e
    return time if time.tzinfo else None


MAX_FILES: Final = 4_000_000
"""Maximum files and folders of a step."""

_THREADS: Final = 16
"""Folders that are listed at the same time."""

_BATCH: Final = 1024
"""Folders whose lists are held at the same time."""


def stamp_folders(location: Location, folder: str, paths: Iterable[str]) -> bytes:
    """Returns a digest of path and stamp of each file below some folders.

    Args:
        location: Location of the steps.
        folder: Folder of the step; the digest does not depend on its name.
        paths: Paths of the folders relative to that of the step, in an order that
            depends on the step alone; "": the folder of the step.
    """
    digest = xxhash.xxh3_128()
    count = 0
    left = list(paths)
    with Threads(_THREADS) as pool:
        while left:
            below: list[str] = []
            for path, stamp in _list_files(location, folder, left, pool):
                count += 1
                if count > MAX_FILES:
                    raise PreconditionError(
                        f"{place(location, folder)}: expected a step of at most "
                        f"{MAX_FILES} files, got more; write it again in larger chunks"
                    )
                if path.endswith("/"):
                    below.append(path.removesuffix("/"))
                else:
                    row = f"{path}\0{stamp}\0"
                    digest.update(row.encode(errors="surrogateescape"))
            left = below
    return digest.digest()


def _list_files(
    location: Location, folder: str, paths: Sequence[str], pool: Threads
) -> Iterator[tuple[str, str]]:
    """Yields path and stamp of all that is in some folders, in order."""
    for start in range(0, len(paths), _BATCH):
        some = paths[start : start + _BATCH]
        below = [join(folder, path) for path in some]
        for path, found in zip(some, pool.map(location.stamps, below), strict=True):
            for name, stamp in found.items():
                yield join(path, name), stamp


FILE_CHUNK_BYTES: Final = 8 << 20
"""Bytes of a file that are read together."""


MAX_NAME: Final = 63
"""Maximum length of the name of an item."""

_OTHERS: Final = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Row:
    """One row, before it has its place in the tree."""

    leaf: Leaf
    array: ForeignArray
    name: str
    """Name of the array in its format, for messages."""


def array_row(
    parts: Sequence[str],
    array: ForeignArray,
    *,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    chunk_shape: tuple[int, ...],
    path_kinds: str | None = None,
) -> Row:
    """Returns the row of a device array, read in pieces of `chunk_shape`; without
    `path_kinds` all parts of its path are keys of mappings.
    """
    try:
        key = join_key(parts)
    except InvalidKeyError as e:
        raise PreconditionError(f"array {name[:200]!r}: {e}") from e
    leaf = Leaf(
        key=key,
        path_kinds="k" * len(parts) if path_kinds is None else path_kinds,
        kind=pb.LEAF_KIND_ARRAY,
        dtype=dtype,
        shape=shape,
        chunk_shape=chunk_shape,
    )
    return Row(leaf=leaf, array=array, name=name)


def encoded_row(
    key: str, path_kinds: str, kind: "pb.LeafKind.ValueType", data: bytes, *, name: str
) -> Row:
    """Returns the row of an encoded value, such as a text in a tree."""
    leaf = _byte_leaf(key, path_kinds, kind, len(data), chunk_bytes=len(data))
    return Row(leaf=leaf, array=BytesArray(data), name=name)


def item_name(path: str) -> str:
    """Returns the name of an item for a path or a name of another project,
    which may have characters that no name of an item has.

    >>> item_name("model_config"), item_name("assets/vocab.TXT")
    ('model-config', 'assets-vocab-txt')
    """
    name = _OTHERS.sub("-", path.lower()).strip("-")
    name = name if name[:1].isalpha() else f"item-{name}"
    return name[:MAX_NAME].strip("-")


def item_row(item: str, value: Any, *, name: str) -> Row:
    """Returns the row of an item that holds a document next to the arrays."""
    try:
        encoded = encode_item(value)
    except ValueError as e:
        raise DataLossError(f"{name}: {e}") from e
    found = ItemName(item)
    return encoded_row(
        found.key, found.path_kinds, encoded.kind, encoded.data, name=name
    )


def text_row(item: str, data: bytes, *, name: str) -> Row:
    """Returns the row of an item that holds a text file next to the arrays."""
    try:
        return item_row(item, data.decode(), name=name)
    except UnicodeDecodeError as e:
        raise DataLossError(f"{name}: expected UTF-8, got other bytes ({e})") from e


def file_item_row(
    location: Location, path: str, item: str, process: int | None = None
) -> Row:
    """Returns the row of an item that has the bytes of a file, read on demand: the
    value of a process, or of all.
    """
    size = location.size(path)
    name = f"{location.url}/{path}"
    if size is None:
        raise NotFoundError(f"{name}: expected a file, found none")
    found = ItemName(item, process)
    leaf = _byte_leaf(
        found.key,
        found.path_kinds,
        pb.LEAF_KIND_BYTES,
        size,
        chunk_bytes=min(size, FILE_CHUNK_BYTES),
    )
    array = PlainArray(
        location=location,
        path=path,
        start=0,
        shape=leaf.shape,
        dtype=leaf.dtype,
        row=f"item {item!r}",
    )
    return Row(leaf=leaf, array=array, name=name)


def make_tree(
    rows: Iterable[Row], *, place: str, advice: str, structure: bytes = b""
) -> tuple[Tree, tuple[ForeignArray, ...]]:
    """Returns the tree of rows, and the array of each of its rows.

    Args:
        rows: Leaves and items, in any order.
        place: Name of the step in messages.
        advice: What to do if no checkpoint can hold the rows, for the message.
        structure: Document for ``Tree.structure``.

    Raises:
        PreconditionError: No checkpoint can hold the rows: two leaves have one key, or
            one is an ancestor of another, or an item has no valid name.
    """
    ordered = sorted(rows, key=lambda row: (is_item(row.leaf.key), row.leaf.key))
    leaves = tuple(row.leaf for row in ordered)
    # The rules of tree.proto are checked by its reader; chunks may be of any size.
    small = (replace(leaf, chunk_shape=(1,) * len(leaf.shape)) for leaf in leaves)
    try:
        table = pb.LeafTable()
        for part in pack_leaves(Tree(tuple(small), structure)):
            table.MergeFromString(part)
        unpack_leaves(table)
    except (InvalidTreeError, InvalidItemError, ValueError) as e:
        why = _collision([row for row in ordered if not is_item(row.leaf.key)]) or e
        raise PreconditionError(
            f"{place}: a checkpoint cannot hold its arrays: {why}; {advice}"
        ) from e
    return Tree(leaves, structure), tuple(row.array for row in ordered)


def make_step(
    location: Location,
    folder: str,
    rows: Iterable[Row],
    *,
    step: int,
    format: str,  # noqa: A002 - the field
    advice: str = "save it again with other names",
    structure: bytes = b"",
    labels: Mapping[str, str] = MappingProxyType({}),
    **more: Any,
) -> ForeignStep:
    """Returns the step of a folder, with the labels of its location.

    Args:
        location: Location of the steps.
        folder: Folder of the step.
        rows: As for ``make_tree``; so are `advice` and `structure`.
        step: Number of the step.
        format: Name of its format.
        advice: See `rows`.
        structure: See `rows`.
        labels: More labels.
        more: Further fields.
    """
    url = place(location, folder)
    tree, arrays = make_tree(rows, place=url, advice=advice, structure=structure)
    return ForeignStep(
        step=step,
        url=f"{format}:{url}",
        format=format,
        tree=tree,
        arrays=arrays,
        labels={**location.labels(), **labels},
        **more,
    )


class BytesArray(ForeignArray):
    """Bytes in memory."""

    def __init__(self, data: bytes) -> None:
        self._elements = np.frombuffer(data, np.uint8)

    def read(self, region: Region, into: NDArray[Any]) -> "Future[None]":
        ((start, stop),) = region
        into[...] = self._elements[start:stop]
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _byte_leaf(
    key: str,
    path_kinds: str,
    kind: "pb.LeafKind.ValueType",
    size: int,
    *,
    chunk_bytes: int,
) -> Leaf:
    return Leaf(
        key=key,
        path_kinds=path_kinds,
        kind=kind,
        dtype="uint8",
        shape=(size,),
        chunk_shape=(max(1, chunk_bytes),),
    )


def _collision(rows: Sequence[Row]) -> str:
    """Returns a message that names two arrays that cannot be in one tree."""
    known: dict[str, str] = {}
    for row in rows:
        if row.leaf.key in known:
            return (
                f"arrays {known[row.leaf.key]!r} and {row.name!r} have one key, "
                f"{row.leaf.key!r}"
            )
        known[row.leaf.key] = row.name
    for row in rows:
        key = row.leaf.key
        above = (key[:at] for at, c in enumerate(key) if c == "/")
        found = next((known[k] for k in ("", *above) if k in known and k != key), None)
        if found is not None:
            return f"array {found!r} is also a container, of array {row.name!r}"
    return ""


def with_items_for_long_labels(step: ForeignStep) -> ForeignStep:
    """Returns a step whose labels are short enough for a checkpoint."""
    long = {
        label: text
        for label, text in step.labels.items()
        if len(text.encode()) > MAX_TEXT_BYTES
    }
    if not long:
        return step
    rows = [
        Row(leaf=leaf, array=array, name=leaf.key)
        for leaf, array in zip(step.tree.leaves, step.arrays, strict=True)
    ]
    taken = {row.leaf.key for row in rows}
    for label, text in long.items():
        name = item_name(label)
        # An item of that name comes from an earlier import, which was exported.
        more = (f"{name[: MAX_NAME - 4]}-{again}" for again in count(2))
        for item in chain([name], more):
            row = item_row(item, text, name=f"{step.url} {label}")
            if row.leaf.key not in taken:
                break
        rows.append(row)
        taken.add(row.leaf.key)
    tree, arrays = make_tree(
        rows,
        place=step.url,
        advice="import it from a copy with fewer files next to its trees",
        structure=step.tree.structure,
    )
    labels = {label: text for label, text in step.labels.items() if label not in long}
    return replace(step, tree=tree, arrays=arrays, labels=labels)
