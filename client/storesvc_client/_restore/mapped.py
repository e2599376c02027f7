"""A checkpoint as a mapping shows it: another tree, read from the stored one.

``MappedReader`` is a reader like the one within it. If a buffer that is returned holds
the elements of stored leaves in any order, with any strides, stored chunks are read
into it (``_BufferPlan``). The others are built chunk by chunk of a grid of their own,
chosen so that each needs few stored chunks:

1. Chunks that need the same stored leaves are read together, in the order of what they
   need, so that a stored chunk that several of them need is read once.
2. Batches bound the memory: the regions that a batch requests are read, and verified,
   by the reader within.
3. Each chunk is built of these regions, and goes into the buffers that are returned.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from storesvc.format.chunks import ChunkLocations, Sums
from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Region
from storesvc.format.manifests import Manifest
from storesvc.format.trees import Tree
from storesvc_client._chunks.buffers import (
    Buffer,
    BufferLayout,
    Group,
    RegionArrays,
    Segment,
    TakeBuffers,
    plan_buffer_layout,
    plan_part_layout,
)
from storesvc_client._chunks.memory import collector_paused, cut_batches
from storesvc_client._mapping.expressions import (
    Expression,
    Fill,
    Reshape,
    Shape,
    Source,
)
from storesvc_client._mapping.families import load_table
from storesvc_client._mapping.planning import MappedTree, make_source, plan_mapping
from storesvc_client._mapping.rules import (
    MAX_DOCUMENT_BYTES,
    Rules,
    check_rules,
    parse_rules,
)
from storesvc_client._restore.assembly import Assembly, Planned
from storesvc_client._restore.data_file_reads import BUDGET_BYTES
from storesvc_client._restore.items import Items
from storesvc_client._restore.open_tree import TreeReader
from storesvc_client._telemetry.progress import Meter
from storesvc_client._values.arguments import Deadline, DurationLike, shown
from storesvc_client._values.options import MappingRules, RestoreRequest
from storesvc_client._values.places import Place, copy_elements
from storesvc_client.errors import InvalidRequestError

if TYPE_CHECKING:
    from storesvc_client._values.options import AnyMapping

BATCH_BYTES: Final = 192 << 20
"""Maximum bytes of regions that are read at a time, unless one chunk needs more."""


def load_rules(mapping: MappingRules | Rules) -> Rules:
    """Returns the rules of a file, a document or a table of a family; rules themselves
    are accepted, too.

    Raises:
        InvalidRequestError: They are none, or the file cannot be read.
    """
    if isinstance(mapping, Rules):
        return mapping
    if isinstance(mapping, Mapping):
        return check_rules(mapping, name="mapping")
    if not isinstance(mapping, str | Path):
        raise InvalidRequestError(
            "mapping=: expected a file or a document of rules, such as 'rules.toml' or "
            f"{{'version': 1, 'rules': []}}, got {shown(mapping)}"
        )
    path = Path(mapping)
    if path.suffix not in (".toml", ".json"):
        return load_table(str(mapping))
    try:
        with path.open("rb") as file:
            text = file.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as e:
        raise InvalidRequestError(
            f"mapping=: expected a file of rules, got {str(path)!r}: {e.strerror}"
        ) from e
    return parse_rules(text, name=str(path), is_toml=path.suffix == ".toml")


def sample_leaves(
    reader: TreeReader, wanted: Sequence[tuple[str, Region]]
) -> list[NDArray[Any]]:
    """Reads regions of leaves by their keys, in their order."""
    rows = {leaf.key: row for row, leaf in enumerate(reader.tree.leaves)}
    requests = [(rows[key], region) for key, region in wanted]
    arrays = RegionArrays(requests)
    reader.read_regions(arrays.wanted, arrays.place)
    return [arrays[request] for request in requests]


class MappedReader(TreeReader):
    """Reads a checkpoint as a mapping shows it."""

    def __init__(self, inner: TreeReader, mapping: "AnyMapping") -> None:
        """Plans the mapping; reads nothing.

        Raises:
            InvalidRequestError: The rules are none.
            MismatchError: They do not fit the tree; lists all that is wrong.
        """
        if not isinstance(mapping, MappedTree):
            mapping = plan_mapping(load_rules(mapping), inner.tree, name=inner.name)
        items = range(inner.tree.tree_count, len(inner.tree.leaves))
        tree = Tree((*mapping.tree.leaves, *(inner.tree.leaves[row] for row in items)))
        super().__init__(tree, allocate=inner.allocate)
        self.inner = inner
        """The reader of the stored tree."""
        self.mapped = mapping
        """The tree, and the sources of each leaf."""
        self.expressions: Sequence[Expression] = [
            *(each.expression for each in mapping.leaves),
            *(make_source(inner.tree, row) for row in items),
        ]
        """The expression of each row; that of an item is the stored one."""

    @property
    def name(self) -> str:
        """Name of the checkpoint and of the rules."""
        return f"{self.inner.name} mapped by {self.mapped.name}"

    def map(self, mapping: "AnyMapping | None") -> "TreeReader":
        if mapping is None:
            return self
        if not isinstance(mapping, MappedTree):
            rules = load_rules(mapping)
            mapping = plan_mapping(rules, self.mapped, name=self.name)
        return MappedReader(self.inner, mapping)

    @cached_property
    def manifest(self) -> Manifest:
        """The tree with its chunks, none of which is stored."""
        nothing = np.empty(0, np.int64)
        nowhere = np.zeros(self.tree.chunk_count, np.int64)
        sums = Sums(
            ordinal=nothing,
            crc32c=np.empty(0, np.uint32),
            digests=np.empty((0, 16), np.uint8),
        )
        places = ChunkLocations(
            files=(self.inner.name,), file=nowhere, offset=nowhere, length=nowhere
        )
        return Manifest(self.tree, sums, places)

    @property
    def items(self) -> Items:
        """Items of the checkpoint."""
        return self.inner.items

    def hold(self) -> AbstractContextManager[None]:
        return self.inner.hold()

    def restore(self, request: RestoreRequest, deadline: DurationLike) -> Any:
        state = self.inner.restore(replace(request, mapping=self.mapped), deadline)
        self.report = self.inner.report
        return state

    def open_source(self) -> "MappedSource":
        return MappedSource(self)

    def plan_reads(
        self,
        wanted: Iterable[tuple[int, Sequence[Region]]],
        place: TakeBuffers,
        meter: Meter,
        deadline: Deadline,
    ) -> "MappedAssembly":
        with collector_paused(), meter.phase("plan"):
            return MappedAssembly(self, wanted, place, meter, deadline)


class MappedAssembly(Assembly):
    """The buffers of leaves that are built; and ``stored``, those that stored chunks
    are read into."""

    def __init__(
        self,
        reader: MappedReader,
        wanted: Iterable[tuple[int, Sequence[Region]]],
        place: TakeBuffers,
        meter: Meter,
        deadline: Deadline,
    ) -> None:
        plan, built = _BufferPlan(reader), list[tuple[int, Sequence[Region]]]()
        for row, regions in wanted:
            built += [] if plan.add(row, regions) else [(row, regions)]
        super().__init__(
            reader.manifest,
            built,
            name=reader.name,
            place=place,
            meter=meter,
            deadline=deadline,
            allocate=reader.allocate,
        )
        self.deadline = deadline
        shared = plan.finish()
        self.stored = Assembly(
            reader.inner.manifest,
            [],
            shared=shared,
            name=reader.inner.name,
            place=place,
            meter=meter,
            deadline=deadline,
            allocate=reader.allocate,
        )
        self.batches = [*plan.cut(shared)]
        """Chunks of ``stored``, in batches that fill buffers of bounded size."""
        self.buffer_bytes += self.stored.buffer_bytes

    @property
    def outstanding(self) -> str:
        return "; ".join(filter(None, (self.stored.outstanding, super().outstanding)))


class _BufferPlan:
    """Decides which part of which buffer each stored chunk fills."""

    def __init__(self, reader: MappedReader) -> None:
        self._reader = reader
        self._buffers = list[Buffer]()
        self._parts: dict[int, list[tuple[int, Segment]]] = defaultdict(list)
        """Parts of ``_buffers`` that each stored row fills."""
        self._known: dict[Any, list[_Filling] | None] = {}
        """Layers of a model are mapped in the same way, and planned once."""

    def add(self, row: int, regions: Sequence[Region]) -> bool:
        """Adds the buffers of regions of a leaf; returns False, and adds nothing, if
        elements must be built, or are of no stored leaf."""
        expression, numbers = self._reader.expressions[row], dict[int, int]()
        order = tuple(
            numbers.setdefault(source.row, len(numbers))
            for source in expression.sources()
        )
        key = (expression, order, tuple(regions))
        if key not in self._known:
            layout = plan_buffer_layout(self._reader.tree.grids[row], regions)
            fillings = [_fill(expression, group, numbers) for group in layout.groups]
            found = [each for each in fillings if each is not None]
            self._known[key] = found if len(found) == len(fillings) else None
        if (known := self._known[key]) is None:
            return False
        rows = [*numbers]
        for each in known:
            buffer = Buffer(row, each.group, DTYPES[expression.dtype])
            buffer.chunks_left, buffer.fills = 0, each.fills  # see ``finish``
            for number, segment in each.parts:
                self._parts[rows[number]].append((len(self._buffers), segment))
            self._buffers.append(buffer)
        return True

    def finish(self) -> list[Planned]:
        """Returns the rows to read, with their buffers."""
        layouts: dict[Any, BufferLayout] = {}
        found = list[Planned]()
        for row, parts in self._parts.items():
            grid = self._reader.inner.tree.grids[row]
            numbers = dict[int, int]()
            mine = tuple(
                (numbers.setdefault(buffer, len(numbers)), segment)
                for buffer, segment in parts
            )
            if (key := (id(grid), mine)) not in layouts:
                layouts[key] = plan_part_layout(grid, mine)
            buffers = [self._buffers[number] for number in numbers]
            for buffer, group in zip(buffers, layouts[key].groups, strict=True):
                buffer.chunks_left += group.chunk_count
            found.append((row, layouts[key], buffers))
        return found

    def cut(self, shared: Sequence[Planned]) -> Iterator[list[int]]:
        """Yields the chunks to read, in batches by the first buffer that each fills."""
        sizes = np.cumsum([0, *(each.group.size_bytes for each in self._buffers)])
        batches = defaultdict[int, list[int]](list)
        number = {buffer: n for n, buffer in enumerate(self._buffers)}
        for row, layout, buffers in shared:
            chunks, segments = layout.holding
            own = np.array([number[buffer] for buffer in buffers])
            filled = own[np.array([group for group, _ in layout.places])[segments]]
            each, starts = np.unique(chunks, return_index=True)
            numbers = sizes[np.minimum.reduceat(filled, starts)] // BUDGET_BYTES
            first = self._reader.inner.tree.first_chunk[row]
            found = (first + each).tolist()
            for at, chunk in zip(numbers.tolist(), found, strict=True):
                batches[at].append(chunk)
        for _, batch in sorted(batches.items()):
            yield sorted(batch)


class _Filling(NamedTuple):
    """A group of segments of a mapped leaf, and what fills it."""

    group: Group
    parts: Sequence[tuple[int, Segment]]
    """Number of a stored leaf, among the ones of the expression, and a part of it."""
    fills: Sequence[tuple[Place, NDArray[Any]]]


def _fill(
    expression: Expression, group: Group, numbers: Mapping[int, int]
) -> _Filling | None:
    """Returns what fills a group; None if elements must be built, or are of no stored
    leaf."""
    parts, fills = list[tuple[int, Segment]](), list[tuple[Place, NDArray[Any]]]()
    for segment in group.segments:
        if 0 in segment.place.shape:
            continue
        for one, region, place in expression.destinations(
            segment.region, segment.place
        ):
            match one:
                case Fill():
                    fills.append((place, one.build(region, iter(()))))
                    continue
                case Source() as stored:
                    sizes: tuple[Shape, ...] = ()
                case Reshape(inner=Source() as stored, axis_sizes=sizes) if sizes:
                    pass
                case _:
                    return None
            is_cast = one.dtype != expression.dtype
            part = Segment(region=region, place=place, is_cast=is_cast, sizes=sizes)
            parts.append((numbers[stored.row], part))
    return _Filling(group, parts, fills) if parts else None


class MappedSource:
    """Reads the leaves of a mapped checkpoint."""

    def __init__(self, reader: MappedReader) -> None:
        self._reader = reader
        self.read_bytes = 0
        """Bytes of the chunks that were read, with a checksum of each."""

    def read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        """See ``ChunkSource.read``."""
        assert isinstance(assembly, MappedAssembly)
        for chunks in assembly.batches:
            self._read_stored(assembly.stored, chunks)
        assembly.stored.check_complete()
        tree = self._reader.tree
        needs = {
            ordinal: [*self._expression(ordinal).requests(self._region(ordinal))]
            for ordinal in ordinals
        }
        groups = {
            row: min(
                (x.row for x in self._reader.expressions[row].sources()), default=-1
            )
            for row in {tree.locate(ordinal)[0] for ordinal in ordinals}
        }

        def find_place(ordinal: int) -> tuple[int, ...]:
            """Returns the place of the first stored chunk that a chunk needs."""
            group = groups[tree.locate(ordinal)[0]]
            for source, region in needs[ordinal]:
                grid = self._reader.inner.tree.grids[source.row]
                return group, source.row, next(grid.covering(region))
            return (group,)

        # 1. and 2.
        ordered = sorted(ordinals, key=lambda ordinal: (find_place(ordinal), ordinal))
        together = ([*chunks] for _, chunks in groupby(ordered, find_place))
        for batch in cut_batches(
            together,
            lambda chunks: sum(_count_bytes(each) for n in chunks for each in needs[n]),
            BATCH_BYTES,
        ):
            self._read_batch([n for chunks in batch for n in chunks], assembly)

    def _expression(self, ordinal: int) -> Expression:
        return self._reader.expressions[self._reader.tree.locate(ordinal)[0]]

    def _region(self, ordinal: int) -> Region:
        row, within = self._reader.tree.locate(ordinal)
        return self._reader.tree.grids[row].region(within)

    def _read_stored(self, assembly: Assembly, chunks: Sequence[int]) -> None:
        self.read_bytes += sum(map(assembly.length, chunks))
        self._reader.inner.open_source().read(chunks, assembly)

    def _read_batch(self, batch: Sequence[int], assembly: "MappedAssembly") -> None:
        assembly.begin(batch)
        parts = [
            (self._expression(ordinal), region, into)
            for ordinal in batch
            for region, into in assembly.parts(ordinal)
        ]
        arrays = RegionArrays(
            (source.row, needed)
            for expression, region, _ in parts
            for source, needed in expression.requests(region)
        )
        meter = Meter("restore", self._reader.name, within=assembly.meter)
        stored = self._reader.inner.plan_reads(
            arrays.wanted, arrays.place, meter, assembly.deadline
        )
        self._read_stored(stored, stored.missing)
        stored.check_complete()
        # 3.
        with assembly.meter.phase("copy"):
            for expression, region, into in parts:
                requests = expression.requests(region)
                found = (arrays[source.row, needed] for source, needed in requests)
                copy_elements(into, expression.build(region, found))
        for ordinal in batch:
            assembly.finish([ordinal])


def _count_bytes(request: tuple[Source, Region]) -> int:
    source, region = request
    itemsize: int = DTYPES[source.dtype].itemsize
    return math.prod(stop - start for start, stop in region) * itemsize
