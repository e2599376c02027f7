"""A checkpoint whose tree is known, and whose chunks are read on demand.

``TreeReader`` is what checkpoints of a store and of other projects share: leaves,
items, selection, and reads without jax. A subclass says where the chunks come from.
``OpenTree`` is what a user sees of it; the packages of the client call ``get_reader``.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from storesvc.format.grids import Region, whole
from storesvc.format.manifests import Manifest
from storesvc.format.trees import Leaf, Tree
from storesvc_client._chunks.buffers import Bytes, RegionArrays, TakeBuffers
from storesvc_client._chunks.memory import collector_paused, cut_batches
from storesvc_client._items.values import (
    CONTAINERS,
    TUPLE,
    Container,
    unpack_containers,
)
from storesvc_client._job.job import Job
from storesvc_client._restore.assembly import Assembly, ChunkSource
from storesvc_client._restore.items import Items
from storesvc_client._telemetry.progress import Meter, ProgressCallback
from storesvc_client._values.arguments import (
    NEVER,
    Deadline,
    DurationLike,
    checked_texts,
)
from storesvc_client._values.key_patterns import (
    Pattern,
    Patterns,
    matching_keys,
    nearest_keys,
)
from storesvc_client._values.models import LeafInfo
from storesvc_client._values.options import (
    DEFAULT_DEADLINE,
    Indivisible,
    Like,
    MappingRules,
    RestoreRequest,
    collect_arguments,
)
from storesvc_client._views.notebook import Leaves
from storesvc_client.errors import NotFoundError

if TYPE_CHECKING:
    import numpy as np
    from jax.sharding import Mesh
    from numpy.typing import DTypeLike, NDArray

    from storesvc_client._pictures.leaf_statistics import LeafStatistics
    from storesvc_client._pytree.restore_target import Target
    from storesvc_client._restore.pictures import Pictures
    from storesvc_client._telemetry.reports import RestoreReport
    from storesvc_client._values.options import AnyMapping, Rules

READ_AT_ONCE_BYTES: Final = 64 << 20
"""Maximum bytes of leaves that ``read`` keeps in memory."""

STATISTICS_BYTES: Final = 64 << 20
"""Maximum bytes that ``statistics`` reads by default."""


class TreeReader:
    """Reads one checkpoint whose tree is known. Threads may share it."""

    def __init__(
        self, tree: Tree, *, allocate: Callable[[int], Bytes], job: Job | None = None
    ) -> None:
        """Creates it; nothing is read. ``allocate`` returns memory for a buffer."""
        self.tree = tree
        self.job = job
        self.report: RestoreReport | None = None
        """Report of the last restore that succeeded; None if there was none."""
        self.allocate = allocate

    @property
    def name(self) -> str:
        """Name of the checkpoint, for messages."""
        raise NotImplementedError

    @cached_property
    def manifest(self) -> Manifest:
        """The tree with its chunks."""
        raise NotImplementedError

    def open_source(self) -> ChunkSource:
        raise NotImplementedError

    def hold(self) -> AbstractContextManager[None]:
        """Returns a block in which the checkpoint is not removed."""
        return nullcontext()

    def find_digests(self, row: int) -> "NDArray[np.uint8] | None":  # noqa: ARG002 - a subclass uses it
        """Returns the digests of the chunks of a row; None if there are none."""
        return None

    def restore(self, request: RestoreRequest, deadline: DurationLike) -> Any:
        """Returns what a request asks for; see ``Run.restore``."""
        raise NotImplementedError

    @cached_property
    def leaves(self) -> Mapping[str, LeafInfo]:
        """Leaves of the tree by key, in the order of keys."""
        tree = self.tree
        rows = zip(tree.leaves, tree.grids, strict=True)
        of_tree = islice(rows, tree.tree_count)
        return Leaves(
            (leaf.key, LeafInfo.from_row(leaf, grid)) for leaf, grid in of_tree
        )

    @cached_property
    def items(self) -> Items:
        """Items that were saved next to the tree."""
        return Items(self.name, self.tree, self.read_arrays, self.job)

    @property
    def document(self) -> bytes:
        """Document that was saved with the tree; b"" if there is none."""
        found = self.tree.structure
        return b"" if found.startswith(CONTAINERS) else found

    def read(self, keys: Iterable[str]) -> "Generator[tuple[LeafInfo, NDArray[Any]]]":
        """Yields leaves as host arrays; see ``OpenTree.read``."""
        tree = self.tree
        wanted = checked_texts(f"read of {self.name}: keys", keys)
        rows = [self.find_row(key) for key in dict.fromkeys(wanted)]
        for row, array in self.read_arrays(rows):
            yield LeafInfo.from_row(tree.leaves[row], tree.grids[row]), array

    def read_arrays(
        self, rows: "Sequence[int]"
    ) -> "Iterator[tuple[int, NDArray[Any]]]":
        """Yields the arrays of rows, as ``read`` does."""
        tree = self.tree
        with self.hold():
            batches = cut_batches(
                rows, lambda row: tree.grids[row].leaf_bytes, READ_AT_ONCE_BYTES
            )
            for batch in batches:
                needs = [(row, whole(tree.leaves[row].shape)) for row in batch]
                arrays = RegionArrays(needs)
                self.read_regions(arrays.wanted, arrays.place)
                for row, region in needs:
                    yield row, arrays.pop((row, region))

    def find_row(self, key: str) -> int:
        """Returns the row of a leaf of the tree."""
        if key not in self.by_key:
            raise NotFoundError(
                f"{self.name} has no leaf {key!r}; list its leaves to see all"
            )
        return self.by_key[key]

    @cached_property
    def by_key(self) -> dict[str, int]:
        tree = self.tree
        return dict(islice(tree.by_key.items(), tree.tree_count))

    def select_rows(self, select: Sequence[Pattern] | None) -> list[int]:
        """Returns the rows of the leaves that patterns match; None: of all."""
        by_key = self.by_key
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

    def select_containers(self, select: Sequence[Pattern] | None) -> list[Container]:
        """Returns the selected containers that no leaf represents; a tuple counts as
        selected, because a part of it may be."""
        found = unpack_containers(self.tree.structure)
        if select is None or not found:
            return found
        keys = {each.key for each in found if each.what != TUPLE}
        chosen = set[str]()
        for glob in select:
            chosen.update(matching_keys(glob, keys))
        return [each for each in found if each.what == TUPLE or each.key in chosen]

    def choose_target(
        self, request: RestoreRequest, rows: Sequence[int], *, has_text_keys: bool
    ) -> "Target":
        """Returns what a restore makes of selected rows; see ``Target.choose``."""
        from storesvc_client._pytree.restore_target import Target

        containers = list[Container]()
        if request.like is None:
            containers = self.select_containers(request.patterns(self.name))
        return Target.choose(
            *(self.tree, self.name, request),
            rows=rows,
            containers=containers,
            has_text_keys=has_text_keys,
        )

    def _has_empty(self, glob: Pattern) -> bool:
        """Returns whether a pattern matches a None or an empty container."""
        if not self.tree.structure.startswith(CONTAINERS):
            return False
        return any(each.what != TUPLE for each in self.select_containers([glob]))

    def map(self, mapping: "AnyMapping | None") -> "TreeReader":
        """Returns the reader of the tree that a mapping makes; itself for None."""
        if mapping is None:
            return self
        from storesvc_client._restore.mapped import MappedReader

        return MappedReader(self, mapping)

    def read_regions(
        self,
        wanted: Iterable[tuple[int, Sequence[Region]]],
        place: TakeBuffers,
        within: Meter | None = None,
    ) -> None:
        """Reads regions of leaves and passes their buffers to `place`; adds the times
        to a meter."""
        meter = Meter("restore", self.name, within=within)
        assembly = self.plan_reads(wanted, place, meter, NEVER)
        self.open_source().read(assembly.missing, assembly)
        assembly.check_complete()

    def plan_reads(
        self,
        wanted: Iterable[tuple[int, Sequence[Region]]],
        place: TakeBuffers,
        meter: Meter,
        deadline: Deadline,
    ) -> Assembly:
        with collector_paused(), meter.phase("plan"):
            return Assembly(
                self.manifest,
                wanted,
                name=self.name,
                place=place,
                meter=meter,
                deadline=deadline,
                allocate=self.allocate,
            )

    def rename_leaves(self, rename: Callable[[Leaf], Leaf], document: bytes) -> Self:
        """Returns the reader with other keys of its leaves, and a document."""
        found, tree = copy(self), self.tree
        leaves, items = tree.leaves[: tree.tree_count], tree.leaves[tree.tree_count :]
        tree = replace(tree, leaves=(*map(rename, leaves), *items), structure=document)
        own = vars(found)
        for cached in ("leaves", "by_key", "items"):
            own.pop(cached, None)
        own |= {"tree": tree, "manifest": replace(self.manifest, tree=tree)}
        return found


class OpenTree:
    """The leaves and items of one checkpoint. Threads may share it."""

    def __init__(self, reader: TreeReader) -> None:
        self._reader = reader

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    @property
    def name(self) -> str:
        """Name of the checkpoint: that of its run or the URL of it, and the step after
        "@"."""
        return self._reader.name

    @property
    def report(self) -> "RestoreReport | None":
        """Report of the last restore that succeeded; None if there was none."""
        return self._reader.report

    def _repr_html_(self) -> str:
        from storesvc_client._views.notebook import tree_html

        items = self.items
        return tree_html(self.name, self.leaves, [*map(items.info, items)])

    @property
    def leaves(self) -> Mapping[str, LeafInfo]:
        """Leaves by key, in the order of keys: shapes, dtypes, sizes and shardings."""
        return self._reader.leaves

    @property
    def items(self) -> Items:
        """Items that ``run.save(items=)`` kept next to the tree.

        Of an item of several processes it has the value of this process if the
        processes of a job of as many opened the checkpoint together.
        """
        return self._reader.items

    @property
    def document(self) -> bytes:
        """Bytes that ``run.save(document=)`` kept with the tree; b"" if there are
        none."""
        return self._reader.document

    def restore(
        self,
        *,
        deadline: DurationLike = DEFAULT_DEADLINE,
        like: Like | None = None,
        mesh: "Mesh | None" = None,
        rules: "Rules | None" = None,
        select: Patterns | None = None,
        cast: "DTypeLike | None" = None,
        missing: Literal["error", "keep"] = "error",
        indivisible: Indivisible = "error",
        progress: ProgressCallback | None = None,
    ) -> Like:
        """Returns the state of this checkpoint; ``report`` then has the timings.

        If all processes of a job opened the checkpoint together, all of them call this,
        with the same leaves and shardings.

        Arguments that are not listed are as for ``Run.restore``.

        Args:
            deadline: Maximum duration, a ``timedelta`` or seconds.

        Raises:
            StoreError: As for ``Run.restore``.
        """
        request = collect_arguments(RestoreRequest, locals())
        state: Like = self._reader.restore(request, deadline)
        return state

    def read(self, keys: Iterable[str]) -> "Generator[tuple[LeafInfo, NDArray[Any]]]":
        """Yields leaves as host arrays, in the order of the keys. Needs no jax.

        One leaf at a time is in memory, or as many small ones as 64 MiB hold.

        Args:
            keys: Keys of leaves; each leaf is read once.

        Raises:
            NotFoundError: The checkpoint has no such leaf.
            DataLossError: Stored bytes are damaged; the message names leaf and chunk.
        """
        return self._reader.read(keys)

    def map(self, mapping: MappingRules) -> "OpenTree":
        """Returns the checkpoint as a mapping shows it; reads no leaf.

        It has the leaves that the rules make, and all methods read what these need. It
        has the items of the checkpoint, and no document.

        >>> rules = {"version": 1, "rules": [
        ...     {"from": "params/{name*}", "to": "model/{name}"}
        ... ]}
        >>> [*run.open("best").map(rules).leaves]
        ['model/bias', 'model/kernel']

        Args:
            mapping: As for ``Run.restore``.

        Raises:
            InvalidRequestError: There is no such file, or its rules are none.
            MismatchError: The rules do not fit the leaves; lists all that is wrong.
        """
        return OpenTree(self._reader.map(mapping))

    @cached_property
    def pictures(self) -> "Pictures":
        """Pictures: ``treemap``, ``layers``, ``chunks``, ``sharding``."""
        from storesvc_client._restore.pictures import Pictures

        return Pictures(self._reader)

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

        return compute_statistics(self._reader, key, budget_bytes=budget_bytes)


def get_reader(opened: OpenTree) -> TreeReader:
    return opened._reader  # noqa: SLF001 - no user sees it, and this is the only door
