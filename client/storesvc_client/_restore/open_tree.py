"""A checkpoint whose tree is known, and whose chunks are read on demand.

``OpenTree`` is what checkpoints of a store and of other projects share: leaves, items,
selection, and reads without jax. A subclass says where the chunks come from.
"""

from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from storesvc.format.grids import Region, whole
from storesvc.format.manifests import Manifest
from storesvc.format.trees import Leaf, Tree
from storesvc_client._chunks.buffers import Buffer, Bytes
from storesvc_client._chunks.memory import collector_paused
from storesvc_client._items.values import (
    CONTAINERS,
    TUPLE,
    Container,
    unpack_containers,
)
from storesvc_client._job.job import Job
from storesvc_client._restore.assembly import Assembly, ChunkSource
from storesvc_client._restore.items import Items
from storesvc_client._telemetry.progress import Meter
from storesvc_client._values.arguments import NEVER, Deadline, checked_texts
from storesvc_client._values.key_patterns import Pattern, matching_keys, nearest_keys
from storesvc_client._values.models import LeafInfo
from storesvc_client._views.notebook import Leaves
from storesvc_client.errors import NotFoundError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from storesvc_client._pictures.leaf_statistics import LeafStatistics
    from storesvc_client._restore.pictures import Pictures

READ_AT_ONCE_BYTES: Final = 64 << 20
"""Maximum bytes of leaves that ``read`` keeps in memory."""


STATISTICS_BYTES: Final = 64 << 20
"""Maximum bytes that ``statistics`` reads by default."""


class OpenTree:
    """The leaves and items of one checkpoint. Threads may share it."""

    def __init__(
        self,
        tree: Tree,
        *,
        allocate: Callable[[int], Bytes],
        job: Job | None = None,
    ) -> None:
        """Creates it; nothing is read.

        Args:
            tree: Leaves and items.
            allocate: Returns memory for a buffer of a size in bytes.
            job: Job whose processes read it together; None if this process reads alone.
        """
        self._tree = tree
        self._allocate = allocate
        self._job = job

    @property
    def name(self) -> str:
        """Name of the checkpoint, for messages."""
        raise NotImplementedError

    @property
    def _manifest(self) -> Manifest:
        """The tree with its chunks."""
        raise NotImplementedError

    def _source(self) -> ChunkSource:
        """Returns the source of its chunks."""
        raise NotImplementedError

    def _held(self) -> AbstractContextManager[None]:
        """Returns a block in which the checkpoint is not removed."""
        return nullcontext()

    def _digests(self, row: int) -> "NDArray[np.uint8] | None":  # noqa: ARG002 - a subclass uses it
        """Returns the digests of the chunks of a row; None if there are none."""
        return None

    def _repr_html_(self) -> str:
        from storesvc_client._views.notebook import tree_html

        items = self.items
        return tree_html(self.name, self.leaves, [*map(items.info, items)])

    @cached_property
    def leaves(self) -> Mapping[str, LeafInfo]:
        """Leaves by key, in the order of keys: shapes, dtypes, sizes and shardings."""
        tree = self._tree
        rows = zip(tree.leaves, tree.grids, strict=True)
        of_tree = islice(rows, tree.tree_count)
        return Leaves(
            (leaf.key, LeafInfo.from_row(leaf, grid)) for leaf, grid in of_tree
        )

    @cached_property
    def items(self) -> Items:
        """Items that ``run.save(items=)`` kept next to the tree.

        Of an item of several processes it has the value of this process if the
        processes of a job of as many opened the checkpoint together.
        """
        return Items(self.name, self._tree, self._item_bytes, self._job)

    @property
    def document(self) -> bytes:
        """Bytes that ``run.save(document=)`` kept with the tree; b"" if there are
        none."""
        found = self._tree.structure
        return b"" if found.startswith(CONTAINERS) else found

    def read(self, keys: Iterable[str]) -> "Generator[tuple[LeafInfo, NDArray[Any]]]":
        """Yields leaves as host arrays, in the order of the keys. Needs no jax.

        One leaf at a time is in memory, or as many small ones as 64 MiB hold.

        Args:
            keys: Keys of leaves; each leaf is read once.

        Raises:
            NotFoundError: The checkpoint has no such leaf.
            DataLossError: Stored bytes are damaged; the message names leaf and chunk.
        """
        tree = self._tree
        wanted = checked_texts(f"read of {self.name}: keys", keys)
        rows = [self._row(key) for key in dict.fromkeys(wanted)]
        for row, array in self._arrays(rows):
            yield LeafInfo.from_row(tree.leaves[row], tree.grids[row]), array

    @cached_property
    def pictures(self) -> "Pictures":
        """Pictures: ``treemap``, ``layers``, ``chunks``, ``sharding``."""
        from storesvc_client._restore.pictures import Pictures

        return Pictures(self)

    def statistics(
        self, key: str, *, budget_bytes: int = STATISTICS_BYTES
    ) -> "LeafStatistics":
        """Returns the statistics of the values of a leaf. Needs no jax.

        >>> run.open("best").statistics("params/kernel").histogram()

        Args:
            key: Key of the leaf.
            budget_bytes: Maximum bytes to read. If the leaf has more, evenly
                distributed chunks are read, and the result says so.

        Raises:
            NotFoundError: The checkpoint has no such leaf.
            InvalidRequestError: The budget is less than a chunk.
            DataLossError: Stored bytes are damaged; the message names leaf and chunk.
        """
        from storesvc_client._restore.pictures import compute_statistics

        row = self._row(key)
        leaf, grid = self.leaves[key], self._tree.grids[row]

        def read(regions: Sequence[Region], place: "Callable[[Buffer], None]") -> None:
            self._read([(row, regions)], place)

        return compute_statistics(
            leaf, grid, read, hold=self._held, budget_bytes=budget_bytes
        )

    def _item_bytes(self, rows: "Sequence[int]") -> "Iterator[tuple[int, bytes]]":
        """Yields the bytes of items by row."""
        for row, array in self._arrays(rows):
            yield row, array.tobytes()

    def _arrays(self, rows: "Sequence[int]") -> "Iterator[tuple[int, NDArray[Any]]]":
        """Yields the arrays of rows, as ``read`` does."""
        tree = self._tree
        with self._held():
            for batch in _cut_batches(rows, [grid.leaf_bytes for grid in tree.grids]):
                arrays: dict[int, NDArray[Any]] = {}
                self._read(
                    [(row, [whole(tree.leaves[row].shape)]) for row in batch],
                    partial(_keep, arrays),
                )
                for row in batch:
                    yield row, arrays.pop(row)

    def _row(self, key: str) -> int:
        if key not in self._by_key:
            raise NotFoundError(
                f"{self.name} has no leaf {key!r}; list its leaves to see all"
            )
        return self._by_key[key]

    @cached_property
    def _by_key(self) -> dict[str, int]:
        """Row of the key of each leaf of the tree."""
        tree = self._tree
        return dict(islice(tree.by_key.items(), tree.tree_count))

    def _rows(self, select: Sequence[Pattern] | None) -> list[int]:
        by_key = self._by_key
        if select is None:
            return list(by_key.values())
        rows: set[int] = set()
        for glob in select:
            keys = matching_keys(glob, by_key)
            if not keys and not self._has_empty(glob):
                nearest = ", ".join(nearest_keys(glob, by_key))
                raise NotFoundError(
                    f"no leaf of {self.name} matches {glob!r}; "
                    + (
                        f"nearest: {nearest}"
                        if nearest
                        else "list its leaves to see all"
                    )
                )
            rows.update(by_key[key] for key in keys)
        return sorted(rows)

    def _containers(self, select: Sequence[Pattern] | None) -> list[Container]:
        """Returns the selected containers that no leaf represents; a tuple counts as
        selected, because a part of it may be."""
        found = unpack_containers(self._tree.structure)
        if select is None or not found:
            return found
        keys = {each.key for each in found if each.what != TUPLE}
        chosen = set[str]()
        for glob in select:
            chosen.update(matching_keys(glob, keys))
        return [each for each in found if each.what == TUPLE or each.key in chosen]

    def _has_empty(self, glob: Pattern) -> bool:
        """Returns whether a pattern matches a None or an empty container."""
        if not self._tree.structure.startswith(CONTAINERS):
            return False
        return any(each.what != TUPLE for each in self._containers([glob]))

    def _read(
        self,
        wanted: Iterable[tuple[int, Sequence[Region]]],
        place: Callable[[Buffer], None],
        within: Meter | None = None,
    ) -> None:
        """Reads regions of leaves and passes their buffers to `place`; adds the times
        to a meter."""
        meter = Meter("restore", self.name, within=within)
        assembly = self._assembly(wanted, place, meter, NEVER)
        self._source().read(assembly.missing, assembly)
        assembly.check_complete()

    def _assembly(
        self,
        wanted: Iterable[tuple[int, Sequence[Region]]],
        place: Callable[[Buffer], None],
        meter: Meter,
        deadline: Deadline,
    ) -> Assembly:
        """Returns the plan of a restore."""
        with collector_paused(), meter.phase("plan"):
            return Assembly(
                self._manifest,
                wanted,
                name=self.name,
                place=place,
                meter=meter,
                deadline=deadline,
                allocate=self._allocate,
            )


def rename_leaves(
    opened: OpenTree, rename: Callable[[Leaf], Leaf], document: bytes
) -> OpenTree:
    """Returns an open checkpoint with other keys of its leaves, and a document.

    Args:
        opened: The checkpoint.
        rename: Returns a leaf with another key.
        document: As ``run.save(document=)`` would have kept it.
    """
    found, tree = copy(opened), opened._tree  # noqa: SLF001 - of this module's class
    leaves, items = tree.leaves[: tree.tree_count], tree.leaves[tree.tree_count :]
    tree = replace(tree, leaves=(*map(rename, leaves), *items), structure=document)
    own = vars(found)
    for cached in ("leaves", "_by_key", "items"):
        own.pop(cached, None)
    chunks = replace(opened._manifest, tree=tree)  # noqa: SLF001 - as above
    own |= {"_tree": tree, "_chunks": chunks}
    return found


def _keep(arrays: "dict[int, NDArray[Any]]", buffer: Buffer) -> None:
    (arrays[buffer.row],) = buffer.arrays


def _cut_batches(rows: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Cuts rows into batches of at most ``READ_AT_ONCE_BYTES``, or one larger row."""
    batch: list[int] = []
    held = 0
    for row in rows:
        if batch and held + sizes[row] > READ_AT_ONCE_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(row)
        held += sizes[row]
    if batch:
        yield batch
