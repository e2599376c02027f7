"""R18: lists in pages while steps are saved and purged.

A list neither misses nor repeats a step that stays, and the latest step is never older
than a step that stays.
"""

import threading
from datetime import timedelta

from soak import promises
from soak.outcomes import Outcome
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from tests.support.contract import Writer
from tests.support.restrictions import channel, connect

RUN = "soak/listings"
PARENT = "namespaces/soak/runs/listings"
STAYING = range(0, 60, 3)
"""Steps that stay; the steps between them are saved and purged again and again."""
SCANS = 300


def listings() -> Outcome:
    """Lists in pages again and again during saves, deletions and purges."""
    outcome = Outcome()
    with promises.served() as server:
        for step in STAYING:
            Writer(server.address, RUN, step).save()
        stop = threading.Event()
        churning = threading.Thread(target=_churn, args=(server.address, stop))
        churning.start()
        try:
            for number in range(SCANS):
                lost = _scan(server.address, 1 + number % 3)
                outcome.add(f"scan {number}", lost)
        finally:
            stop.set()
            churning.join()
    return outcome


def _churn(address: str, stop: threading.Event) -> None:
    with connect(address) as client:
        run = client.run(RUN)
        while not stop.is_set():
            for step in set(range(60)) - set(STAYING):
                if stop.is_set():
                    return
                Writer(address, RUN, step).save()
                run.delete(step)
                if step % 3 == 1:
                    run.undelete(step)
                    run.delete(step)
                run.purge(step)
            for _ in client.collect(RUN, grace=timedelta()):
                pass


def _scan(address: str, page_size: int) -> list[str]:
    """Lists once; returns the errors of the list."""
    stub = CheckpointServiceStub(channel(address))
    found: list[int] = []
    request = api.ListCheckpointsRequest(parent=PARENT, page_size=page_size)
    while True:
        page = stub.ListCheckpoints(request, timeout=30)
        found += [checkpoint.step for checkpoint in page.checkpoints]
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    lost = []
    if missed := set(STAYING) - set(found):
        lost.append(f"pages of {page_size} missed {sorted(missed)}")
    if found != sorted(set(found), reverse=True):
        lost.append(f"pages of {page_size} are not in order, or doubled: {found}")
    newest = api.GetCheckpointRequest(name=f"{PARENT}/checkpoints/latest")
    step = stub.GetCheckpoint(newest, timeout=30).checkpoint.step
    if step < max(STAYING):
        lost.append(f"latest was {step}, below {max(STAYING)}, which stays")
    return lost
