"""I12: every call of the contract is cancelled at each of its suspensions, once, or
again while it cleans up, or as what it waits for comes."""

import tempfile
from pathlib import Path

import grpc

from soak.outcomes import Outcome
from tests.support.cancels import CancellingServer
from tests.support.every_call import CALLS, Make, Saved, check_save


def cancels() -> Outcome:
    """Cancels each call at each of its suspensions."""
    outcome, points = Outcome(), list[str]()
    with tempfile.TemporaryDirectory(prefix="storesvc-soak-") as directory:
        for name, ways in CALLS.items():
            before = outcome.points
            with CancellingServer(Path(directory, name)) as server:
                for way, make in enumerate(ways):
                    what = f"{name} {way}" if way else name
                    for times, is_late in ((1, False), (2, False), (1, True)):
                        _cancel(outcome, server, what, make, times, is_late=is_late)
            points.append(f"{name} {outcome.points - before}")
    outcome.note = ", ".join(points)
    return outcome


def _cancel(
    outcome: Outcome,
    server: CancellingServer,
    name: str,
    make: Make,
    times: int,
    *,
    is_late: bool,
) -> None:
    what = f"{name} cancelled" + " twice" * (times == 2) + " late" * is_late
    for number, lost in server.sweep(
        lambda: make(Saved(server.address)), times=times, is_late=is_late
    ):
        try:
            check_save(server.address)
        except grpc.RpcError as e:
            lost.append(f"a save after it failed: {e}")
        outcome.add(f"{what} at suspension {number}", lost)
