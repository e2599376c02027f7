"""Calls that compare checkpoints."""

import asyncio
from collections.abc import Sequence
from typing import Final

from storesvc.format.names import CheckpointName, RunName
from storesvc.inspect.diff import Comparison
from storesvc.inspect.diff_rules import Difference, dtype_text, shape_of
from storesvc.rpc import messages
from storesvc.rpc.boundary import Context, host_of, refusals, write
from storesvc.rpc.message_budget import MemoryBudget
from storesvc.store import Store
from storesvc_proto.v1 import checkpoint_service_pb2 as catalogue_api

PAGE: Final = 500
"""Differences of a message: below its limit with the longest keys and shapes."""


class DiffCalls:
    """Compares checkpoints."""

    _store: Store
    _sent: MemoryBudget

    async def DiffCheckpoints(
        self, request: catalogue_api.DiffCheckpointsRequest, context: Context
    ) -> None:
        async with refusals(context):
            before = CheckpointName.from_resource(request.base)
            after = CheckpointName.from_resource(request.name)
            async with self._store.comparisons.between(before, after) as found:
                summary = summary_message(before.run, after.run, found)
                pages = await asyncio.to_thread(pages_of, found.differences)
            # no other comparison waits while the client takes them
            with self._sent.share(host_of(context.peer())) as share:
                await share.take(sum(page.ByteSize() for page in pages))
                response = catalogue_api.DiffCheckpointsResponse(summary=summary)
                await write(context, response)
                for page in pages:
                    await write(context, page, share)


def pages_of(
    differences: Sequence[Difference],
) -> list[catalogue_api.DiffCheckpointsResponse]:
    """Returns differences as the contract shows them."""
    return [
        catalogue_api.DiffCheckpointsResponse(
            differences=map(difference_message, differences[at : at + PAGE])
        )
        for at in range(0, len(differences), PAGE)
    ]


def summary_message(
    before: RunName, after: RunName, found: Comparison
) -> catalogue_api.DiffSummary:
    """Returns what two checkpoints have in common, as the contract shows it."""
    return catalogue_api.DiffSummary(
        base=messages.checkpoint_message(before, found.before),
        checkpoint=messages.checkpoint_message(after, found.after),
        same_leaf_count=found.same_leaf_count,
        different_leaf_count=len(found.differences),
    )


def difference_message(difference: Difference) -> catalogue_api.LeafDifference:
    """Returns how a leaf differs, as the contract shows it."""
    message = catalogue_api.LeafDifference(
        key=difference.leaf.key,
        kind=difference.kind,
        changed_chunk_count=difference.changed_chunks,
        chunk_count=difference.leaf.grid.count,
    )
    if difference.before is not None:
        message.base_dtype = dtype_text(difference.before)
        message.base_shape.extend(shape_of(difference.before))
    if difference.after is not None:
        message.dtype = dtype_text(difference.after)
        message.shape.extend(shape_of(difference.after))
    return message
