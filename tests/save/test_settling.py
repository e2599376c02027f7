"""A repeated change is answered only once what an earlier try wrote is durable."""

import uuid
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from storesvc.format import layout
from storesvc.format.names import CheckpointName, TagName
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.support.collecting_process import PLACES, RUN, Process, started
from tests.support.faulty_bucket import Call, Fault

ID = str(uuid.uuid4())


async def delete(process: Process) -> Any:
    return await process.store.lifecycle.delete(
        RUN, 1, purge_delay=timedelta(days=1), etag="", write_id=ID
    )


async def update(process: Process) -> Any:
    given = pb.RunRecord(labels={"a": "b"})
    return await process.store.runs.update(RUN, given, ["labels"], etag="", write_id=ID)


async def untag(process: Process) -> Any:
    return await process.store.tags.delete(TagName(RUN, "best"), etag="", write_id=ID)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (delete, PLACES.checkpoint(1)),
        (update, layout.run_record(RUN)),
        (untag, PLACES.tag("best")),
    ],
)
async def test_a_repeated_change_is_settled(
    change: Callable[[Process], Awaitable[Any]], place: str
) -> None:
    settled: list[str] = []

    def plan(call: Call) -> Fault:
        if call.operation == "settle":
            settled.append(call.path)
        return Fault.NONE

    process = await started()
    await process.save(1)
    await process.save(2)
    await process.store.tags.set(
        TagName(RUN, "best"),
        CheckpointName(RUN, 2),
        protected=None,
        etag="",
        write_id=str(uuid.uuid4()),
    )
    first = await change(process)
    other = await process.beside()
    other.bucket.calls.follow(plan)
    assert first == await change(other)
    assert place in settled
