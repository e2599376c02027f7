"""R12: one of four writers is lost in each phase of its part, and may join again.

A commit without it is rejected. If it joins the same upload again, it sends the missing
chunks; if it does not, garbage collection aborts the upload after its lease.
"""

import time
from contextlib import suppress
from datetime import timedelta

import grpc
from google.protobuf.duration_pb2 import Duration

from soak import promises
from soak.outcomes import Outcome
from storesvc_proto.v1 import upload_service_pb2 as api
from tests.support.contract import Writer, elements, frame, sums
from tests.support.restrictions import connect

RUN = "soak/writers"
WRITERS = 4
WHOLE = b"".join(map(elements, range(WRITERS)))
PHASES = ("before it wrote", "within its chunk", "before it finished")


def lost_writers() -> Outcome:
    """Loses each writer in each phase, with and without its return."""
    outcome = Outcome()
    with promises.served() as server:
        step = 0
        for lost in range(WRITERS):
            for phase in PHASES:
                for returns in (True, False):
                    point = f"writer {lost} lost {phase}, returns: {returns}"
                    writer = Writer(
                        server.address, RUN, step, writers=WRITERS, chunks=WRITERS
                    )
                    found = _lose(writer, lost, phase)
                    found += _join(writer, lost) if returns else []
                    found += _check(server.address, step, exists=returns)
                    outcome.add(point, found)
                    step += 1
    return outcome


def _lose(writer: Writer, lost: int, phase: str) -> list[str]:
    """Writes everything except a part of one writer, and tries to commit."""
    writer.begin(lease_duration=Duration(seconds=1))
    for number in range(WRITERS):
        if number != lost:
            writer.write(frame(number), writer=number)
            writer.finish(sums(number), writer=number)
    if phase == "before it finished":
        writer.write(frame(lost), writer=lost)
    elif phase == "within its chunk":
        whole = frame(lost)
        half = api.ChunkFrame(
            chunk=whole.chunk, offset=[0], length=[500], data=whole.data[:500]
        )
        with suppress(grpc.RpcError):
            writer.write(half, writer=lost)
    try:
        writer.commit()
    except grpc.RpcError as e:
        assert isinstance(e, grpc.Call)
        if e.code() is grpc.StatusCode.FAILED_PRECONDITION:
            return []
        return [f"the commit was refused with {e.code()}"]
    return ["it was committed without that writer"]


def _join(writer: Writer, lost: int) -> list[str]:
    """Joins as the lost writer, sends its part, and commits."""
    again = writer.begin(lease_duration=Duration(seconds=1))
    writer.write(frame(lost), writer=lost)
    writer.finish(sums(lost), writer=lost)
    writer.commit()
    return [] if again.epoch == writer.epoch else ["it joined another epoch"]


def _check(address: str, step: int, *, exists: bool) -> list[str]:
    """Checks that a committed step is whole, and that a lost one can be saved again
    after its upload is collected."""
    with connect(address) as client:
        run = client.run(RUN)
        if not exists:
            for _ in client.collect(RUN, grace=timedelta()):  # sees its lease
                pass
            time.sleep(1.2)
            for _ in client.collect(RUN, grace=timedelta()):
                pass
            writer = Writer(address, RUN, step, chunks=WRITERS)
            if writer.begin().resumes:
                return ["the collector did not end it after its lease"]
            writer.write(frame(*range(WRITERS)))
            writer.finish(sums(*range(WRITERS)))
            writer.commit()
        ((_, array),) = run.open(step).read(["x"])
        return [] if array.tobytes() == WHOLE else ["it came back with other bytes"]
