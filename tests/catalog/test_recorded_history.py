"""No record that is put back or exchanged costs data, but where it says so itself."""

import asyncio
from itertools import permutations

import pytest

from storesvc.format import layout
from storesvc.format.seal import unseal
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.support.collecting_process import PLACES, RUN
from tests.support.recorded_history import Recorded, losses, record


def state(data: bytes | None, place: str) -> str:
    """Returns what an earlier version of a record is, where that is honoured."""
    if data is None:
        return "removed"
    if place == layout.run_record(RUN):
        policy = unseal(data, pb.RunRecord, place=place)
        return "another policy" if policy.HasField("retention") else ""
    if place.startswith(PLACES.checkpoints):
        slot = unseal(data, pb.CheckpointRecord, place=place)
        return pb.CheckpointRecord.State.Name(slot.state)
    return ""


@pytest.mark.slow
def test_what_an_earlier_version_of_a_record_costs() -> None:
    """A removed slot is abandoned if no tag and no hold names it; one that
    says that it was deleted is purged; and a policy is applied. All else costs nothing
    once the last version is there again."""

    async def main() -> set[tuple[str, str]]:
        recorded = await record()
        costly = set()
        for place in recorded.records:
            for data in recorded.earlier(place):
                if await losses(recorded, place, data):
                    costly.add((place, state(data, place)))
        return costly

    slot = PLACES.checkpoint(4)
    assert {
        (slot, "removed"),
        (slot, "STATE_DELETED"),
        (layout.run_record(RUN), "another policy"),
    } == asyncio.run(main())


@pytest.mark.slow
def test_an_exchanged_record_costs_nothing() -> None:
    async def main() -> list[str]:
        recorded = await record()
        return [
            f"{place} held {other}: {loss}"
            for place, other in pairs(recorded)
            for loss in await losses(recorded, place, recorded.last[other])
        ]

    assert [] == asyncio.run(main())


def pairs(recorded: Recorded) -> list[tuple[str, str]]:
    """Returns the pairs of records of one folder."""
    return [
        (place, other)
        for place, other in permutations(recorded.records, 2)
        if place.rpartition("/")[0] == other.rpartition("/")[0]
    ]
