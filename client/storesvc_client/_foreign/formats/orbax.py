"""Checkpoints of Orbax, versions 0 and 1: managers, single steps, and single trees.

::

    ROOT/STEP/                    step of a manager: [PREFIX_]STEP, zero padded or not
      _CHECKPOINT_METADATA        JSON: times, metrics, custom metadata
      commit_success.txt          written last, where a rename is not atomic
      ITEM/_METADATA              an item that is a tree, see ``orbax_metadata.py``
      ITEM/manifest.ocdbt, d/     its arrays, or a folder for each array
      ITEM/...                    any other item, see ``orbax_items.py``

Source of the format: orbax-checkpoint 0.12, ``_src/path/step.py`` for names of steps
and unfinished ones, ``_src/metadata/`` for the files, ``_src/serialization/`` for
arrays. Leaves have the keys of the tree if an item "default" or "state" is the only
tree, else ``ITEM/...``.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from storesvc.format.trees import PYTHON_DTYPES, Leaf, SavedSharding
from storesvc_client._foreign.bounded_json import as_object, read_json
from storesvc_client._foreign.file_stamps import stamp_of_folders
from storesvc_client._foreign.foreign_step import ForeignStep
from storesvc_client._foreign.formats import orbax_items as items
from storesvc_client._foreign.formats import orbax_metadata as metadata
from storesvc_client._foreign.formats.orbax_metadata import Entry, TreeMetadata
from storesvc_client._foreign.location import Location, checked_path
from storesvc_client._foreign.step_search import names_text
from storesvc_client._foreign.tensorstore_array import TensorStoreArray, ocdbt
from storesvc_client._foreign.tree_rows import Row, encoded_row, tree_of
from storesvc_client._foreign.zarr_arrays import ArrayPlace, open_arrays
from storesvc_client._values.containers import Container, pack_document_of
from storesvc_client.errors import DataLossError, NotFoundError, PreconditionError
from storesvc_proto.v1 import tree_pb2 as pb

STEP_METADATA: Final = "_CHECKPOINT_METADATA"
TREE_METADATA: Final = "_METADATA"
SHARDINGS: Final = "_sharding"
STRINGS: Final = "_strings.json"
KEY_IMPLS: Final = "array_metadatas"
MANIFEST: Final = "manifest.ocdbt"
UNFINISHED: Final = ".orbax-checkpoint-tmp"
"""Part of the names of steps and items that are being written."""

UNPREFIXED: Final = frozenset({"default", "state"})
"""Names that Orbax gives to the only tree of a step."""

_OF_A_STEP: Final = frozenset(
    {STEP_METADATA, TREE_METADATA, MANIFEST, "orbax.checkpoint", items.COMMITTED}
)
"""Files that a root of a manager does not have."""

_STEP: Final = re.compile(r"(?:.*_)?(\d{1,18})")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LISTED_AT_ONCE: Final = 16
_MANIFEST_BYTES: Final = 64 << 20


def open_root(location: Location, *, trust_uncommitted: bool = False) -> "OrbaxRoot":
    """Returns the checkpoints at a location; lists it.

    Args:
        location: A manager's directory, one step of it, or one saved tree.
        trust_uncommitted: Whether a step in a bucket without ``commit_success.txt``
            counts as finished, as one that was copied there from a file system.

    Raises:
        NotFoundError: The location holds no checkpoints of Orbax.
    """
    root = OrbaxRoot(location, trust_uncommitted=trust_uncommitted)
    root.check()
    return root


class OrbaxRoot:
    """The checkpoints of Orbax at a location."""

    def __init__(self, location: Location, *, trust_uncommitted: bool) -> None:
        self._location = location
        self._is_trusted = location.is_local or trust_uncommitted
        self.url: str = f"orbax:{location.url}"

    def check(self) -> None:
        """Rejects a location without any step, finished or not.

        Raises:
            NotFoundError: There is none.
        """
        names = self._location.names()
        if not any(_step_of(name) is not None for name in names):
            self._folders(names)

    def steps(self) -> Sequence[int]:
        """See ``ForeignRoot``."""
        folders = self._folders(self._location.names())
        found = [(step, name) for step, each in folders.items() for name in each]
        with ThreadPoolExecutor(_LISTED_AT_ONCE) as pool:
            finished = pool.map(lambda each: self._is_finished(each[1]), found)
        rows = zip(found, finished, strict=True)
        return sorted({step for (step, _), is_finished in rows if is_finished})

    def open(self, step: int) -> ForeignStep:
        """See ``ForeignRoot``."""
        folders = self._folders(self._location.names()).get(step, [])
        finished = [folder for folder in folders if self._is_finished(folder)]
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
                    f"it has no {items.COMMITTED}: if it was copied from a file "
                    "system, open it with trust_uncommitted=True"
                )
            raise NotFoundError(
                f"{self.url}: expected a finished step {step}, got {what}; {advice}"
            )
        return _StepReader(self._location, finished[0], step).read()

    def _folders(self, names: Sequence[str]) -> dict[int, list[str]]:
        """Returns the folders of each step, finished or not; "" for a location that is
        a step itself.

        Raises:
            NotFoundError: There is none.
        """
        own = self._location.url.rstrip("/").rpartition("/")[2]
        if UNFINISHED in own:
            raise NotFoundError(
                f"{self.url}: expected finished checkpoints, got one that was being "
                "written; use another one"
            )
        if not _OF_A_STEP.isdisjoint(names):
            return {int(own) if own.isdecimal() and own.isascii() else 0: [""]}
        found: dict[int, list[str]] = {}
        for name in names:
            step = _step_of(name)
            if step is not None:
                found.setdefault(step, []).append(name.rstrip("/"))
        if not found and self._has_tree(names):
            return {int(own) if own.isdecimal() and own.isascii() else 0: [""]}
        if not found and not any(name.startswith("metadata/") for name in names):
            raise NotFoundError(
                f"{self.url}: expected checkpoints of Orbax, folders such as 100/ or a "
                f"file {STEP_METADATA}, got {names_text(names)}; check the location "
                "and the format"
            )
        return found

    def _has_tree(self, names: Sequence[str]) -> bool:
        folders = [name for name in names if name.endswith("/")]
        return any(
            TREE_METADATA in self._location.names(folder) for folder in folders[:16]
        )

    def _is_finished(self, folder: str) -> bool:
        """Returns whether the writer finished a step: on a file system it renamed it,
        elsewhere it wrote a file last."""
        return (
            self._is_trusted
            or self._location.size(_join(folder, items.COMMITTED)) is not None
        )


@dataclass(slots=True, eq=False)
class _StepReader:
    """Reads what describes one step."""

    location: Location
    folder: str
    step: int
    rows: list[Row] = field(default_factory=list)
    containers: list[Container] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    verified: int = 0
    """Number of rows of which reading compares checksums."""
    described: Any = field(default_factory=hashlib.sha256)
    """Digest of the files that describe the step."""

    @property
    def url(self) -> str:
        """Location of the step."""
        return _join(self.location.url, self.folder)

    def read(self) -> ForeignStep:
        """Returns the step; see ``ForeignRoot.open``."""
        names = self.location.names(self.folder)
        created = self._step_metadata() if STEP_METADATA in names else None
        if TREE_METADATA in names:
            self._tree("", self.folder, names)
        else:
            self._items(names)
        tree, arrays = tree_of(
            self.rows,
            place=self.url,
            advice="import a part of it, or write it again with other names",
            structure=pack_document_of(self.containers),
        )
        return ForeignStep(
            step=self.step,
            url=self.url,
            format="orbax",
            tree=tree,
            arrays=arrays,
            create_time=created,
            metrics=self.metrics,
            labels=self.labels,
            digest=self.described.hexdigest(),
            is_verified=0 < self.verified == len(self.rows),
        )

    def _json(self, path: str) -> Any:
        value, data = read_json(self.location, path)
        self._describes(path, data)
        return value

    def _describes(self, path: str, data: bytes) -> None:
        self.described.update(f"{path}\0{len(data)}\0".encode() + data)

    def _step_metadata(self) -> datetime | None:
        """Takes times, metrics and custom metadata; returns the time of the writing."""
        path = _join(self.folder, STEP_METADATA)
        fields = as_object(self._json(path), what=f"{self.location.url}/{path}")
        self.metrics.update(items.as_metrics(fields.get("metrics") or {}) or {})
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
        """Reads all items of the step."""
        folders = [
            name.rstrip("/")
            for name in names
            if name.endswith("/") and UNFINISHED not in name
        ]
        listed = {
            item: self.location.names(_join(self.folder, item)) for item in folders
        }
        trees = [item for item in folders if TREE_METADATA in listed[item]]
        for item in folders:
            path = _join(self.folder, item)
            if item in trees:
                is_alone = trees == [item] and item in UNPREFIXED
                self._tree("" if is_alone else item, path, listed[item])
            elif MANIFEST in listed[item] or "checkpoint" in listed[item]:
                raise PreconditionError(
                    f"{self.location.url}/{path}: expected a file {TREE_METADATA}, got "
                    "a tree of a version of Orbax before it had one; restore it with "
                    "Orbax, and save it again"
                )
            elif item != items.METRICS or not self._takes_metrics(path, listed[item]):
                self._item(path, item)
        if not self.rows and not self.containers:
            raise PreconditionError(
                f"{self.url}: expected a tree or an item, got {', '.join(names[:5])}"
            )

    def _item(self, path: str, item: str) -> None:
        for original, row in items.item_rows(self.location, path, item):
            self.rows.append(row)
            name = items.item_name(original)
            if name != original:
                self.labels[f"orbax.item.{name}"] = original
        self._describes(path, stamp_of_folders(self.location, path, [""]))

    def _takes_metrics(self, path: str, names: Sequence[str]) -> bool:
        if items.METRICS not in names:
            return False
        found = items.read_metrics(self.location, path)
        if found is not None:
            self.metrics.update(found)
            self._describes(path, json.dumps(dict(found), sort_keys=True).encode())
        return found is not None

    def _tree(self, item: str, folder: str, names: Sequence[str]) -> None:
        """Reads what describes an item that is a tree."""
        prefix = (item,) if item else ()
        path = _join(folder, TREE_METADATA)
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
            at = _join(folder, SHARDINGS)
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
        self._data(folder, [e.name for e in entries], is_ocdbt=is_ocdbt)

    def _data(self, folder: str, arrays: Sequence[str], *, is_ocdbt: bool) -> None:
        """Adds what changes with the elements of arrays to the digest."""
        if is_ocdbt and arrays:  # the manifest names all data, directly or not
            manifest = _join(folder, MANIFEST)
            data = self.location.read(manifest, limit=_MANIFEST_BYTES)
            self._describes(manifest, data)
        elif arrays:
            stamp = stamp_of_folders(self.location, folder, arrays)
            self._describes(folder, stamp)

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
        base = self.location.kvstore(folder)
        for entry in entries:
            if is_ocdbt:
                kvstore = ocdbt(base, f"{entry.name}/")
            else:
                inside = checked_path(self.url, entry.name)
                kvstore = {**base, "path": f"{base['path']}{inside}/"}
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
        path = _join(folder, STRINGS)
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
            self.rows.append(
                encoded_row(
                    entry.key,
                    entry.path_kinds,
                    pb.LEAF_KIND_TEXT,
                    data,
                    name=entry.name,
                )
            )

    def _key_impls(self, folder: str, names: Sequence[str]) -> dict[str, str]:
        """Returns the implementations of typed PRNG keys, as all processes wrote
        them."""
        found: dict[str, str] = {}
        if f"{KEY_IMPLS}/" not in names:
            return found
        below = _join(folder, KEY_IMPLS)
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


def _step_of(name: str) -> int | None:
    """Returns the step of a folder's name; None if it is not that of a step."""
    if not name.endswith("/") or UNFINISHED in name or not name.isascii():
        return None
    found = _STEP.fullmatch(name[:-1])
    return int(found[1]) if found else None


def _moment(nanoseconds: Any) -> datetime | None:
    if type(nanoseconds) is not int or not 0 < nanoseconds < 2**63:
        return None
    return _EPOCH + timedelta(microseconds=nanoseconds // 1000)


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder and name else folder or name
