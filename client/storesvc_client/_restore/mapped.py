"""A checkpoint as a mapping shows it: another tree, read from the stored one.

``MappedReader`` is a reader like the one within it. Leaves of which only the key
changes are read as they are stored, into the buffers that are returned. The others are
read chunk by chunk of a grid of their own, chosen so that each needs few stored chunks:

1. Chunks that need the same stored leaves are read together, in the order of what they
   need, so that a stored chunk that several of them need is read once.
2. Batches bound the memory: the regions that a batch requests are read, and verified,
   by the reader within.
3. Each chunk is built of these regions, and goes into the buffers that are returned.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from storesvc.format.chunks import ChunkLocations, Sums
from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Region
from storesvc.format.manifests import Manifest
from storesvc.format.trees import Tree
from storesvc_client._chunks.buffers import Buffer
from storesvc_client._chunks.memory import cut_batches
from storesvc_client._mapping.expressions import (
    Expression,
    Source,
    copy_elements,
)
from storesvc_client._mapping.families import load_table
from storesvc_client._mapping.planning import MappedTree, make_source, plan_mapping
from storesvc_client._mapping.rules import (
    MAX_DOCUMENT_BYTES,
    Rules,
    check_rules,
    parse_rules,
)
from storesvc_client._restore.assembly import Assembly
from storesvc_client._restore.items import Items
from storesvc_client._restore.open_tree import TreeReader
from storesvc_client._telemetry.progress import Meter
from storesvc_client._values.arguments import Deadline, DurationLike, shown
from storesvc_client._values.options import MappingRules, RestoreRequest
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
    regions: dict[int, dict[Region, None]] = defaultdict(dict)
    for key, region in wanted:
        regions[rows[key]][region] = None
    arrays: dict[tuple[int, Region], NDArray[Any]] = {}

    def keep(buffer: Buffer) -> None:
        for region, array in zip(buffer.regions, buffer.arrays, strict=True):
            arrays[buffer.row, region] = array

    reader.read_regions([(row, [*each]) for row, each in regions.items()], keep)
    return [arrays[rows[key], region] for key, region in wanted]


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
        place: Callable[[Buffer], None],
        meter: Meter,
        deadline: Deadline,
    ) -> "MappedAssembly":
        with meter.phase("plan"):
            return MappedAssembly(self, wanted, place, meter, deadline)


class MappedAssembly(Assembly):
    """The buffers of leaves that are built; and ``stored``, the buffers of leaves that
    are read as they are stored."""

    def __init__(
        self,
        reader: MappedReader,
        wanted: Iterable[tuple[int, Sequence[Region]]],
        place: Callable[[Buffer], None],
        meter: Meter,
        deadline: Deadline,
    ) -> None:
        rows = dict[int, int]()
        stored, built = list[tuple[int, Sequence[Region]]](), []
        for row, regions in wanted:
            expression = reader.expressions[row]
            # a second leaf made of the same one is built: no buffer serves two
            if isinstance(expression, Source) and expression.row not in rows:
                rows[expression.row] = row
                stored.append((expression.row, regions))
            else:
                built.append((row, regions))

        def place_stored(buffer: Buffer) -> None:
            buffer.row = rows[buffer.row]
            place(buffer)

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
        self.stored = reader.inner.plan_reads(stored, place_stored, meter, deadline)
        self.buffer_bytes += self.stored.buffer_bytes


class MappedSource:
    """Reads the leaves of a mapped checkpoint."""

    def __init__(self, reader: MappedReader) -> None:
        self._reader = reader
        self.read_bytes = 0
        """Bytes of the chunks that were read, with a checksum of each."""

    def read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        """See ``ChunkSource.read``."""
        assert isinstance(assembly, MappedAssembly)
        self._read_stored(assembly.stored)
        tree = self._reader.tree
        needs = {
            ordinal: [*self._expression(ordinal).requests(self._region(ordinal))]
            for ordinal in ordinals
        }
        groups = {
            row: min(each.row for each in self._reader.expressions[row].sources())
            for row in {tree.locate(ordinal)[0] for ordinal in ordinals}
            if any(True for _ in self._reader.expressions[row].sources())
        }

        def find_place(ordinal: int) -> tuple[int, ...]:
            """Returns the place of the first stored chunk that a chunk needs."""
            group = groups.get(tree.locate(ordinal)[0], -1)
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

    def _read_stored(self, assembly: Assembly) -> None:
        missing = assembly.missing
        self.read_bytes += sum(map(assembly.length, missing))
        self._reader.inner.open_source().read(missing, assembly)
        assembly.check_complete()

    def _read_batch(self, batch: Sequence[int], assembly: "MappedAssembly") -> None:
        assembly.begin(batch)
        parts = [
            (self._expression(ordinal), region, into)
            for ordinal in batch
            for region, into in assembly.parts(ordinal)
        ]
        wanted: dict[int, dict[Region, None]] = defaultdict(dict)
        for expression, region, _ in parts:
            for source, needed in expression.requests(region):
                wanted[source.row][needed] = None
        arrays: dict[tuple[int, Region], NDArray[Any]] = {}

        def keep(buffer: Buffer) -> None:
            for region, array in zip(buffer.regions, buffer.arrays, strict=True):
                arrays[buffer.row, region] = array

        meter = Meter("restore", self._reader.name, within=assembly.meter)
        rows = [(row, [*regions]) for row, regions in wanted.items()]
        self._read_stored(
            self._reader.inner.plan_reads(rows, keep, meter, assembly.deadline)
        )
        # 3.
        with assembly.meter.phase("copy"):
            for expression, region, into in parts:
                requests = expression.requests(region)
                found = (arrays[source.row, needed] for source, needed in requests)
                copy_elements(into, expression.build(region, found))
        for ordinal in batch:
            assembly.finish(ordinal)


def _count_bytes(request: tuple[Source, Region]) -> int:
    source, region = request
    itemsize: int = DTYPES[source.dtype].itemsize
    return math.prod(stop - start for start, stop in region) * itemsize
