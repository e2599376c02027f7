"""R6: records that are replaced by records of other places or kinds."""

import asyncio
from itertools import permutations

from soak.outcomes import Outcome
from tests.support.recorded_history import losses, record


def exchanged_records() -> Outcome:
    """Replaces each record by each other one, collects, and restores the record."""
    outcome = Outcome()

    async def main() -> None:
        recorded = await record()
        for place, other in permutations(recorded.records, 2):
            point = f"{place} holds {other}"
            outcome.add(point, await losses(recorded, place, recorded.last[other]))

    asyncio.run(main())
    return outcome
