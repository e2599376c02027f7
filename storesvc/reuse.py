"""Reuse: which chunks of an upload are stored already, by its base or predecessor.

A chunk is the same where the leaf has the same key, shape, dtype and grid, and the
chunk the same CRC-32C, digest and length, by what the manifest says of it. It is then
shared by reference: the new checkpoint names its place, and takes its key over. Its
bytes are not read: of data files only the ends are looked at. A base or a predecessor
that is damaged is none: a save that can reuse nothing is a save all the same.

A claim is nothing that is kept: it is found again by whoever needs it, FinishWriter
and the commit alike, and only while the base's slot says that it still stands. The
upload's own reservation is older than that look, so a purge of the base sees it.
"""

import asyncio
import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from storesvc.errors import CorruptDataError, UploadNotFoundError
from storesvc.format import zarr
from storesvc.format.chunks import I64, Places, Sums, same_sums
from storesvc.format.layout import RunPlaces
from storesvc.format.manifests import Manifest
from storesvc.format.names import RunName, UploadName
from storesvc.format.trees import Leaf, Tree
from storesvc.gathering import each
from storesvc.kvbucket import Contents, KeySpace, KvBucket, Share
from storesvc.received import sums_of
from storesvc.slots import CHECKPOINTS, PURGING
from storesvc.uploads import OpenUpload, Uploads

_FILES_AT_ONCE: Final = 64
_LOOKS: Final = 50
_LOOK_SECONDS: Final = 0.1
"""Between looks at a base that is looked at for what uses it."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Source:
    """Stored chunks that an upload may claim."""

    tree: Tree
    sums: Sums
    places: Places
    held: NDArray[np.bool_]
    """For each chunk of the tree, whether it is stored."""
    key_space: KeySpace
    keys: frozenset[str]
    """All keys of the key space."""
    metadata: frozenset[str]
    """Those of the ``zarr.json`` of leaves; only checkpoints have them."""


@dataclass(frozen=True, slots=True, eq=False)
class Claims:
    """What an upload claims of one source."""

    source: Source
    rows: I64
    """Rows of the sums that were asked about."""
    chunks: I64
    """Beside them, the ordinals of the source."""


class Reuse:
    """Finds what uploads may claim."""

    def __init__(self, bucket: KvBucket, uploads: Uploads) -> None:
        self._bucket = bucket
        self._uploads = uploads

    async def sources(self, upload: OpenUpload) -> list[Source]:
        """Returns what an upload may claim from: what its predecessor stored, one
        source for each writer, and its base, where that still stands."""
        found: list[Source] = []
        if upload.record.predecessor:
            name = UploadName(upload.name.run, upload.record.predecessor)
            found += await self._stored_by(name)
        if upload.record.base:
            found += await self._base(upload)
        return found

    async def _base(self, upload: OpenUpload) -> list[Source]:
        run, step = upload.name.run, upload.record.base_step
        places = RunPlaces(run)
        try:
            for _ in range(_LOOKS):
                slot = await self._uploads.slot(run, step)
                if slot is None or slot.state != PURGING:
                    break
                await asyncio.sleep(_LOOK_SECONDS)  # it sees us, and leaves it
            if (
                slot is None
                or slot.state not in CHECKPOINTS - {PURGING}
                or slot.upload != upload.record.base
            ):
                return []
            key_space = self._bucket.key_space(
                place=places.key_space(slot.upload, slot.attempt), pool=places.pool
            )
            manifest = await self._uploads.manifest(run, slot)
            contents = await key_space.contents()
        except CorruptDataError as e:
            _log.warning("%s@%d cannot be a base: %s", run, step, e)
            return []
        whole = await self._whole_files(run, contents)
        return [
            await asyncio.to_thread(
                _of_checkpoint, manifest, contents, whole, key_space
            )
        ]

    async def _whole_files(self, run: RunName, contents: Contents) -> set[str]:
        """The data files of a key space, without those missing or cut off."""
        pool, ends = RunPlaces(run).pool, dict[str, int]()
        for file, offset, length in contents.places.values():
            ends[file] = max(ends.get(file, 0), offset + length)

        async def is_whole(file: str) -> bool:
            try:
                await self._bucket.read_range(pool + file, ends[file] - 1, ends[file])
            except CorruptDataError as e:
                _log.warning("%s: nothing can be claimed of a file: %s", run, e)
                return False
            return True

        whole = await each(is_whole, ends, at_once=_FILES_AT_ONCE)
        return {file for file, it_is in zip(ends, whole, strict=True) if it_is}

    async def _stored_by(self, name: UploadName) -> list[Source]:
        """What the writers of an unfinished upload had stored."""
        try:
            record = await self._uploads.record(name)
            tree = await self._uploads.tree(name, record)
        except UploadNotFoundError:
            return []
        except CorruptDataError as e:
            _log.warning("%s: nothing can be claimed of it: %s", name, e)
            return []
        opened = OpenUpload(name, record, tree)
        stored = partial(self.stored, opened)
        found = await each(stored, range(record.writer_count))
        return [source for sources in found for source in sources]

    async def stored(self, upload: OpenUpload, writer: int) -> list[Source]:
        """Returns what a writer stored; nothing where that is damaged: it is sent
        again."""
        space, tree = self._uploads.key_space(upload, writer), upload.tree
        try:
            contents = await space.contents()
            if not contents.places:
                return []
            recorded = await sums_of(space, tree.chunk_count)
        except CorruptDataError:
            return []
        whole = await self._whole_files(upload.name.run, contents)
        source = await asyncio.to_thread(
            _source, tree, recorded.sums, contents, whole, space
        )
        source.held[~recorded.certain] = False
        return [source]


def _source(
    tree: Tree,
    sums: Sums,
    contents: Contents,
    whole: Container[str],
    key_space: KeySpace,
) -> Source:
    """The source that a key space is.

    Args:
        tree: What it holds chunks of.
        sums: Those of all chunks of the tree.
        contents: What it holds.
        whole: The data files that are neither missing nor cut off.
        key_space: Itself.
    """
    held = np.zeros(tree.chunk_count, np.bool_)
    rows = [("", 0, 0)] * tree.chunk_count
    keys = tree.chunk_keys(np.arange(tree.chunk_count))
    lengths = tree.stored_lengths.tolist()
    for chunk, (key, length) in enumerate(zip(keys, lengths, strict=True)):
        place = contents.places.get(key)
        if place is not None and place.length == length and place.file in whole:
            held[chunk], rows[chunk] = True, place
    return Source(
        tree=tree,
        sums=sums,
        places=Places.of_rows(rows),
        held=held,
        key_space=key_space,
        keys=frozenset(contents.places),
        metadata=frozenset(
            key
            for key in map(zarr.metadata_key, (leaf.key for leaf in tree.leaves))
            if key in contents.places and contents.places[key].file in whole
        ),
    )


def _of_checkpoint(
    manifest: Manifest, contents: Contents, whole: Container[str], key_space: KeySpace
) -> Source:
    """The source that a checkpoint is: chunks on which its two views agree."""
    source = _source(manifest.tree, manifest.sums, contents, whole, key_space)
    views = zip(source.places.rows(), manifest.places.rows(), strict=True)
    agree = np.array([here == there for here, there in views], np.bool_)
    source.held[~agree] = False
    return source


def find_claims(tree: Tree, sums: Sums, sources: Sequence[Source]) -> list[Claims]:
    """Returns what each source has of the chunks that sums are of; each chunk is
    claimed of the first source that has it."""
    left = np.ones(len(sums), np.bool_)
    found = []
    for source in sources:
        other = _counterparts(tree, source.tree, sums.ordinal)
        rows = np.flatnonzero(left & (other >= 0))
        chunks = other[rows]
        same = source.held[chunks] & same_sums(sums.take(rows), source.sums, chunks)
        rows, chunks = rows[same], chunks[same]
        left[rows] = False
        found.append(Claims(source, rows, chunks))
    return found


def claimed_places(claims: Claims) -> Places:
    """Returns where the claimed chunks lie, in the order of the rows."""
    return claims.source.places.take(claims.chunks)


def share_of(tree: Tree, claims: Claims) -> Share:
    """Returns the keys that the key space of a checkpoint takes over for claims.

    Metadata goes with the chunks: a range that leaves it out would be cut at every
    leaf.
    """
    source = claims.source
    wanted = set(source.tree.chunk_keys(claims.chunks)) | metadata_keys(tree, claims)
    return Share(source.key_space, _ranges(sorted(source.keys), wanted.__contains__))


def metadata_keys(tree: Tree, claims: Claims) -> set[str]:
    """Returns the keys of the metadata that a source has as the tree needs it."""
    there = claims.source.tree
    return {
        key
        for leaf in tree.leaves
        if (key := zarr.metadata_key(leaf.key)) in claims.source.metadata
        and _same_array(leaf, there.leaves[there.by_key[leaf.key]])
    }


def _ranges(
    keys: Sequence[str], is_wanted: Callable[[str], bool]
) -> list[tuple[str, str]]:
    """The ranges, first and last key, that hold the wanted of sorted keys alone."""
    ranges: list[tuple[str, str]] = []
    last = None
    for at, key in enumerate(keys):
        if not is_wanted(key):
            continue
        if last == at - 1 and ranges:
            ranges[-1] = (ranges[-1][0], key)
        else:
            ranges.append((key, key))
        last = at
    return ranges


def _counterparts(tree: Tree, other: Tree, chunks: I64) -> I64:
    """For each of some chunks of a tree its ordinal in another, or -1."""
    if tree is other:
        return chunks
    rows, within = tree.locate_all(chunks)
    first = np.full(len(tree.leaves), -1, np.int64)
    for row in np.unique(rows).tolist():
        leaf = tree.leaves[row]
        there = other.by_key.get(leaf.key)
        if there is not None and _same_array(leaf, other.leaves[there]):
            first[row] = other.first_chunk[there]
    return np.where(first[rows] < 0, -1, first[rows] + within)


def _same_array(a: Leaf, b: Leaf) -> bool:
    return (a.shape, a.chunk_shape, a.dtype) == (b.shape, b.chunk_shape, b.dtype)
