"""Values that say when a training loop saves, and what a failed save means to it.

>>> every = Steps(1000) | Minutes(15)
>>> every
Steps(1000) | Minutes(15)
>>> make_schedule(every)
Schedule(steps=(1000,), seconds=900.0)
>>> make_schedule(Steps(10) | timedelta(seconds=90))
Schedule(steps=(10,), seconds=90.0)
"""

import math
import operator
from dataclasses import dataclass
from datetime import timedelta
from numbers import Real
from typing import Final, TypeAlias

from storesvc_client._values.save_schedule import Schedule
from storesvc_client.errors import InvalidRequestError


class Trigger:
    """Base of the values that say when a training loop saves; ``|`` combines them.

    A ``timedelta`` may be combined with them, too.

    >>> every = Steps(1000) | Minutes(15)
    """

    __slots__ = ()

    def __or__(self, other: "Trigger | timedelta") -> "Trigger":
        return AnyTrigger((*_members(self), *_members(_trigger(other))))

    def __ror__(self, other: timedelta) -> "Trigger":
        return _trigger(other) | self


@dataclass(frozen=True, slots=True)
class Steps(Trigger):
    """Saves the steps that are multiples of ``count``, step 0 included."""

    count: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", whole_number("Steps", self.count, least=1))

    def __repr__(self) -> str:
        return f"Steps({self.count})"


@dataclass(frozen=True, slots=True)
class Minutes(Trigger):
    """Saves when ``count`` minutes have passed since the last save began.

    In a job the clock of process 0 decides for all.
    """

    count: float

    def __post_init__(self) -> None:
        is_number = isinstance(self.count, Real) and not isinstance(self.count, bool)
        if not is_number or not (math.isfinite(self.count) and self.count > 0):
            raise InvalidRequestError(
                f"Minutes: expected a number above 0, got {self.count!r}"
            )

    def __repr__(self) -> str:
        return f"Minutes({self.count:g})"


@dataclass(frozen=True, slots=True)
class AnyTrigger(Trigger):
    """``a | b``: saves when one of the triggers does."""

    triggers: "tuple[Steps | Minutes, ...]"

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.triggers))


def make_schedule(every: object) -> Schedule:
    found = _members(_trigger(every))
    steps = {each.count for each in found if isinstance(each, Steps)}
    seconds = [60.0 * each.count for each in found if isinstance(each, Minutes)]
    return Schedule(steps=tuple(sorted(steps)), seconds=min(seconds, default=None))


def _trigger(value: object) -> Trigger:
    if isinstance(value, timedelta):
        return Minutes(value / timedelta(minutes=1))
    if not isinstance(value, Steps | Minutes | AnyTrigger):
        raise InvalidRequestError(
            "every=: expected Steps(1000), Minutes(15), a timedelta, or several of "
            f"them joined by |, got {value!r}"
        )
    return value


def _members(trigger: Trigger) -> "tuple[Steps | Minutes, ...]":
    if isinstance(trigger, AnyTrigger):
        return trigger.triggers
    assert isinstance(trigger, Steps | Minutes)
    return (trigger,)


@dataclass(frozen=True, slots=True)
class Raise:
    """Ends a training loop with the error of the first save that fails."""

    @property
    def count(self) -> int:
        """Saves that may fail in a row: none."""
        return 0


@dataclass(frozen=True, slots=True)
class Tolerate:
    """Lets a training loop continue while at most ``count`` saves fail in a row.

    Each failure is logged. Errors of arguments are raised in any case, and so is the
    failure of the last save of a loop, as no later one makes up for it.
    """

    count: int

    def __post_init__(self) -> None:
        if self.count == 0:
            raise InvalidRequestError(
                "Tolerate: expected a whole number of at least 1, got 0; Raise() "
                "tolerates no failure"
            )
        object.__setattr__(self, "count", whole_number("Tolerate", self.count, least=1))


OnFailure: TypeAlias = Raise | Tolerate

RAISE: Final = Raise()


def checked_on_failure(place: str, value: object) -> OnFailure:
    if not isinstance(value, OnFailure):
        raise InvalidRequestError(
            f"{place}: on_failure=: expected Raise() or Tolerate(3), got {value!r}"
        )
    return value


def whole_number(place: str, value: object, *, least: int = 0) -> int:
    """Returns a whole number of any type as an int, of at least ``least``."""
    if not isinstance(value, bool):
        try:
            number = operator.index(value)  # type: ignore[arg-type]  # asks just that
        except TypeError:
            number = least - 1
        if number >= least:
            return number
    raise InvalidRequestError(
        f"{place}: expected a whole number of at least {least}, got {value!r}"
    )
