"""Retention policies: which checkpoints of a run stay.

Rules are values; ``|`` keeps what either keeps, ``&`` what both keep, ``~`` what a
rule does not keep. The text of a policy, which storectl takes, says the same:

>>> policy = KeepLatest(3) | KeepEvery(steps=10_000) | KeepTagged() & ~KeepPinned()
>>> format_policy(policy)
'latest(3) | every(10000 steps) | tagged & ~pinned'
>>> parse_policy("best(2, loss, min) | newer-than(7 days)") == (
...     KeepBest(2, metric="loss", mode="min") | KeepNewerThan(timedelta(days=7))
... )
True

Here only types are checked: whether a policy makes sense, the store says, where it is
given to a run.
"""

import operator
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Final, Literal, SupportsIndex, TypeAlias, get_args, overload

from storesvc_client._values.durations import DurationLike, as_timedelta
from storesvc_client._values.resource_names import is_text
from storesvc_client.errors import InvalidRequestError

Mode: TypeAlias = Literal["min", "max"]
WithoutMetric: TypeAlias = Literal["drop", "keep"]

_MAX_WHOLE: Final = 2**63 - 1
"""The most that the contract can say."""


class RetentionPolicy:
    """Says which checkpoints of a run stay. Whatever it says, the newest one stays,
    and so do those that are pinned or tagged."""

    __slots__ = ()

    def __or__(self, other: "RetentionPolicy") -> "RetentionPolicy":
        return KeepAny((*_members(KeepAny, self), *_members(KeepAny, other)))

    def __and__(self, other: "RetentionPolicy") -> "RetentionPolicy":
        return KeepAll((*_members(KeepAll, self), *_members(KeepAll, other)))

    def __invert__(self) -> "RetentionPolicy":
        return self.policy if isinstance(self, KeepNot) else KeepNot(self)


@dataclass(frozen=True, slots=True)
class KeepLatest(RetentionPolicy):
    """Keeps the checkpoints of the highest steps."""

    count: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", _whole(self, self.count))


@dataclass(frozen=True, slots=True, init=False, repr=False)
class KeepEvery(RetentionPolicy):
    """Keeps the checkpoints at every so many steps, or the first one of each span of
    time."""

    interval: int | timedelta
    """Steps, or the length of a span; spans are counted from 1970-01-01, UTC."""

    @overload
    def __init__(self, *, steps: SupportsIndex) -> None: ...
    @overload
    def __init__(self, *, duration: DurationLike) -> None: ...
    def __init__(
        self,
        *,
        steps: SupportsIndex | None = None,
        duration: DurationLike | None = None,
    ) -> None:
        if (steps is None) == (duration is None):
            raise InvalidRequestError("KeepEvery: expected either steps= or duration=")
        interval: int | timedelta
        if steps is None:
            interval = as_timedelta("KeepEvery(duration=)", duration)
        else:
            interval = _whole(self, steps)
        object.__setattr__(self, "interval", interval)

    def __repr__(self) -> str:
        name = "steps" if isinstance(self.interval, int) else "duration"
        return f"KeepEvery({name}={self.interval!r})"


@dataclass(frozen=True, slots=True, init=False)
class KeepNewerThan(RetentionPolicy):
    """Keeps the checkpoints that were committed within a time before now."""

    duration: timedelta

    def __init__(self, duration: DurationLike) -> None:
        found = as_timedelta("KeepNewerThan(duration=)", duration)
        object.__setattr__(self, "duration", found)


@dataclass(frozen=True, slots=True)
class KeepBest(RetentionPolicy):
    """Keeps the checkpoints with the best values of a metric. NaN is worse than every
    number; of equal values the higher step is better."""

    count: int
    _: KW_ONLY
    metric: str
    mode: Mode
    """Which value is better: the lower or the higher one."""
    without_metric: WithoutMetric = "drop"
    """Whether those without the metric are kept too, beside the best."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", _whole(self, self.count))
        if not is_text(self.metric):
            raise _invalid(self, "the name of a metric", self.metric)
        if self.mode not in get_args(Mode):
            raise _invalid(self, 'mode="min" or mode="max"', self.mode)
        if self.without_metric not in get_args(WithoutMetric):
            raise _invalid(self, 'without_metric="drop" or "keep"', self.without_metric)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class KeepSteps(RetentionPolicy):
    """Keeps the checkpoints at certain steps."""

    steps: tuple[int, ...]

    def __init__(self, *steps: SupportsIndex) -> None:
        object.__setattr__(self, "steps", tuple(_whole(self, step) for step in steps))

    def __repr__(self) -> str:
        return f"KeepSteps({', '.join(map(str, self.steps))})"


@dataclass(frozen=True, slots=True)
class KeepTagged(RetentionPolicy):
    """Keeps the checkpoints that a tag names."""


@dataclass(frozen=True, slots=True)
class KeepPinned(RetentionPolicy):
    """Keeps the checkpoints that are pinned."""


@dataclass(frozen=True, slots=True)
class KeepAny(RetentionPolicy):
    """``a | b``: keeps what at least one policy keeps."""

    policies: tuple[RetentionPolicy, ...]


@dataclass(frozen=True, slots=True)
class KeepAll(RetentionPolicy):
    """``a & b``: keeps what each policy keeps."""

    policies: tuple[RetentionPolicy, ...]


@dataclass(frozen=True, slots=True)
class KeepNot(RetentionPolicy):
    """``~a``: keeps what a policy does not keep."""

    policy: RetentionPolicy


Rule: TypeAlias = (
    KeepLatest
    | KeepEvery
    | KeepNewerThan
    | KeepBest
    | KeepSteps
    | KeepTagged
    | KeepPinned
    | KeepAny
    | KeepAll
    | KeepNot
)
"""All kinds of policies that there are."""


def rule_of(policy: RetentionPolicy) -> Rule:
    """Returns a policy as one of the kinds that there are.

    Raises:
        InvalidRequestError: It is of none of them.
    """
    if not isinstance(policy, Rule):
        raise InvalidRequestError(
            f"retention policy: expected rules such as KeepLatest(3), got {policy!r}"
        )
    return policy


def _members(
    kind: type[KeepAny | KeepAll], policy: RetentionPolicy
) -> tuple[RetentionPolicy, ...]:
    """Returns what a policy adds to a combination of a kind, without its nesting."""
    rule = rule_of(policy)
    return rule.policies if isinstance(rule, kind) else (rule,)


def _whole(rule: RetentionPolicy, value: object) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # asks just that
    except TypeError:
        raise _invalid(rule, "a whole number", value) from None
    if isinstance(value, bool) or abs(number) > _MAX_WHOLE:
        raise _invalid(rule, f"a whole number up to {_MAX_WHOLE}", value)
    return number


def _invalid(rule: RetentionPolicy, expected: str, got: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"{type(rule).__name__}: expected {expected}, got {got!r}"
    )
