"""Watch events: decides the outcome of announced changes, and the position of a watch.

An announcement in the journal says which change is about to be written to an object.
The object carries the number of its last announcement, which shows what became of the
change (``resolve``). A watch reads the announcements of a namespace in order. It
reports the changes that have landed, drops those that never will, and keeps the others
in its ``Position`` to resolve them again. Therefore:

1. A change is reported at most once along a position, and exactly once if it landed;
   ``advance`` is the only step along a position. Successive deletes, updates or retags
   may be coalesced into one event.
2. Events are ordered by number. The exception is a change that landed after later ones
   were reported: it is reported when it is seen.
3. A position is small. While ``MAX_PENDING`` changes are pending, it does not advance:
   these are changes being written at the moment, or changes of servers that crashed.

A resume token is a position, bound to the watched run or namespace and encrypted with a
key of the store: its numbers count the changes of runs that the caller may not see.
"""

import hashlib
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from itertools import accumulate, chain, pairwise
from typing import Final, TypeAlias

from storesvc.catalog import slots
from storesvc.catalog.records import record_etag
from storesvc.catalog.slots import NOTHING, PATIENCE
from storesvc.errors import FormatUnsupportedError, InvalidResumeTokenError
from storesvc_proto.v1 import bucket_pb2 as pb

MAX_PENDING: Final = 256
"""Maximum pending changes of a position; a token has about three bytes for each."""

Held: TypeAlias = pb.CheckpointRecord | pb.TagRecord | None
"""The object that an announcement names: a slot, a tag, or None."""

NONCE_BYTES: Final = 16
"""Bytes of the nonce of a token."""

_VERSION: Final = b"\2"
_MAC_BYTES: Final = 16
_BLOCK_BYTES: Final = 64
"""The size of a token shows no more than this of a position."""


class Outcome(Enum):
    """The outcome of an announced change."""

    LANDED = "it was written"
    SUPERSEDED = "it was not written, or was overwritten by a later change"
    PENDING = "it may still be written"


@dataclass(frozen=True, slots=True)
class Position:
    """The progress of a watch."""

    last: int
    """Number of the last announcement that it has passed."""
    pending: tuple[int, ...] = ()
    """Numbers of earlier announcements to resolve again, ascending."""


def resolve(
    number: int, announcement: pb.Announcement, held: Held, *, now: datetime
) -> Outcome:
    """Returns the outcome of an announced change.

    Args:
        held: The object that it names, read at any time after the announcement.
    """
    if isinstance(held, pb.TagRecord):
        found = _numbered_outcome(number, held.sequence, announcement, held)
    elif announcement.kind in (pb.Announcement.KIND_TAG, pb.Announcement.KIND_UNTAG):
        found = _absent_tag_outcome(announcement)
    elif announcement.kind == pb.Announcement.KIND_COMMIT:
        return _commit_outcome(number, announcement, held)
    elif announcement.kind in (
        pb.Announcement.KIND_DELETE,
        pb.Announcement.KIND_UNDELETE,
        pb.Announcement.KIND_UPDATE,
    ):
        found = _checkpoint_outcome(number, announcement, held)
    else:
        raise FormatUnsupportedError(
            f"announcement {number}: expected a kind that this release knows, got "
            f"{announcement.kind}; use a newer release"
        )
    age = now - announcement.create_time.ToDatetime(UTC)
    if found is Outcome.PENDING and age > PATIENCE:
        return Outcome.SUPERSEDED
    return found


def numbers_to_resolve(position: Position, tail: int) -> Iterator[int]:
    """Yields the numbers to resolve, in the order of their events."""
    return chain(position.pending, range(position.last + 1, tail + 1))


def is_full(position: Position) -> bool:
    """Returns whether a position has too many pending changes to advance."""
    return len(position.pending) >= MAX_PENDING


def advance(position: Position, number: int, outcome: Outcome) -> Position:
    pending = [n for n in position.pending if n != number]
    if outcome is Outcome.PENDING:
        pending.append(number)
    return Position(max(position.last, number), tuple(sorted(pending)))


def pack_token(position: Position, *, parent: str, key: bytes, nonce: bytes) -> str:
    """Returns the resume token of a position.

    Args:
        parent: Resource name of the watched run or namespace.
        nonce: Random bytes, different for each token.
    """
    steps = [after - before for before, after in pairwise((0, *position.pending))]
    body = ",".join(map(str, [position.last, *steps])).encode()
    body = body.ljust(-len(body) // _BLOCK_BYTES * -_BLOCK_BYTES)
    hidden = nonce + _apply_stream(body, key, nonce)
    return urlsafe_b64encode(_VERSION + _mac(hidden, parent, key) + hidden).decode()


def unpack_token(token: str, *, parent: str, key: bytes) -> Position:
    """Returns the position of a resume token."""
    try:
        data = urlsafe_b64decode(token)
    except (Base64Error, ValueError):
        data = b""
    hidden = data[len(_VERSION) + _MAC_BYTES :]
    head = _VERSION + _mac(hidden, parent, key)
    if not hmac.compare_digest(data[: len(head)], head):
        raise InvalidResumeTokenError(
            f"resume_token: expected a token of a watch of {parent} of this store, got "
            "another one or a part of one; watch without a token"
        )
    body = _apply_stream(hidden[NONCE_BYTES:], key, hidden[:NONCE_BYTES])
    last, *steps = map(int, body.split(b","))
    return Position(last, tuple(accumulate(steps)))


def _commit_outcome(number: int, announcement: pb.Announcement, held: Held) -> Outcome:
    if not isinstance(held, pb.CheckpointRecord) or held.upload != announcement.upload:
        return Outcome.SUPERSEDED
    if held.state == slots.UPLOADING:
        return Outcome.PENDING
    # A purged checkpoint does not show which announcement of its commit has landed.
    is_this = held.state in slots.CHECKPOINTS and held.commit_sequence == number
    return Outcome.LANDED if is_this else Outcome.SUPERSEDED


def _checkpoint_outcome(
    number: int, announcement: pb.Announcement, held: Held
) -> Outcome:
    """Returns the outcome of a deletion, an undeletion or an update."""
    deletes = announcement.kind == pb.Announcement.KIND_DELETE
    if (
        not isinstance(held, pb.CheckpointRecord)
        or held.upload != announcement.upload
        or held.state not in slots.CHECKPOINTS
    ):
        # It was purged, so a deletion has landed: this one, or another one.
        return Outcome.LANDED if deletes else Outcome.SUPERSEDED
    is_update = announcement.kind == pb.Announcement.KIND_UPDATE
    last = held.update_sequence if is_update else held.sequence
    return _numbered_outcome(number, last, announcement, held)


def _absent_tag_outcome(announcement: pb.Announcement) -> Outcome:
    """Returns the outcome for a tag without a record: never set, or collected."""
    if announcement.kind == pb.Announcement.KIND_UNTAG:
        return Outcome.LANDED
    may_land = announcement.replaces in ("", NOTHING)
    return Outcome.PENDING if may_land else Outcome.SUPERSEDED


def _numbered_outcome(
    number: int,
    last: int,
    announcement: pb.Announcement,
    held: pb.CheckpointRecord | pb.TagRecord,
) -> Outcome:
    """Returns the outcome of a change whose object has the number of its last one."""
    if last >= number:
        return Outcome.LANDED if last == number else Outcome.SUPERSEDED
    # The write was conditional on the record that it replaces, so it can no longer land
    # once the object holds another record. Servers before 0.2 did not name that record.
    may_land = announcement.replaces in ("", record_etag(held))
    return Outcome.PENDING if may_land else Outcome.SUPERSEDED


def _mac(hidden: bytes, parent: str, key: bytes) -> bytes:
    bound = f"{parent}\0".encode() + hidden
    return hashlib.blake2b(bound, key=key, digest_size=_MAC_BYTES).digest()


def _apply_stream(body: bytes, key: bytes, nonce: bytes) -> bytes:
    """Encrypts or decrypts: adds a stream that key and nonce determine."""
    stream = hashlib.shake_256(key + nonce).digest(len(body))
    return bytes(a ^ b for a, b in zip(body, stream, strict=True))
