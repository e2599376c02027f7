"""Marks of a timeline: checkpoints that are close together share one.

The number of marks depends on the width of the picture, not on the number of
checkpoints.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from storesvc_client._values.axes import Place
from storesvc_client._values.texts import count_text, printable, time_text
from storesvc_client._values.values import Checkpoint, HoldInfo, Tag

BIN: Final = 8.0
"""Width in pixels within which checkpoints share a mark."""

_NAMED: Final = 6
"""Maximum number of names in the tooltip of a mark."""

_Words: TypeAlias = Mapping[str, Sequence[str]]
"""Names of tags, or texts about holds, by uid of the checkpoint."""

_NO_WORDS: Final[_Words] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One mark of a lane."""

    x: float
    """Place of its middle."""
    count: int
    """Number of checkpoints that it stands for."""
    kept: float
    """Share of them that is not deleted."""
    names: tuple[str, ...]
    """Names of tags, in the lane of tags."""
    title: str
    """Text of the tooltip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A row of marks of one kind."""

    name: str
    """"saved", "tags", "pinned", "held" or "damaged"."""
    marks: tuple[Mark, ...]


def lanes_of(
    checkpoints: Sequence[Checkpoint],
    *,
    tags: Iterable[Tag],
    holds: Iterable[HoldInfo],
    damaged: Collection[int],
    at: Callable[[Checkpoint], float],
    place: Place,
) -> list[Lane]:
    """Returns the lanes that have a mark, from the top to the bottom.

    Args:
        checkpoints: The checkpoints of a run, also deleted ones.
        tags: Tags of the run.
        holds: Holds of the run.
        damaged: Steps of damaged checkpoints.
        at: Returns the step or the time of a checkpoint.
        place: Returns the place of a step or a time.
    """
    names = _grouped((tag.uid, tag.name) for tag in tags)
    owners = _grouped((hold.uid, f"held by {hold.owner}") for hold in holds)

    def lane(
        name: str, chosen: Iterable[Checkpoint], words: _Words = _NO_WORDS
    ) -> Lane:
        bins = defaultdict[int, list[Checkpoint]](list)
        for one in chosen:
            bins[int(place(at(one)) // BIN)].append(one)
        marks = (_mark(found, at, place, words) for _, found in sorted(bins.items()))
        return Lane(name=name, marks=tuple(marks))

    steps = frozenset(damaged)
    lanes = (
        lane("tags", (one for one in checkpoints if one.uid in names), names),
        lane("saved", checkpoints),
        lane("pinned", (one for one in checkpoints if one.pinned)),
        lane("held", (one for one in checkpoints if one.uid in owners), owners),
        lane("damaged", (one for one in checkpoints if one.step in steps)),
    )
    return [one for one in lanes if one.marks]


def _mark(
    found: Sequence[Checkpoint],
    at: Callable[[Checkpoint], float],
    place: Place,
    words: _Words,
) -> Mark:
    ordered = sorted(found, key=at)
    places = [place(at(one)) for one in (ordered[0], ordered[-1])]
    deleted = sum(one.delete_time is not None for one in ordered)
    names = [name for one in ordered for name in words.get(one.uid, ())]
    return Mark(
        x=sum(places) / 2,
        count=len(ordered),
        kept=1 - deleted / len(ordered),
        names=tuple(names),
        title="\n".join((*_about(ordered, deleted), *_listed(names))),
    )


def _about(ordered: Sequence[Checkpoint], deleted: int) -> list[str]:
    """Returns the lines of a tooltip about checkpoints."""
    first, last = ordered[0], ordered[-1]
    if len(ordered) > 1:
        gone = f", {deleted:,} deleted" if deleted else ""
        steps = f"steps {first.step:,} to {last.step:,}"
        return [f"{count_text(len(ordered), 'checkpoint')}{gone}", steps]
    states = {"deleted": bool(deleted), "pinned": first.pinned}
    lines = [f"step {first.step:,}", f"committed {time_text(first.commit_time)}"]
    return [*lines, *(state for state, applies in states.items() if applies)]


def _listed(names: Sequence[str]) -> list[str]:
    """Returns the lines of a tooltip about tags or holds."""
    more = len(names) - _NAMED
    shown = [*map(printable, names[:_NAMED])]
    return [*shown, f"and {more:,} more"] if more > 0 else shown


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found = defaultdict[str, list[str]](list)
    for uid, name in pairs:
        found[uid].append(name)
    return dict(found)
