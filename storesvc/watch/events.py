"""What a watch tells: decisions, apart from the journal and the bucket.

An announcement says what is about to be made of an object, and the object says, by
the number that it carries, what came of it (``resolve``). A watch goes through the
announcements of a namespace in order. It tells of those that have landed, passes over
those that never will, and takes the rest along in its ``Position``, to look at again.
So:

1. A number is told of at most once on the way of a position, and where it landed,
   exactly once; ``after`` is the only step on that way.
2. Events come by number, but for changes that landed after they were passed: those
   come when that is seen.
3. A position is small. While it has ``MAX_PENDING`` changes to look at again, it goes
   no further: these are changes in their last moments, or those of servers that died.

A resume token is a position, bound to what is watched and to the store.
"""

import hashlib
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from itertools import accumulate, chain, pairwise
from typing import Final, TypeAlias

from storesvc.catalog import slots
from storesvc.catalog.announcements import NOTHING, PATIENCE
from storesvc.catalog.records import etag_of
from storesvc.errors import FormatUnsupportedError, InvalidResumeTokenError
from storesvc_proto.v1 import bucket_pb2 as pb

MAX_PENDING: Final = 256
"""Announcements that a position takes along; a token has some three bytes for each."""

Held: TypeAlias = pb.CheckpointRecord | pb.TagRecord | None
"""What an announced object holds: a slot or a tag, or nothing."""

_DELETIONS: Final = (pb.Announcement.KIND_DELETE, pb.Announcement.KIND_UNDELETE)

_VERSION: Final = b"\1"
_CHECK_BYTES: Final = 8
_BODY: Final = re.compile(r"[0-9]{1,19}(,[1-9][0-9]{0,18})*")


class Outcome(Enum):
    """What came of an announced change."""

    LANDED = "it was made"
    SUPERSEDED = "it was not made, or what it made was changed again"
    PENDING = "it may still be made"


@dataclass(frozen=True, slots=True)
class Position:
    """How far a watch has come."""

    last: int
    """The last announcement that it has passed."""
    pending: tuple[int, ...] = ()
    """Earlier ones to look at again, ascending."""


def resolve(
    number: int, announcement: pb.Announcement, held: Held, *, now: datetime
) -> Outcome:
    """Returns what came of an announced change.

    Args:
        number: Of the announcement.
        announcement: The announcement.
        held: What its object held at any time after it was announced.
        now: The time of day.

    Raises:
        FormatUnsupportedError: The change is of a kind that this code does not know.
    """
    if isinstance(held, pb.TagRecord):
        found = _of_tag(number, announcement, held)
    elif announcement.kind in (pb.Announcement.KIND_TAG, pb.Announcement.KIND_UNTAG):
        found = _of_absent_tag(announcement)
    elif announcement.kind == pb.Announcement.KIND_COMMIT:
        return _of_commit(number, announcement, held)
    elif announcement.kind in _DELETIONS:
        found = _of_deletion(number, announcement, held)
    else:
        raise FormatUnsupportedError(
            f"announcement {number}: expected a kind that this release knows, got "
            f"{announcement.kind}; use a newer release"
        )
    age = now - announcement.create_time.ToDatetime(UTC)
    if found is Outcome.PENDING and age > PATIENCE:
        return Outcome.SUPERSEDED
    return found


def due(position: Position, tail: int) -> Iterator[int]:
    """Yields the numbers to look at, in the order in which they are told.

    Args:
        position: How far the watch is.
        tail: The last announcement that there is.
    """
    return chain(position.pending, range(position.last + 1, tail + 1))


def is_full(position: Position) -> bool:
    """Returns whether a position must go no further."""
    return len(position.pending) >= MAX_PENDING


def after(position: Position, number: int, outcome: Outcome) -> Position:
    """Returns the position once a number that was due was looked at."""
    pending = [n for n in position.pending if n != number]
    if outcome is Outcome.PENDING:
        pending.append(number)
    return Position(max(position.last, number), tuple(sorted(pending)))


def pack_token(position: Position, *, parent: str, store: str) -> str:
    """Returns the token of a position.

    Args:
        position: The position.
        parent: The name of what is watched.
        store: The uid of the store.
    """
    steps = [after - before for before, after in pairwise((0, *position.pending))]
    body = ",".join(map(str, [position.last, *steps])).encode()
    data = _VERSION + _check(body, parent, store) + body
    return urlsafe_b64encode(data).decode()


def unpack_token(token: str, *, parent: str, store: str) -> Position:
    """Returns the position of a token.

    Args:
        token: The token.
        parent: The name of what is watched.
        store: The uid of the store.

    Raises:
        InvalidResumeTokenError: It was not made by ``pack_token`` for that.
    """
    try:
        data = urlsafe_b64decode(token)
    except (Base64Error, ValueError):
        data = b""
    head = len(_VERSION) + _CHECK_BYTES
    body = data[head:]
    if data[:head] != _VERSION + _check(body, parent, store):
        raise _invalid(parent)
    # That was no proof against a forger, so all the rest is looked at too.
    if not _BODY.fullmatch(body.decode(errors="replace")):
        raise _invalid(parent)
    last, *steps = map(int, body.split(b","))
    pending = tuple(accumulate(steps))
    if len(pending) > MAX_PENDING or (pending and pending[-1] > last):
        raise _invalid(parent)
    return Position(last, pending)


def _of_commit(number: int, announcement: pb.Announcement, held: Held) -> Outcome:
    if not isinstance(held, pb.CheckpointRecord) or held.upload != announcement.upload:
        return Outcome.SUPERSEDED
    if held.state == slots.UPLOADING:
        return Outcome.PENDING
    # One that was purged cannot tell which announcement of its commit has landed.
    is_this = held.state in slots.CHECKPOINTS and held.commit_sequence == number
    return Outcome.LANDED if is_this else Outcome.SUPERSEDED


def _of_deletion(number: int, announcement: pb.Announcement, held: Held) -> Outcome:
    """Of a deletion, or of the undoing of one."""
    deletes = announcement.kind == pb.Announcement.KIND_DELETE
    if (
        not isinstance(held, pb.CheckpointRecord)
        or held.upload != announcement.upload
        or held.state not in slots.CHECKPOINTS
    ):
        # It was purged, so the deletion has landed, this one or another.
        return Outcome.LANDED if deletes else Outcome.SUPERSEDED
    if held.sequence >= number:
        return Outcome.LANDED if held.sequence == number else Outcome.SUPERSEDED
    return _of_unchanged(announcement, held)


def _of_tag(number: int, announcement: pb.Announcement, held: pb.TagRecord) -> Outcome:
    if held.sequence >= number:
        return Outcome.LANDED if held.sequence == number else Outcome.SUPERSEDED
    return _of_unchanged(announcement, held)


def _of_absent_tag(announcement: pb.Announcement) -> Outcome:
    """Of a tag that has no record: it was never set, or was deleted and collected."""
    if announcement.kind == pb.Announcement.KIND_UNTAG:
        return Outcome.LANDED
    may_land = announcement.replaces in ("", NOTHING)
    return Outcome.PENDING if may_land else Outcome.SUPERSEDED


def _of_unchanged(
    announcement: pb.Announcement, held: pb.CheckpointRecord | pb.TagRecord
) -> Outcome:
    """Of a change that has not landed by now: it never will once the object holds
    another record than it was to replace, for that was the condition of its write.
    Servers before 0.2 did not say which."""
    may_land = announcement.replaces in ("", etag_of(held))
    return Outcome.PENDING if may_land else Outcome.SUPERSEDED


def _check(body: bytes, parent: str, store: str) -> bytes:
    made_of = f"{store}\0{parent}\0".encode() + body
    return hashlib.blake2b(made_of, digest_size=_CHECK_BYTES).digest()


def _invalid(parent: str) -> InvalidResumeTokenError:
    return InvalidResumeTokenError(
        f"resume_token: expected a token of a watch of {parent} of this store, got "
        "another one or a part of one; watch without a token"
    )
