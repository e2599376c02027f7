"""Rpcs that compare checkpoints."""

import asyncio
from collections.abc import Sequence
from typing import Final

from storesvc.format.names import CheckpointName, RunName
from storesvc.inspect.damage import Difference, dtype_text, shape_of
from storesvc.inspect.verify import Comparison
from storesvc.rpc import messages
from storesvc.rpc.boundary import Context, share_key
from storesvc.rpc.message_budget import MessageBudget
from storesvc.rpc.streams import write
from storesvc.store import Store
from storesvc_proto.v1 import checkpoint_service_pb2 as checkpoint_api

PAGE: Final = 500
"""Differences per message: it fits with keys and shapes of maximum length."""


class DiffCalls:
    """Compares checkpoints."""

    _store: Store
    _sent: MessageBudget

    async def DiffCheckpoints(
        self, request: checkpoint_api.DiffCheckpointsRequest, context: Context
    ) -> None:
        before, after = map(CheckpointName.from_resource, (request.base, request.name))
        async with self._store.comparisons.between(before, after) as found:
            summary = summary_message(before.run, after.run, found)
            pages = await asyncio.to_thread(pages_of, found.differences)
        # Outside the comparison, so that no other one waits while the client reads.
        with self._sent.share(share_key(context)) as share:
            await share.take(sum(page.ByteSize() for page in pages))
            response = checkpoint_api.DiffCheckpointsResponse(summary=summary)
            await write(context, response)
            for page in pages:
                await write(context, page, share)


def pages_of(
    differences: Sequence[Difference],
) -> list[checkpoint_api.DiffCheckpointsResponse]:
    """Returns the messages for differences."""
    return [
        checkpoint_api.DiffCheckpointsResponse(
            differences=map(difference_message, differences[at : at + PAGE])
        )
        for at in range(0, len(differences), PAGE)
    ]


def summary_message(
    before: RunName, after: RunName, found: Comparison
) -> checkpoint_api.DiffSummary:
    """Returns the message for the summary of a comparison."""
    return checkpoint_api.DiffSummary(
        base=messages.checkpoint_message(before, found.before),
        checkpoint=messages.checkpoint_message(after, found.after),
        same_leaf_count=found.same_leaf_count,
        different_leaf_count=sum(not each.is_of_item for each in found.differences),
    )


def difference_message(difference: Difference) -> checkpoint_api.LeafDifference:
    """Returns the message for the difference of a leaf."""
    message = checkpoint_api.LeafDifference(
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
