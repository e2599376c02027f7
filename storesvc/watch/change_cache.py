"""Change cache: resolves announced changes of a namespace, and keeps the results.

All watches of a process share it, so an announcement and the object that it names are
read once. The outcome of a change is final unless it is pending. A pending change is
resolved again: at every poll while it is young, less often later.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

from storesvc.catalog import slots
from storesvc.catalog.catalog import Catalog
from storesvc.catalog.journal import Journal
from storesvc.clock import Clock
from storesvc.format.names import RunName, TagName
from storesvc.watch.events import Held, Outcome, resolve
from storesvc_proto.v1 import bucket_pb2 as pb

KEPT: Final = 512
"""Maximum changes that are kept."""

YOUNG_SECONDS: Final = 60.0
"""Age up to which a pending change is resolved again at every poll."""

OLD_SECONDS: Final = 30.0
"""Interval at which an older pending change is resolved again."""

_TAGGING: Final = (pb.Announcement.KIND_TAG, pb.Announcement.KIND_UNTAG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An announced change and its outcome."""

    outcome: Outcome
    announcement: pb.Announcement
    run: RunName
    checkpoint: pb.CheckpointRecord | None = None
    """For LANDED: the checkpoint in its current state; None: it was purged."""


@dataclass(frozen=True, slots=True)
class _Resolved:
    """A change, and when it was resolved."""

    change: Change
    poll: int
    first: float
    """Time when it was first resolved, by ``Clock.elapsed``."""
    last: float
    """Time when it was last resolved."""


T = TypeVar("T")


class ChangeCache:
    """The changes of one namespace."""

    def __init__(
        self, namespace: str, catalog: Catalog, journal: Journal, *, clock: Clock
    ) -> None:
        self._namespace = namespace
        self._catalog = catalog
        self._journal = journal
        self._clock = clock
        self._poll = 0
        self._announced: OrderedDict[int, pb.Announcement] = OrderedDict()
        self._resolved: OrderedDict[int, _Resolved] = OrderedDict()

    def begin_poll(self, found: Iterable[tuple[int, pb.Announcement | None]]) -> None:
        """Adds announcements that were read; pending changes may have landed."""
        self._poll += 1
        for number, announcement in found:
            if announcement is not None:
                _keep(self._announced, number, announcement)

    async def change(self, number: int, run: str | None = None) -> Change | None:
        """Returns a change; None: its announcement was trimmed.

        Args:
            number: Number of the announcement; it must exist, or have existed.
            run: Only changes of this run are resolved; others count as SUPERSEDED.

        Raises:
            CorruptDataError: The announcement or the object that it names is damaged.
        """
        resolved = self._resolved.get(number)
        if resolved is not None:
            announcement: pb.Announcement | None = resolved.change.announcement
        else:
            announcement = await self._announcement(number)
        if announcement is None:
            return None
        name = RunName(self._namespace, announcement.run)
        if run not in (None, name.run):
            return Change(
                outcome=Outcome.SUPERSEDED, announcement=announcement, run=name
            )
        if resolved is None or self._is_due(resolved):
            change = await self._resolve(number, name, announcement)
            now = self._clock.elapsed()
            first = now if resolved is None else resolved.first
            resolved = _Resolved(change, self._poll, first, now)
            _keep(self._resolved, number, resolved)
        return resolved.change

    async def _announcement(self, number: int) -> pb.Announcement | None:
        if number in self._announced:
            return self._announced[number]
        return await self._journal.read(self._namespace, number)

    async def _resolve(
        self, number: int, run: RunName, announcement: pb.Announcement
    ) -> Change:
        """Reads the object that an announcement names, and resolves its change."""
        held: Held
        slot = tag = None
        if announcement.kind in _TAGGING:
            tag = await self._catalog.tag_slot(TagName(run, announcement.tag))
            held = tag and tag[0]
        else:
            slot = await self._catalog.slot(run, announcement.step)
            held = slot and slot[0]
        outcome = resolve(number, announcement, held, now=self._clock.now())
        if outcome is Outcome.LANDED and announcement.kind in _TAGGING:
            slot = await self._catalog.slot(run, announcement.step)
        checkpoint = slot[0] if slot and _is_of(slot[0], announcement) else None
        return Change(
            outcome=outcome, announcement=announcement, run=run, checkpoint=checkpoint
        )

    def _is_due(self, found: _Resolved) -> bool:
        """Returns whether a pending change must be resolved again."""
        if found.change.outcome is not Outcome.PENDING or found.poll == self._poll:
            return False
        now = self._clock.elapsed()
        return now - found.first < YOUNG_SECONDS or now - found.last >= OLD_SECONDS


def _is_of(slot: pb.CheckpointRecord, announcement: pb.Announcement) -> bool:
    return slot.state in slots.CHECKPOINTS and slot.upload == announcement.upload


def _keep(kept: OrderedDict[int, T], number: int, value: T) -> None:
    kept[number] = value
    kept.move_to_end(number)
    if len(kept) > KEPT:
        kept.popitem(last=False)
