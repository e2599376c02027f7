"""Announced changes of a namespace, and what came of each: read, and kept a while.

Whoever watches asks here, so that however many do, an announcement and its object
are read once. What has come of a change is final, but for one that is pending: that
is looked at again, with every poll while it is young, and less often later.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

from storesvc.catalog import slots
from storesvc.catalog.catalog import Catalogue
from storesvc.catalog.journal import Journal
from storesvc.clock import Clock
from storesvc.format.names import RunName, TagName
from storesvc.watch.events import Held, Outcome, resolve
from storesvc_proto.v1 import bucket_pb2 as pb

KEPT: Final = 512
"""Changes that are kept."""

YOUNG_SECONDS: Final = 60.0
"""How long a pending change is looked at with every poll."""

OLD_SECONDS: Final = 30.0
"""How often after that."""

_TAGGING: Final = (pb.Announcement.KIND_TAG, pb.Announcement.KIND_UNTAG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An announced change, and what came of it."""

    outcome: Outcome
    announcement: pb.Announcement
    run: RunName
    checkpoint: pb.CheckpointRecord | None = None
    """With LANDED: the checkpoint, as it is now; None: it is gone."""


@dataclass(frozen=True, slots=True)
class _Looked:
    """A change, and when it was looked at."""

    change: Change
    poll: int
    first: float
    """When for the first time."""
    last: float


T = TypeVar("T")


class Changes:
    """Those of one namespace."""

    def __init__(
        self, namespace: str, catalogue: Catalogue, journal: Journal, *, clock: Clock
    ) -> None:
        self._namespace = namespace
        self._catalogue = catalogue
        self._journal = journal
        self._clock = clock
        self._poll = 0
        self._announced: OrderedDict[int, pb.Announcement] = OrderedDict()
        self._looked: OrderedDict[int, _Looked] = OrderedDict()

    def begin_poll(self, found: Iterable[tuple[int, pb.Announcement | None]]) -> None:
        """Takes announcements that were read; what was pending may have landed."""
        self._poll += 1
        for number, announcement in found:
            if announcement is not None:
                _keep(self._announced, number, announcement)

    async def change(self, number: int, run: str | None = None) -> Change | None:
        """Returns a change; None where its announcement was trimmed.

        Args:
            number: Of its announcement, which is not the next one to come.
            run: Only this run matters: others' changes need not be looked at.

        Raises:
            CorruptDataError: Its announcement is damaged, or what it is about.
        """
        looked = self._looked.get(number)
        if looked is not None:
            announcement: pb.Announcement | None = looked.change.announcement
        else:
            announcement = await self._announcement(number)
        if announcement is None:
            return None
        name = RunName(self._namespace, announcement.run)
        if run not in (None, name.run):
            return Change(
                outcome=Outcome.SUPERSEDED, announcement=announcement, run=name
            )
        if looked is None or self._is_due(looked):
            change = await self._resolved(number, name, announcement)
            now = self._clock.elapsed()
            first = now if looked is None else looked.first
            looked = _Looked(change, self._poll, first, now)
            _keep(self._looked, number, looked)
        return looked.change

    async def _announcement(self, number: int) -> pb.Announcement | None:
        if number in self._announced:
            return self._announced[number]
        return await self._journal.read(self._namespace, number)

    async def _resolved(
        self, number: int, run: RunName, announcement: pb.Announcement
    ) -> Change:
        """What came of a change by now."""
        held: Held
        slot = tag = None
        if announcement.kind in _TAGGING:
            tag = await self._catalogue.tag_slot(TagName(run, announcement.tag))
            held = tag and tag[0]
        else:
            slot = await self._catalogue.slot(run, announcement.step)
            held = slot and slot[0]
        outcome = resolve(number, announcement, held, now=self._clock.now())
        if outcome is Outcome.LANDED and announcement.kind in _TAGGING:
            slot = await self._catalogue.slot(run, announcement.step)
        checkpoint = slot[0] if slot and _is_of(slot[0], announcement) else None
        return Change(
            outcome=outcome, announcement=announcement, run=run, checkpoint=checkpoint
        )

    def _is_due(self, looked: _Looked) -> bool:
        if looked.change.outcome is not Outcome.PENDING or looked.poll == self._poll:
            return False
        now = self._clock.elapsed()
        return now - looked.first < YOUNG_SECONDS or now - looked.last >= OLD_SECONDS


def _is_of(slot: pb.CheckpointRecord, announcement: pb.Announcement) -> bool:
    return slot.state in slots.CHECKPOINTS and slot.upload == announcement.upload


def _keep(kept: OrderedDict[int, T], number: int, value: T) -> None:
    kept[number] = value
    kept.move_to_end(number)
    if len(kept) > KEPT:
        kept.popitem(last=False)
