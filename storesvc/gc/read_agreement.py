"""Decides when two reads of all slots show everything that a run needs, and proves it.

Slots are read one after another while they change. A file can move, during the reads,
from a slot that is read late to a slot that was read early: a new checkpoint claims it
and is committed, and its base is purged. A collector must not take such a file for
garbage. So all slots are read twice, with a list of the slots in between that has none
that the first read lacks. Let T be the moment at which that list began.

1. A slot that is not in the list was empty at T. Every other slot was read before T and
   again after T.
2. If both reads name the same upload, it owned the slot at T, because an upload that
   lost its slot never gets it back. If the first read is FREE and the second names an
   upload of the next epoch, one of the two owned it at T, and a FREE slot needs
   nothing.
3. So if no slot became FREE or was taken over between the reads, the second read
   contains everything that needed an object at T. An upload that was committed since
   names all its files there.
4. A file is claimed only from an upload whose slot needs it at that moment: the base,
   which is not purged while another upload may claim from it, or the predecessor in the
   same slot. So whatever is needed after T was needed at T, or was written by an upload
   that owned its slot, or could still reserve it, when the slot was read.

Saves, commits and deletions do not disturb this. Only a purge, an abort or a takeover
between the two reads of its slot requires another read.
"""

from collections.abc import Mapping

from storesvc.catalog.slots import FREE
from storesvc_proto.v1 import bucket_pb2 as pb


def agree(
    first: Mapping[int, pb.CheckpointRecord], second: Mapping[int, pb.CheckpointRecord]
) -> bool:
    """Returns whether the second read shows everything that was needed at a moment
    between the two reads. Both map steps to slots; an empty slot is absent."""
    return all(_agree(first.get(step), second.get(step)) for step in {*first, *second})


def _agree(
    first: pb.CheckpointRecord | None, second: pb.CheckpointRecord | None
) -> bool:
    if first is None or second is None:
        return first is second
    if first.upload == second.upload:
        return second.state != FREE or first.state == FREE
    is_next = second.epoch == first.epoch + 1
    return first.state == FREE and second.state != FREE and is_next
