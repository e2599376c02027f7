"""Retention policies: which checkpoints of a run stay.

Rules are values; ``|`` keeps what either keeps, ``&`` what both keep, ``~`` what a
rule does not keep. ``format_policy`` and ``parse_policy`` convert policies to and from
the text that storectl takes:

>>> policy = KeepLatest(3) | KeepEvery(steps=10_000) | KeepTagged() & ~KeepPinned()
>>> format_policy(policy)
'latest(3) | every(10000 steps) | tagged & ~pinned'
>>> parse_policy("best(2, loss, min) | newer-than(7 days)") == (
...     KeepBest(2, metric="loss", mode="min") | KeepNewerThan(timedelta(days=7))
... )
True

Only types are checked here; the server rejects policies that keep nothing when they are
set on a run.
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
"""Largest integer of the contract (int64)."""


class RetentionPolicy:
    """Base of the rules that decide which checkpoints of a run stay.

    Rules combine by ``|``, ``&`` and ``~``. The newest checkpoint always stays, and so
    do pinned and tagged checkpoints.

    >>> policy = KeepLatest(3) | KeepEvery(steps=10_000) & ~KeepPinned()
    """

    __slots__ = ()

    def __or__(self, other: "RetentionPolicy") -> "RetentionPolicy":
        return KeepAny((*_members(KeepAny, self), *_members(KeepAny, other)))

    def __and__(self, other: "RetentionPolicy") -> "RetentionPolicy":
        return KeepAll((*_members(KeepAll, self), *_members(KeepAll, other)))

    def __invert__(self) -> "RetentionPolicy":
        return self.policy if isinstance(self, KeepNot) else KeepNot(self)


@dataclass(frozen=True, slots=True)
class KeepLatest(RetentionPolicy):
    """Keeps the ``count`` checkpoints with the highest steps."""

    count: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", _whole(self, self.count))


@dataclass(frozen=True, slots=True, init=False, repr=False)
class KeepEvery(RetentionPolicy):
    """Keeps the checkpoints whose step is a multiple of ``steps``, or the first one of
    each time span of ``duration``.

    >>> KeepEvery(steps=10_000) | KeepEvery(duration=timedelta(hours=6))
    """

    interval: int | timedelta
    """Steps, or the length of a time span; spans start at 1970-01-01, UTC."""

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
    """Keeps the checkpoints committed within ``duration``, a ``timedelta`` or seconds,
    before now."""

    duration: timedelta

    def __init__(self, duration: DurationLike) -> None:
        found = as_timedelta("KeepNewerThan(duration=)", duration)
        object.__setattr__(self, "duration", found)


@dataclass(frozen=True, slots=True)
class KeepBest(RetentionPolicy):
    """Keeps the ``count`` checkpoints with the best values of a metric.

    NaN is worse than every number; of equal values the higher step is better.

    >>> KeepBest(2, metric="loss", mode="min")
    """

    count: int
    _: KW_ONLY
    metric: str
    mode: Mode
    """"min" if lower values are better, "max" if higher ones are."""
    without_metric: WithoutMetric = "drop"
    """Treatment of checkpoints without the metric: keep or drop."""
    force: bool = False
    """True: the rule is accepted and applied although no checkpoint of the run has the
    metric. Otherwise that is an error, as it would delete all but the newest one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", _whole(self, self.count))
        if not is_text(self.metric):
            raise _invalid(self, "the name of a metric", self.metric)
        if self.mode not in get_args(Mode):
            raise _invalid(self, 'mode="min" or mode="max"', self.mode)
        if self.without_metric not in get_args(WithoutMetric):
            raise _invalid(self, 'without_metric="drop" or "keep"', self.without_metric)
        if type(self.force) is not bool:
            raise _invalid(self, "force=True or force=False", self.force)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class KeepSteps(RetentionPolicy):
    """Keeps the checkpoints at the given steps."""

    steps: tuple[int, ...]

    def __init__(self, *steps: SupportsIndex) -> None:
        object.__setattr__(self, "steps", tuple(_whole(self, step) for step in steps))

    def __repr__(self) -> str:
        return f"KeepSteps({', '.join(map(str, self.steps))})"


@dataclass(frozen=True, slots=True)
class KeepTagged(RetentionPolicy):
    """Keeps the checkpoints that have a tag."""


@dataclass(frozen=True, slots=True)
class KeepPinned(RetentionPolicy):
    """Keeps the checkpoints that are pinned."""


@dataclass(frozen=True, slots=True)
class KeepAny(RetentionPolicy):
    """``a | b``: keeps the checkpoints that at least one of the policies keeps."""

    policies: tuple[RetentionPolicy, ...]


@dataclass(frozen=True, slots=True)
class KeepAll(RetentionPolicy):
    """``a & b``: keeps the checkpoints that each of the policies keeps."""

    policies: tuple[RetentionPolicy, ...]


@dataclass(frozen=True, slots=True)
class KeepNot(RetentionPolicy):
    """``~a``: keeps the checkpoints that the policy does not keep."""

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
"""Union of all kinds of policies."""


def rule_of(policy: RetentionPolicy, *, place: str = "retention policy") -> Rule:
    """Returns a policy as a member of the union of all kinds.

    Args:
        policy: The policy.
        place: Call and option, for the message.

    Raises:
        InvalidRequestError: It is of another type.
    """
    if not isinstance(policy, Rule):
        raise InvalidRequestError(
            f"{place}: expected rules such as KeepLatest(3), got {policy!r}"
        )
    return policy


def _members(
    kind: type[KeepAny | KeepAll], policy: RetentionPolicy
) -> tuple[RetentionPolicy, ...]:
    """Returns the members of a policy of this kind, or the policy alone."""
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
