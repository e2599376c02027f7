"""Checkpoints of Orbax, versions 0 and 1: managers, single steps, and single trees.

::

    ROOT/STEP/                    step of a manager: [PREFIX_]STEP, zero padded or not
      _CHECKPOINT_METADATA        JSON: times, metrics, custom metadata
      commit_success.txt          written last, where a rename is not atomic
      ITEM/_METADATA              an item that is a tree, see ``orbax_metadata.py``
      ITEM/manifest.ocdbt, d/     its arrays, or a folder for each array
      ITEM/...                    any other item: JSON, states of iterators, files

Source of the format: orbax-checkpoint 0.12, ``_src/path/step.py`` for names of steps
and unfinished ones, ``_src/metadata/`` for the files, ``_src/serialization/`` for
arrays. Leaves have the keys of the tree if an item "default" or "state" is the only
tree, else ``ITEM/...``.

Which item is what is decided by its files, never by the names of handlers. The bytes of
items that are no trees are passed on as they are; only JSON that storesvc stores itself
becomes a JSON item.

An item that cannot be read, because it is damaged or of an unknown form, does not hide
the others: ``ForeignStep.unread`` names it with the reason. If none can be read, the
error of the first one is raised.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from storesvc.format.keys import MAX_ITEMS
from storesvc.format.trees import PYTHON_DTYPES, Leaf, SavedSharding
from storesvc.storage.threads import Threads
from storesvc_client._foreign.bounded_json import as_object, read_json
from storesvc_client._foreign.foreign_step import ForeignRoot, ForeignStep, UnreadItem
from storesvc_client._foreign.formats import orbax_metadata as metadata
from storesvc_client._foreign.formats.orbax_metadata import Entry, TreeMetadata
from storesvc_client._foreign.locations import Location, checked_path
from storesvc_client._foreign.steps import (
    Row,
    encoded_row,
    file_item_row,
    item_name,
    item_row,
    join,
    make_tree,
    names_text,
    place,
    stamp_folders,
)
from storesvc_client._foreign.zarr_arrays import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    ArrayPlace,
    TensorStoreArray,
    database_base,
    ocdbt,
    open_arrays,
)
from storesvc_client._items.values import Container, pack_container_document
from storesvc_client._views.texts import unicode_text
from storesvc_client.errors import (
    DataLossError,
    LimitError,
    NotFoundError,
    PreconditionError,
    StoreError,
)
from storesvc_proto.v1 import tree_pb2 as pb

COMMITTED: Final = "commit_success.txt"
JSON_FILES: Final = (["metadata"], ["data.json"])
"""Files of a JSON item, of version 0 and of version 1."""

METRICS: Final = "metrics"
"""Name of the item with the metrics of a step, and of its file."""

MAX_FILES: Final = 1000
"""Maximum files of an item; a checkpoint holds at most 64 items."""

_PROCESS: Final = re.compile(r"process_(0|[1-9]\d{0,5})-of-([1-9]\d{0,5})\.json")
"""Files of the states of Grain's iterators."""


def files_below(location: Location, folder: str) -> list[str]:
    """Returns the paths of all files below a folder, relative to it."""
    found: list[str] = []
    left = [""]
    while left:
        inside = left.pop()
        for name in location.names(f"{folder}/{inside}".rstrip("/")):
            path = f"{inside}{name}"
            if name.endswith("/"):
                left.append(path)
            elif name != COMMITTED:
                found.append(path)
            if len(found) + len(left) > MAX_FILES:
                raise PreconditionError(
                    f"{location.url}/{folder}: expected an item of at most {MAX_FILES} "
                    "files, got more; restore it with its own library"
                )
    return sorted(found)


def as_metrics(value: Any) -> Mapping[str, float] | None:
    """Returns a JSON value as metrics; None if it is none. Orbax writes NaN and
    infinite metrics as Python's JSON does, and reads them again."""
    if not isinstance(value, dict) or not all(
        type(number) in (int, float) for number in value.values()
    ):
        return None
    try:
        return {name: float(number) for name, number in value.items()}
    except OverflowError:  # an integer larger than every float
        return None


def item_rows(location: Location, folder: str, item: str) -> Iterator[tuple[str, Row]]:
    """Yields the rows of an item that is no tree, each with the path that its name is
    for.
    """
    files = files_below(location, folder)
    if files in JSON_FILES:
        path = f"{folder}/{files[0]}"
        value, _ = read_json(location, path)
        try:
            row = item_row(item_name(item), value, name=f"{location.url}/{path}")
        except StoreError:  # such as NaN, which is no JSON
            row = file_item_row(location, path, item_name(item))
        yield item, row
        return
    processes = [_PROCESS.fullmatch(name) for name in files]
    states = [found for found in processes if found is not None]
    if states and len(states) == len(files):
        for row in _state_rows(location, folder, item_name(item), states):
            yield item, row
        return
    for path in files:
        full = item if len(files) == 1 else f"{item}/{path}"
        yield full, file_item_row(location, f"{folder}/{path}", item_name(full))


def _state_rows(
    location: Location, folder: str, item: str, states: list[re.Match[str]]
) -> Iterator[Row]:
    count = int(states[0][2])
    numbers = sorted(int(found[1]) for found in states)
    if numbers != list(range(count)) or any(int(each[2]) != count for each in states):
        raise PreconditionError(
            f"{location.url}/{folder}: expected the states of the processes 0 to "
            f"{count - 1}, got {len(states)}: {states[0][0]}, ...; copy all of them"
        )
    for found in states:
        path = f"{folder}/{found[0]}"
        yield file_item_row(location, path, item, int(found[1]))


STEP_METADATA: Final = "_CHECKPOINT_METADATA"
TREE_METADATA: Final = "_METADATA"
SHARDINGS: Final = "_sharding"
STRINGS: Final = "_strings.json"
KEY_IMPLS: Final = "array_metadatas"
INDICATOR: Final = "orbax.checkpoint"
"""Empty file of a checkpoint of version 1."""

UNFINISHED: Final = ".orbax-checkpoint-tmp"
"""Part of the names of steps and items that are being written."""

UNPREFIXED: Final = frozenset({"default", "state"})
"""Names that Orbax gives to the only tree of a step."""

MARKS: Final = frozenset({STEP_METADATA, TREE_METADATA, MANIFEST, INDICATOR, COMMITTED})
"""Files that a root of a manager does not have."""

UNREADABLE: Final = (DataLossError, LimitError, NotFoundError, PreconditionError)
"""Errors of an item; with others, such as a storage that does not answer, the same read
may succeed later."""

_TREE_MARKS: Final = frozenset({TREE_METADATA, MANIFEST, "checkpoint"})
"""Files of items that are trees; the last one is that of the oldest versions."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SEARCHED: Final = 16


def list_folders(names: Iterable[str]) -> list[str]:
    """Returns the folders among the names in a step, without unfinished ones."""
    return [
        name.rstrip("/")
        for name in names
        if name.endswith("/") and UNFINISHED not in name
    ]


def is_checkpoint(location: Location, folder: str, names: Iterable[str]) -> bool:
    """Returns whether a folder, of which the names are given, is a checkpoint itself:
    no item has metadata of a step, or an item in it."""
    names = list(names)
    return not {STEP_METADATA, INDICATOR}.isdisjoint(names) or any(
        TREE_METADATA in location.names(join(folder, each))
        for each in list_folders(names)[:_SEARCHED]
    )


def check_is_step(location: Location, folder: str) -> None:
    """Rejects a folder that holds checkpoints, such as ``run_1/`` with the steps of
    another manager.
    """
    names = location.names(folder)
    if not MARKS.isdisjoint(names):
        return
    found = [
        each
        for each in list_folders(names)[:_SEARCHED]
        if is_checkpoint(location, at := join(folder, each), location.names(at))
    ]
    if found:
        raise PreconditionError(
            f"{place(location, folder)}: expected one step, got a folder of the "
            f"checkpoints {names_text(found)}; use orbax:{place(location, folder)}"
            + ("" if found[0].isdecimal() else f"/{found[0]}")
        )


@dataclass(slots=True, eq=False)
class StepReader:
    """Reads what describes one step."""

    location: Location
    folder: str
    step: int
    without: frozenset[str]
    """Names of the items to leave out."""
    rows: list[Row] = field(default_factory=list)
    containers: list[Container] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    verified: int = 0
    """Number of rows of which reading compares checksums."""
    described: Any = field(default_factory=hashlib.sha256)
    """Digest of the files that describe the step."""
    names: dict[str, str] = field(default_factory=dict)
    """Path of each item that is no tree, by its name in the checkpoint."""
    unread: list[UnreadItem] = field(default_factory=list)
    """Items that cannot be read."""
    error: StoreError | None = None
    """Error of the first one."""

    @property
    def url(self) -> str:
        """Location of the step."""
        return join(self.location.url, self.folder)

    def read(self) -> ForeignStep:
        """Returns the step; see ``ForeignRoot.open``."""
        names = self.location.names(self.folder)
        created = self._step_metadata() if STEP_METADATA in names else None
        if {TREE_METADATA, MANIFEST}.isdisjoint(names):
            self._items(names)
        elif self.without:
            raise self._absence(())
        else:
            self._tree_item("", "", names)
        tree, arrays = make_tree(
            self.rows,
            place=self.url,
            advice="import a part of it, or write it again with other names",
            structure=pack_container_document(self.containers),
        )
        return ForeignStep(
            step=self.step,
            url=self.url,
            format="orbax",
            tree=tree,
            arrays=arrays,
            create_time=created,
            metrics=self.metrics,
            labels={**self.location.labels(), **self.labels},
            digest=self.described.hexdigest(),
            verified_count=self.verified,
            unread=tuple(self.unread),
        )

    def _json(self, path: str) -> Any:
        value, data = read_json(self.location, path)
        self._describes(path, data)
        return value

    def _describes(self, path: str, data: bytes) -> None:
        start = f"{path}\0{len(data)}\0".encode(errors="surrogateescape")
        self.described.update(start + data)

    def _step_metadata(self) -> datetime | None:
        """Takes times, metrics and custom metadata; returns the time of the writing."""
        path = join(self.folder, STEP_METADATA)
        fields = as_object(self._json(path), what=f"{self.location.url}/{path}")
        self.metrics.update(as_metrics(fields.get("metrics") or {}) or {})
        self._label("orbax.custom_metadata", fields.get("custom_metadata"))
        created = _moment(fields.get("init_timestamp_nsecs"))
        committed = _moment(fields.get("commit_timestamp_nsecs"))
        if committed is not None:
            self.labels["orbax.commit_time"] = committed.isoformat()
        return created or committed

    def _label(self, name: str, value: Any) -> None:
        if value:
            self.labels[name] = json.dumps(value, sort_keys=True)

    def _items(self, names: Sequence[str]) -> None:
        """Reads the items of the step, each of which may be damaged alone."""
        found = list_folders(names)
        if not self.without.issubset(found):
            raise self._absence(found)
        listed: dict[str, Sequence[str]] = {}
        for item in found:
            with self._alone(item, is_tree=True):
                listed[item] = self.location.names(join(self.folder, item))
        # Keys depend neither on damage nor on what is left out.
        trees = [item for item in listed if not _TREE_MARKS.isdisjoint(listed[item])]
        for item, inside in listed.items():
            if item in self.without:
                continue
            is_tree = item in trees
            with self._alone(item, is_tree=is_tree):
                if is_tree:
                    is_alone = trees == [item] and item in UNPREFIXED
                    self._tree_item("" if is_alone else item, item, inside)
                else:
                    self._other_item(item, inside)
        if self.error is not None and not self.rows and not self.containers:
            raise self.error
        if self.without:
            self.labels["orbax.without"] = unicode_text(", ".join(sorted(self.without)))
        if not self.rows and not self.containers:
            raise DataLossError(
                f"{self.url}: expected a step with a folder for each item, such as "
                f"default/, and files in it, got {names_text(names)}; use another "
                "step, or move it away"
            )

    def _absence(self, present: Iterable[str]) -> NotFoundError:
        """Returns the error of items to leave out that are not there."""
        absent = ", ".join(sorted(self.without.difference(present)))
        shown = ", ".join(present) or "one tree and no items"
        return NotFoundError(
            f"{self.url}: expected the items to leave out, {absent}, got {shown}; "
            "name items of the step"
        )

    @contextmanager
    def _alone(self, item: str, *, is_tree: bool) -> Iterator[None]:
        """Reads an item: if it fails, what was read of it is forgotten, and the item is
        one of those that cannot be read."""
        rows, containers, verified = len(self.rows), len(self.containers), self.verified
        labels, metrics, names = {**self.labels}, {**self.metrics}, {**self.names}
        described = self.described.copy()
        try:
            yield
        except UNREADABLE as e:
            del self.rows[rows:], self.containers[containers:]
            self.verified, self.described = verified, described
            self.labels, self.metrics, self.names = labels, metrics, names
            self.error = self.error or e
            if item not in self.without:
                found = UnreadItem(name=item, is_tree=is_tree, reason=str(e))
                self.unread.append(found)

    def _tree_item(self, prefix: str, item: str, names: Sequence[str]) -> None:
        path = join(self.folder, item)
        if TREE_METADATA not in names:
            raise PreconditionError(
                f"{place(self.location, path)}: expected a file {TREE_METADATA}, got a "
                "tree of a version of Orbax before it had one, or that lost it; "
                "restore it with Orbax, and save it again"
            )
        self._tree(prefix, path, names)

    def _other_item(self, item: str, names: Sequence[str]) -> None:
        path = join(self.folder, item)
        if item == METRICS and METRICS in names:
            found = as_metrics(read_json(self.location, join(path, METRICS))[0])
            if found is not None:
                self.metrics.update(found)
                text = json.dumps(dict(found), sort_keys=True)
                self._describes(path, text.encode())
                return
        for original, row in item_rows(self.location, path, item):
            name = item_name(original)
            self._name(name, original, path)
            self.rows.append(row)
            if name != original:
                self.labels[f"orbax.item.{name}"] = unicode_text(original)
        self._describes(path, stamp_folders(self.location, path, [""]))

    def _name(self, name: str, original: str, path: str) -> None:
        """Takes the name of an item; rejects what no checkpoint can hold."""
        other = self.names.setdefault(name, original)
        if other != original:
            raise PreconditionError(
                f"{self.location.url}/{path}: expected a name of its own for each "
                f"item, got {name!r} for {other!r} and for {original!r}; leave it out, "
                "or restore it with its own library"
            )
        if len(self.names) > MAX_ITEMS:
            raise PreconditionError(
                f"{self.location.url}/{path}: expected at most {MAX_ITEMS} items in a "
                "step, of which each of these files is one, got more; leave it out, or "
                "restore it with its own library"
            )

    def _tree(self, item: str, folder: str, names: Sequence[str]) -> None:
        """Reads what describes an item that is a tree."""
        prefix = (item,) if item else ()
        path = join(folder, TREE_METADATA)
        found = metadata.parse_tree(
            f"{self.location.url}/{path}", self._json(path), prefix=prefix
        )
        self.containers += found.containers
        self._label(
            f"orbax.{item}.custom_metadata" if item else "orbax.tree_metadata",
            found.custom_metadata,
        )
        self._strings(folder, found, names)
        shardings: Mapping[str, SavedSharding] = {}
        if SHARDINGS in names:
            at = join(folder, SHARDINGS)
            shardings = metadata.parse_shardings(
                f"{self.location.url}/{at}", self._json(at)
            )
        impls = self._key_impls(folder, names)
        entries = [e for e in found.entries if e.value_type != metadata.STRING]
        is_ocdbt = MANIFEST in names if found.is_ocdbt is None else found.is_ocdbt
        places = self._places(folder, found, entries, is_ocdbt=is_ocdbt)
        for entry, array in zip(
            entries, open_arrays(self.location, places), strict=True
        ):
            leaf = _leaf(entry, array, shardings.get(entry.name), impls.get(entry.name))
            self._describes(entry.key, f"{leaf.dtype}{leaf.shape}".encode())
            self.rows.append(Row(leaf=leaf, array=array, name=entry.name))
            # an absent chunk, where chunks may be absent, has no checksum
            self.verified += found.is_whole and array.has_checksums
        # The digest covers what changes with the elements of arrays.
        if is_ocdbt and entries:  # the manifest names all data, directly or not
            manifest = join(folder, MANIFEST)
            data = self.location.read(manifest, limit=MAX_MANIFEST_BYTES)
            self._describes(manifest, data)
        elif entries:
            paths = [entry.name for entry in entries]
            self._describes(folder, stamp_folders(self.location, folder, paths))

    def _places(
        self,
        folder: str,
        found: TreeMetadata,
        entries: Sequence[Entry],
        *,
        is_ocdbt: bool,
    ) -> Iterator[ArrayPlace]:
        """Yields where arrays are stored."""
        if not entries:
            return
        base = (
            database_base(self.location, folder)
            if is_ocdbt
            else self.location.kvstore(folder)
        )
        for entry in entries:
            if is_ocdbt:
                kvstore = ocdbt(base, f"{entry.name}/")
            else:
                below = entry.name and f"{checked_path(self.url, entry.name)}/"
                kvstore = {**base, "path": f"{base['path']}{below}"}
            yield ArrayPlace(
                name=f"{self.url} leaf {entry.key!r}",
                driver="zarr3" if found.is_zarr3 else "zarr",
                kvstore=kvstore,
                is_whole=found.is_whole,
            )

    def _strings(self, folder: str, found: TreeMetadata, names: Sequence[str]) -> None:
        """Adds the rows of texts."""
        wanted = [e for e in found.entries if e.value_type == metadata.STRING]
        if not wanted:
            return
        path = join(folder, STRINGS)
        place = f"{self.location.url}/{path}"
        texts = as_object(self._json(path) if STRINGS in names else {}, what=place)
        for entry in wanted:
            text = texts.get(entry.name)
            if not isinstance(text, str):
                raise DataLossError(
                    f"{place}: expected a text {entry.name!r}, got {text!r:.40}; use "
                    "another checkpoint"
                )
            data = text.encode(errors="surrogatepass")
            row = (entry.key, entry.path_kinds, pb.LEAF_KIND_TEXT, data)
            self.rows.append(encoded_row(*row, name=entry.name))

    def _key_impls(self, folder: str, names: Sequence[str]) -> dict[str, str]:
        """Returns the implementations of typed PRNG keys, as all processes wrote
        them."""
        found: dict[str, str] = {}
        if f"{KEY_IMPLS}/" not in names:
            return found
        below = join(folder, KEY_IMPLS)
        for name in self.location.names(below):
            if name.startswith("process_"):
                path = f"{below}/{name}"
                place = f"{self.location.url}/{path}"
                found.update(metadata.parse_key_impls(place, self._json(path)))
        return found


def _leaf(
    entry: Entry,
    array: TensorStoreArray,
    sharding: SavedSharding | None,
    impl: str | None,
) -> Leaf:
    """Returns the row of an array."""
    shape, dtype = array.shape, array.dtype
    match entry.value_type:
        case metadata.SCALAR if not shape and dtype in PYTHON_DTYPES:
            kind = pb.LEAF_KIND_PYTHON_SCALAR
        case metadata.SCALAR if not shape:
            kind = pb.LEAF_KIND_HOST_SCALAR
        case metadata.SCALAR | metadata.HOST_ARRAY:
            kind = pb.LEAF_KIND_HOST_ARRAY
        case _:
            kind = pb.LEAF_KIND_ARRAY
    if impl is not None:
        kind = pb.LEAF_KIND_PRNG_KEY
    return Leaf(
        key=entry.key,
        path_kinds=entry.path_kinds,
        kind=kind,
        dtype=dtype,
        shape=shape,
        chunk_shape=array.chunk_shape,
        sharding=sharding,
        prng_impl=impl,
    )


def _moment(nanoseconds: Any) -> datetime | None:
    if type(nanoseconds) is not int or not 0 < nanoseconds < 2**63:
        return None
    return _EPOCH + timedelta(microseconds=nanoseconds // 1000)


_STEP: Final = re.compile(r"(?:.*_)?(\d{1,18})")
_LISTED_AT_ONCE: Final = 16


def open_root(
    location: Location,
    *,
    trust_uncommitted: bool = False,
    without: Collection[str] = (),
) -> "OrbaxRoot":
    """Returns the checkpoints at a location; lists it.

    Args:
        location: A manager's directory, one step of it, or one saved tree.
        trust_uncommitted: Whether a step in a bucket without ``commit_success.txt``
            counts as finished, as one that was copied there from a file system.
        without: Names of items to leave out of each step.

    Raises:
        NotFoundError: The location holds no checkpoints of Orbax.
    """
    root = OrbaxRoot(
        location, trust_uncommitted=trust_uncommitted, without=frozenset(without)
    )
    root.check()
    return root


class OrbaxRoot(ForeignRoot):
    """The checkpoints of Orbax at a location."""

    def __init__(
        self, location: Location, *, trust_uncommitted: bool, without: frozenset[str]
    ) -> None:
        self._location = location
        self._without = without
        self._is_trusted = location.has_renames or trust_uncommitted
        self.url = f"orbax:{location.url}"

    def check(self) -> None:
        """Rejects a location without any step, finished or not."""
        names = self._location.names()
        if not any(_parse_step(name) is not None for name in names):
            self._folders(names)

    def steps(self) -> Sequence[int]:
        folders = self._folders(self._location.names())
        found = [(step, name) for step, each in folders.items() for name in each]
        with Threads(_LISTED_AT_ONCE) as pool:
            finished = pool.map(lambda each: self._is_finished(each[1]), found)
        rows = zip(found, finished, strict=True)
        return sorted({step for (step, _), is_finished in rows if is_finished})

    def open(self, step: int) -> ForeignStep:
        folders = self._folders(self._location.names()).get(step, [])
        finished = [folder for folder in folders if self._is_finished(folder)]
        for folder in finished:
            check_is_step(self._location, folder)
        if len(finished) > 1:
            raise PreconditionError(
                f"{self.url}: expected one folder of step {step}, got "
                f"{' and '.join(finished)}; move one of them away"
            )
        if not finished:
            what = f"an unfinished one, {folders[0]!r}" if folders else "none"
            advice = "list its steps"
            if folders and not self._is_trusted:
                advice = (
                    f"it has no {COMMITTED}: if it was copied from a file "
                    "system, accept it with trust_uncommitted=True "
                    "(--trust-uncommitted)"
                )
            raise NotFoundError(
                f"{self.url}: expected a finished step {step}, got {what}; {advice}"
            )
        return StepReader(
            self._location, finished[0], step, without=self._without
        ).read()

    def _folders(self, names: Sequence[str]) -> dict[int, list[str]]:
        """Returns the folders of each step, finished or not; "" for a location that is
        a step itself."""
        own = self._location.url.rstrip("/").rpartition("/")[2]
        alone = {int(own) if own.isdecimal() and own.isascii() else 0: [""]}
        if UNFINISHED in own:
            raise NotFoundError(
                f"{self.url}: expected finished checkpoints, got one that was being "
                "written; use another one"
            )
        if not MARKS.isdisjoint(names):
            return alone
        found: dict[int, list[str]] = {}
        for name in names:
            step = _parse_step(name)
            if step is not None:
                found.setdefault(step, []).append(name.rstrip("/"))
        if not found and self._has_tree(names):
            return alone
        if not found and not self._is_begun(names):
            raise NotFoundError(
                f"{self.url}: expected checkpoints of Orbax, folders such as 100/ or a "
                f"file {STEP_METADATA}, got {names_text(names)}; check the location "
                "and the format"
            )
        return found

    def _is_begun(self, names: Sequence[str]) -> bool:
        """Returns whether a manager has begun there, without a step so far; an item
        "metadata" of a step that lost its own metadata has the name of a folder of
        older managers."""
        below = self._location.names("metadata") if "metadata/" in names else ()
        return "_ROOT_METADATA" in below or (
            "metadata" in below and list_folders(names) == ["metadata"]
        )

    def _has_tree(self, names: Sequence[str]) -> bool:
        """Returns whether a folder without metadata is a step: one of its folders is a
        tree, and none is a checkpoint itself, as in a folder of checkpoints."""
        folders = list_folders(names)[:_SEARCHED]
        listed = [self._location.names(folder) for folder in folders]
        return any(TREE_METADATA in each for each in listed) and not any(
            is_checkpoint(self._location, folder, each)
            for folder, each in zip(folders, listed, strict=True)
        )

    def _is_finished(self, folder: str) -> bool:
        """Returns whether the writer finished a step: on a file system it renamed it,
        elsewhere it wrote a file last."""
        if not self._is_trusted:
            return self._location.size(join(folder, COMMITTED)) is not None
        return not self._location.is_local or not _is_leftover(self._location, folder)


def _is_leftover(location: Location, folder: str) -> bool:
    """Returns whether there is no file below a folder with the name of a step, as after
    a deletion or a copy that was interrupted."""
    left, listed = [folder], 0
    try:
        while left and listed < _SEARCHED:
            place = left.pop()
            names, listed = location.names(place), listed + 1
            if not all(name.endswith("/") for name in names):
                return False
            left += [join(place, name.rstrip("/")) for name in names]
    except UNREADABLE:
        return False  # opening it says why
    return not left


def _parse_step(name: str) -> int | None:
    """Returns the step of a folder's name; None if it is not that of a step."""
    if not name.endswith("/") or UNFINISHED in name or not name.isascii():
        return None
    found = _STEP.fullmatch(name[:-1])
    return int(found[1]) if found else None
