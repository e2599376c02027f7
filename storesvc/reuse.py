"""Reuse: which chunks of an upload are stored already, by its base or predecessor.

A chunk is the same where the leaf has the same key, shape, dtype and grid, and the
chunk the same CRC-32C, digest and length. It is then shared by reference: the new
checkpoint names its place, and takes its key over.

A claim is nothing that is kept: it is found again by whoever needs it, FinishWriter
and the commit alike, and only while the base's slot says that it still stands. The
upload's own reservation is older than that look, so a purge of the base sees it.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from storesvc.errors import CorruptDataError, UploadNotFoundError
from storesvc.format import zarr
from storesvc.format.chunks import I64, Places, Sums, same_sums
from storesvc.format.layout import RunPlaces
from storesvc.format.names import UploadName
from storesvc.format.trees import Leaf, Tree
from storesvc.kvbucket import KeySpace, KvBucket, Share
from storesvc.received import sums_of
from storesvc.slots import CHECKPOINTS, PURGING
from storesvc.uploads import OpenUpload, Uploads

_WRITERS_AT_ONCE: Final = 32
_LOOKS: Final = 50
_LOOK_SECONDS: Final = 0.1
"""Between looks at a base that is looked at for what uses it."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Source:
    """Stored chunks that an upload may claim."""

    tree: Tree
    sums: Sums
    places: Places
    held: NDArray[np.bool_]
    """For each chunk of the tree, whether it is stored."""
    key_space: KeySpace
    uncertain: frozenset[str] = frozenset()
    """Keys that the key space holds, of chunks that cannot be claimed."""
    is_checkpoint: bool
    """Whether the key space holds the ``zarr.json`` of each leaf, as those of
    checkpoints do."""


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
        run = upload.name.run
        for _ in range(_LOOKS):
            slot = await self._uploads.slot(run, upload.record.base_step)
            if slot is None or slot.state != PURGING:
                break
            await asyncio.sleep(_LOOK_SECONDS)  # it sees us, and leaves it
        if (
            slot is None
            or slot.state not in CHECKPOINTS - {PURGING}
            or slot.upload != upload.record.base
        ):
            return []
        manifest = await self._uploads.manifest(run, slot)
        places = RunPlaces(run)
        key_space = self._bucket.key_space(
            place=places.key_space(slot.upload, slot.attempt), pool=places.pool
        )
        return [
            Source(
                tree=manifest.tree,
                sums=manifest.sums,
                places=manifest.places,
                held=np.ones(manifest.tree.chunk_count, np.bool_),
                key_space=key_space,
                is_checkpoint=True,
            )
        ]

    async def _stored_by(self, name: UploadName) -> list[Source]:
        """What the writers of an unfinished upload had stored."""
        try:
            record = await self._uploads.record(name)
            tree = await self._uploads.tree(name, record)
        except UploadNotFoundError:
            return []
        opened = OpenUpload(name, record, tree)
        at_once = asyncio.Semaphore(_WRITERS_AT_ONCE)

        async def stored(writer: int) -> list[Source]:
            async with at_once:
                return await self.stored(opened, writer)

        found = await asyncio.gather(*map(stored, range(record.writer_count)))
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

        def build() -> Source:
            held = np.zeros(tree.chunk_count, np.bool_)
            rows = [("", 0, 0)] * tree.chunk_count
            left = set(contents.places)
            certain = np.flatnonzero(recorded.certain)
            keys = tree.chunk_keys(certain)
            for chunk, key in zip(certain.tolist(), keys, strict=True):
                place = contents.places.get(key)
                if place is not None and place.length == tree.stored_lengths[chunk]:
                    held[chunk], rows[chunk] = True, place
                    left.discard(key)
            places = Places.of_rows(rows)
            return Source(
                tree=tree,
                sums=recorded.sums,
                places=places,
                held=held,
                key_space=space,
                uncertain=frozenset(left),
                is_checkpoint=False,
            )

        return [await asyncio.to_thread(build)]


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
    wanted = set(source.tree.chunk_keys(claims.chunks))
    held = source.tree.chunk_keys(np.flatnonzero(source.held))
    keys = [*held, *source.uncertain]
    if source.is_checkpoint:
        wanted.update(metadata_keys(tree, claims))
        keys += [zarr.metadata_key(leaf.key) for leaf in source.tree.leaves]
    return Share(source.key_space, _ranges(sorted(keys), wanted.__contains__))


def metadata_keys(tree: Tree, claims: Claims) -> set[str]:
    """Returns the keys of the metadata that a source has as the tree needs it."""
    if not claims.source.is_checkpoint:
        return set()
    by_key = claims.source.tree.by_key
    return {
        zarr.metadata_key(leaf.key)
        for leaf in tree.leaves
        if leaf.key in by_key
        and _same_array(leaf, claims.source.tree.leaves[by_key[leaf.key]])
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
