"""When two reads of all slots tell what a run needs: an argument, and its test.

Slots are read one after another, and go on changing. A collector must not take a file
for garbage that moved, between its reads, from a slot that it read late to one that it
read early: by a checkpoint that claimed it and was committed, while its base was
purged. So all slots are read twice, with a list of them in between that has none that
the first read lacks. Then let T be the moment at which that list began.

1. A slot that the list lacks was empty at T. All others were read before T and after.
2. Where both reads name the same upload, it had the slot at T, for an upload that lost
   its slot never has it again. Where the first read is FREE, and the second names an
   upload of the very next epoch, one of the two had it, and a FREE slot needs nothing.
3. So where no slot became FREE, or was taken over, between the reads, all that needed
   anything at T is in the second read. An upload that was committed meanwhile names
   all its files now.
4. A file is claimed from an upload whose slot needs it at that moment: the base, which
   is not purged while another may claim from it, or the predecessor in the same slot.
   So what is needed after T was needed at T, or was written by an upload that had or
   could reserve its slot when that was read; and one slot tells that.

Saves, commits and deletions go on without disturbing this. Only a purge, an abort or a
takeover between the two reads of its slot makes another read necessary.
"""

from collections.abc import Mapping

from storesvc.catalog.slots import FREE
from storesvc_proto.v1 import bucket_pb2 as pb


def agree(
    first: Mapping[int, pb.CheckpointRecord], second: Mapping[int, pb.CheckpointRecord]
) -> bool:
    """Returns whether the second read has all that needed anything at the moment
    between two reads of all slots, by step; an empty slot is absent."""
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
