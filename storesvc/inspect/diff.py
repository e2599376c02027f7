"""Diffs of checkpoints: compares their manifests, without reading their chunks."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from storesvc.catalog.catalog import Catalog
from storesvc.fair_semaphore import FairSemaphore
from storesvc.format.names import CheckpointName
from storesvc.inspect.diff_rules import Difference, differences
from storesvc_proto.v1 import bucket_pb2 as pb

COMPARISONS_AT_ONCE: Final = 2
"""Maximum comparisons in a process; each may hold two manifests of the largest size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The differences between two checkpoints."""

    before: pb.CheckpointRecord
    after: pb.CheckpointRecord
    same_leaf_count: int
    differences: Sequence[Difference]


class Comparisons:
    """Compares checkpoints."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._turns = FairSemaphore(COMPARISONS_AT_ONCE, purpose="compares checkpoints")

    @asynccontextmanager
    async def between(
        self, before: CheckpointName, after: CheckpointName
    ) -> AsyncIterator[Comparison]:
        """Yields the differences between two checkpoints, of one run or of two runs.

        Raises:
            RunNotFoundError: A run does not exist.
            CheckpointNotFoundError: A checkpoint does not exist.
            CorruptDataError: A manifest is missing or damaged.
            LimitExceededError: Other comparisons took too long.
        """
        old = await self._catalog.checkpoint(before)
        new = await self._catalog.checkpoint(after)
        async with self._turns.held(before.run.namespace):
            found = await asyncio.to_thread(
                differences,
                await self._catalog.manifest(before.run, old),
                await self._catalog.manifest(after.run, new),
            )
            different = sum(
                difference.after is not None and not difference.is_of_item
                for difference in found
            )
            yield Comparison(
                before=old,
                after=new,
                same_leaf_count=new.leaf_count - different,
                differences=found,
            )
