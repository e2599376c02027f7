"""The plan of a spread restore: its stages bound the memory, and block no process."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storesvc.format.chunks import ChunkLocations, Sums
from storesvc.format.grids import Region
from storesvc.format.manifests import Manifest
from storesvc.format.trees import Leaf, Tree
from storesvc_client._job.assignment import Holders
from storesvc_client._restore import spread
from storesvc_client._restore.spread import Exchange, SpreadPlan, Stage
from storesvc_proto.v1 import tree_pb2

COUNT = 4
CHUNK = 100
BUDGET = 900

Cut = tuple[tuple[int, int], Holders]
"""A region of a leaf of one dimension, and the processes that need it."""


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    """Budgets and slices of a few chunks."""
    patch = pytest.MonkeyPatch()
    patch.setattr(spread, "STAGE_BYTES", BUDGET)
    patch.setattr(spread, "SLICE_BYTES", 250)
    yield
    patch.undo()


@st.composite
def leaves(draw: st.DrawFn) -> list[Cut]:
    """Draws the needed regions of a leaf; they are neither all of it nor whole
    chunks."""
    ends = sorted(draw(st.sets(st.integers(1, 12 * CHUNK), min_size=1, max_size=4)))
    processes = st.frozensets(st.integers(0, COUNT - 1))
    cuts = zip([0, *ends], ends, strict=False)
    return [(cut, of) for cut in cuts if (of := draw(processes))]


def plan_of(drawn: Sequence[Sequence[Cut]]) -> SpreadPlan:
    tree = Tree(
        tuple(
            Leaf(
                key=f"{row:02}",
                path_kinds="k",
                kind=tree_pb2.LEAF_KIND_ARRAY,
                dtype="uint8",
                shape=(12 * CHUNK,),
                chunk_shape=(CHUNK,),
            )
            for row in range(len(drawn))
        )
    )
    manifest = Manifest(tree, Sums.of_rows([]), ChunkLocations.of_rows([]))
    needed: list[tuple[int, Mapping[Region, Holders]]] = [
        (row, {(region,): of for region, of in cuts}) for row, cuts in enumerate(drawn)
    ]
    return SpreadPlan(manifest, needed, count=COUNT)


def chunks_of(stage: Stage) -> set[int]:
    exchanged = (c for each in stage.exchanges for of in each.chunks for c in of)
    return {*stage.own, *exchanged}


@given(st.lists(leaves(), max_size=9))
def test_the_buffers_of_a_stage_fit_into_the_budget_of_each_process(
    drawn: list[list[Cut]],
) -> None:
    plan = plan_of(drawn)

    for process in range(COUNT):
        begun: set[int] = set()
        for stage in plan.stages(process):
            rows = {chunk // 12 for chunk in chunks_of(stage)}
            held = sum(
                stop - start
                for row in rows
                for (start, stop), of in drawn[row]
                if process in of
            )
            assert held <= BUDGET or 1 == len(rows)
            assert not rows & begun  # a leaf is complete at the end of its stage
            begun |= rows


@given(st.lists(leaves(), max_size=9))
def test_each_process_gets_each_chunk_of_an_exchanged_leaf_once(
    drawn: list[list[Cut]],
) -> None:
    plan = plan_of(drawn)
    needers: dict[int, set[int]] = {}
    for row, cuts in enumerate(drawn):
        for (start, stop), of in cuts:
            for within in range(start // CHUNK, -(-stop // CHUNK)):
                needers.setdefault(12 * row + within, set()).update(of)
    exchanged = {chunk // 12 for chunk, of in needers.items() if len(of) > 1}

    for process in range(COUNT):
        found = [c for stage in plan.stages(process) for c in sorted(chunks_of(stage))]
        assert found == sorted(
            chunk
            for chunk, of in needers.items()
            if process in of and chunk // 12 in exchanged
        )


@given(st.lists(leaves(), max_size=9))
def test_no_process_waits_for_another_in_a_circle(drawn: list[list[Cut]]) -> None:
    plan = plan_of(drawn)
    left: list[list[Exchange]] = [
        [each for stage in plan.stages(process) for each in stage.exchanges]
        for process in range(COUNT)
    ]

    while any(left):
        heads = [exchanges[0] if exchanges else None for exchanges in left]
        (ready, *_) = [
            each
            for each in heads
            if each is not None and all(heads[at] == each for at in each.processes)
        ]
        for process in ready.processes:
            left[process].pop(0)


@given(st.lists(leaves(), min_size=1, max_size=9))
def test_slices_hold_what_is_sent_and_have_few_sizes(drawn: list[list[Cut]]) -> None:
    for process in range(COUNT):
        for stage in plan_of(drawn).stages(process):
            for each in stage.exchanges:
                longest = max(len(of) * (CHUNK + 4) for of in each.chunks)
                assert longest <= each.rounds * each.slice_bytes
                assert each.slice_bytes <= 250


@pytest.mark.parametrize("size", [1, 31, 32, 33, 1000, (64 << 20) - 1, 64 << 20])
def test_a_rounded_size_is_little_larger(size: int) -> None:
    rounded = spread._round_up(size)

    assert size <= rounded <= size * (1 + 1 / 16)
    near = np.arange(size, size + size // 2)[: 1 << 12]
    assert len({spread._round_up(int(n)) for n in near}) <= 32
