"""Requests that take a multiple of their size when they are unpacked.

Sends, for each call and each repeated field of its request, a stream of the largest
messages, filled with the smallest possible entries.
"""

import time
from typing import Final

from soak import promises
from soak.health import measured
from soak.outcomes import Outcome
from tests.rpc.test_request_limits import memory_bytes
from tests.support.amplified_requests import all_amplified
from tests.support.contract import Writer

PARTS: Final = 8
"""Messages of a stream."""

MEMORY_BYTES: Final = 512 << 20
"""Most additional memory of the server, over its memory at rest."""

HEALTH_SECONDS: Final = 0.2
"""Most additional duration of a health check under these requests, over the server at
rest, which allows for other load on the machine."""

REST_SECONDS: Final = 5.0


def amplifications() -> Outcome:
    """Sends each request, and checks the server's memory and health."""
    outcome, most_bytes, worst_seconds = Outcome(), 0, 0.0
    with promises.served() as server:
        writer = Writer(server.address, "soak/amplified", 1, writers=2)
        writer.begin()
        at_rest = memory_bytes(server.pid, "VmRSS")
        with measured(server.address) as health:
            time.sleep(REST_SECONDS)
            idle_seconds = health.worst_seconds()
            for amplified in all_amplified():
                health.worst_seconds()
                status = amplified.send(server.address, writer, parts=PARTS)
                taken = memory_bytes(server.pid, "VmHWM") - at_rest
                seconds = health.worst_seconds()
                most_bytes = max(most_bytes, taken)
                worst_seconds = max(worst_seconds, seconds)
                lost = []
                if status not in {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}:
                    lost.append(f"{amplified} was answered {status}")
                if taken > MEMORY_BYTES:
                    lost.append(f"{amplified} took {taken >> 20} MiB")
                if seconds > HEALTH_SECONDS + idle_seconds:
                    lost.append(f"{amplified}: health took {1000 * seconds:.0f} ms")
                outcome.add(str(amplified), lost)
    outcome.note = (
        f"{most_bytes >> 20} MiB beyond rest at most, health "
        f"{1000 * worst_seconds:.0f} ms at most, {1000 * idle_seconds:.0f} at rest"
    )
    return outcome
