"""R6: records that hold those of other places and kinds, while collectors run."""

import asyncio
from itertools import permutations

from tests.soak.outcomes import Outcome
from tests.support.recorded_history import losses, record


def exchanged_records() -> Outcome:
    """Puts each record in the place of each other one, collects, and puts it back."""
    outcome = Outcome()

    async def main() -> None:
        recorded = await record()
        for place, other in permutations(recorded.records, 2):
            point = f"{place} holds {other}"
            outcome.add(point, await losses(recorded, place, recorded.last[other]))

    asyncio.run(main())
    return outcome
