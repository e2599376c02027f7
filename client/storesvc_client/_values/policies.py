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
set on a run. The text is::

    policy   = all { "|" all }
    all      = part { "&" part }
    part     = "~" part | "(" policy ")" | rule
    rule     = "latest(" COUNT ")" | "every(" COUNT "steps" | DURATION ")"
             | "newer-than(" DURATION ")" | "steps(" STEP { "," STEP } ")"
             | "best(" COUNT "," METRIC "," "min" | "max" [ "," "or-without" ]
               [ "," "force" ] ")"
             | "tagged" | "pinned"
    DURATION = a text for ``parse_duration``: "7 days", "90m"
    METRIC   = a word, or a JSON string

``parse_policy(format_policy(policy)) == policy`` for every policy.

Python's own parser cannot read it: "every(3d)", "newer-than(12 hours)" and a metric
named "eval/loss" or "lambda" are no Python. Texts come from users, so the time to read
one grows with its length, not with the square of it.
"""

import json
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from functools import reduce
from itertools import chain
from typing import (
    Final,
    Literal,
    SupportsIndex,
    TypeAlias,
    assert_never,
    get_args,
    overload,
)

from storesvc.format.names import MAX_STEP
from storesvc_client._values.arguments import (
    DurationLike,
    as_timedelta,
    duration_message,
    is_text,
    parse_duration,
)
from storesvc_client._values.expressions import MAX_NESTING, ExpressionReader
from storesvc_client._views.texts import duration_text
from storesvc_client.errors import InvalidRequestError
from storesvc_proto.v1 import retention_pb2 as pb

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


def check_rule(policy: RetentionPolicy, *, place: str = "retention policy") -> Rule:
    """Returns a policy as a member of the union of all kinds."""
    if not isinstance(policy, Rule):
        raise InvalidRequestError(
            f"{place}: expected rules such as KeepLatest(3), got {policy!r}"
        )
    return policy


def _members(
    kind: type[KeepAny | KeepAll], policy: RetentionPolicy
) -> tuple[RetentionPolicy, ...]:
    """Returns the members of a policy of this kind, or the policy alone."""
    rule = check_rule(policy)
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


_MODES: Final[dict[Mode, "pb.KeepBest.Mode.ValueType"]] = {
    "min": pb.KeepBest.MODE_MIN,
    "max": pb.KeepBest.MODE_MAX,
}
_MODE_NAMES: Final = {number: mode for mode, number in _MODES.items()}


def policy_message(policy: RetentionPolicy) -> pb.RetentionPolicy:
    match check_rule(policy):
        case KeepLatest(count):
            return pb.RetentionPolicy(latest=pb.KeepLatest(count=count))
        case KeepEvery(interval):
            if isinstance(interval, int):
                return pb.RetentionPolicy(every_steps=pb.KeepEverySteps(steps=interval))
            every = pb.KeepEveryDuration(
                duration=duration_message(interval, "duration=")
            )
            return pb.RetentionPolicy(every_duration=every)
        case KeepNewerThan(length):
            newer = pb.KeepNewerThan(duration=duration_message(length, "duration="))
            return pb.RetentionPolicy(newer_than=newer)
        case KeepBest() as best:
            message = pb.KeepBest(
                count=best.count,
                metric=best.metric,
                mode=_MODES[best.mode],
                keep_without_metric=best.without_metric == "keep",
                force=best.force,
            )
            return pb.RetentionPolicy(best=message)
        case KeepSteps(steps):
            return pb.RetentionPolicy(steps=pb.KeepSteps(steps=steps))
        case KeepTagged():
            return pb.RetentionPolicy(tagged=pb.KeepTagged())
        case KeepPinned():
            return pb.RetentionPolicy(pinned=pb.KeepPinned())
        case KeepAny(policies):
            return pb.RetentionPolicy(any=_messages(policies))
        case KeepAll(policies):
            return pb.RetentionPolicy(all=_messages(policies))
        case KeepNot(negated):
            inverse = pb.RetentionPolicy()
            getattr(inverse, "not").CopyFrom(policy_message(negated))  # a keyword
            return inverse
        case rule:
            assert_never(rule)


def parse_message(message: pb.RetentionPolicy) -> RetentionPolicy:
    """Returns the policy of a message, without redundant nesting.

    Raises:
        InvalidRequestError: It has a rule that this release lacks.
    """
    match message.WhichOneof("rule"):
        case "latest":
            return KeepLatest(message.latest.count)
        case "every_steps":
            return KeepEvery(steps=message.every_steps.steps)
        case "every_duration":
            return KeepEvery(duration=message.every_duration.duration.ToTimedelta())
        case "newer_than":
            return KeepNewerThan(message.newer_than.duration.ToTimedelta())
        case "best" if message.best.mode in _MODE_NAMES:
            return _best(message.best)
        case "steps":
            return KeepSteps(*message.steps.steps)
        case "tagged":
            return KeepTagged()
        case "pinned":
            return KeepPinned()
        case "any" if message.any.policies:
            return reduce(operator.or_, map(parse_message, message.any.policies))
        case "all" if message.all.policies:
            return reduce(operator.and_, map(parse_message, message.all.policies))
        case "not":
            return ~parse_message(getattr(message, "not"))
        case "best" | "any" | "all" | None:
            pass  # a mode of a newer release, or an empty combination
        case rule:
            assert_never(rule)
    raise InvalidRequestError(
        "retention policy: expected rules that this release knows, got another; use a "
        "newer release"
    )


def _best(message: pb.KeepBest) -> KeepBest:
    return KeepBest(
        message.count,
        metric=message.metric,
        mode=_MODE_NAMES[message.mode],
        without_metric="keep" if message.keep_without_metric else "drop",
        force=message.force,
    )


def _messages(policies: Sequence[RetentionPolicy]) -> pb.RetentionPolicies:
    return pb.RetentionPolicies(policies=map(policy_message, policies))


_SHOWN: Final = 60
"""Maximum characters of a text that a message repeats."""

_WORD: Final = re.compile(r'[^\s()|&~,"]+')
_TOKEN: Final = re.compile(rf'"(?:[^"\\]|\\.)*"?|[()|&~,]|{_WORD.pattern}')
"""A string that does not end is a token too: the rest is not searched again for each
quotation mark in it."""

_NUMBER: Final = re.compile(r"-?[0-9]{1,19}|-?[0-9]{1,3}(?:_[0-9]{3}){1,6}")
_RULES: Final = (
    "latest(N), every(N steps), every(TIME), newer-than(TIME), "
    "best(N, METRIC, min|max), steps(N, ...), tagged or pinned"
)


def format_policy(policy: RetentionPolicy) -> str:
    """Returns the text of a policy, which ``parse_policy`` reads.

    >>> format_policy(KeepLatest(3) | KeepEvery(steps=10_000))
    'latest(3) | every(10000 steps)'

    Raises:
        InvalidRequestError: It is no retention policy.
    """
    match check_rule(policy):
        case KeepLatest(count):
            return f"latest({count})"
        case KeepEvery(interval=timedelta() as length):
            return f"every({duration_text(length)})"
        case KeepEvery(interval=steps):
            return f"every({steps} {'step' if steps == 1 else 'steps'})"
        case KeepNewerThan(length):
            return f"newer-than({duration_text(length)})"
        case KeepBest(count, metric=metric, mode=mode) as best:
            end = ", or-without" if best.without_metric == "keep" else ""
            end += ", force" if best.force else ""
            return f"best({count}, {_metric_text(metric)}, {mode}{end})"
        case KeepSteps(steps):
            return f"steps({', '.join(map(str, steps))})"
        case KeepAny(policies):
            return " | ".join(map(format_policy, policies))
        case KeepAll(policies):
            return " & ".join(_inside(policy, KeepAny) for policy in policies)
        case KeepNot(negated):
            return f"~{_inside(negated, KeepAny, KeepAll)}"
        case KeepTagged():
            return "tagged"
        case KeepPinned():
            return "pinned"
        case rule:
            assert_never(rule)


def parse_policy(text: str) -> RetentionPolicy:
    """Returns the policy of a text, such as "latest(3) | every(1 day)".

    Raises:
        InvalidRequestError: It is none; names the place in the text.
    """
    if not isinstance(text, str):
        raise InvalidRequestError(
            f"retention policy: expected a text such as 'latest(3)', got {text!r}"
        )
    return _Reader(text, _TOKEN).read()


class _Reader(ExpressionReader[RetentionPolicy]):
    """Reads a policy; each method takes what it is called."""

    after_part = ")"
    after_expression = "|, & or the end"
    nesting = f"at most {MAX_NESTING} within each other"

    def negate(self, part: RetentionPolicy) -> RetentionPolicy:
        return ~part

    def join(self, sign: str, parts: Sequence[RetentionPolicy]) -> RetentionPolicy:
        kind = KeepAny if sign == "|" else KeepAll
        # Combined once: each | copies its operands.
        return kind(tuple(chain.from_iterable(_members(kind, part) for part in parts)))

    def operand(self) -> RetentionPolicy:
        if self.took("tagged"):
            return KeepTagged()
        if self.took("pinned"):
            return KeepPinned()
        rules: dict[str, Callable[[], RetentionPolicy]] = {
            "latest": lambda: KeepLatest(self._number()),
            "every": self._every,
            "newer-than": lambda: KeepNewerThan(self._duration()),
            "best": self._best,
            "steps": self._steps,
        }
        if self.next.text not in rules:
            raise self.unexpected_error(f"one of {_RULES}")
        rule = rules[self.next.text]
        self.at += 1
        self.take("(")
        policy = rule()
        self.take(")")
        return policy

    def _every(self) -> KeepEvery:
        if self.tokens[self.at + 1].text in ("step", "steps"):
            steps = self._number()
            self.at += 1
            return KeepEvery(steps=steps)
        return KeepEvery(duration=self._duration())

    def _best(self) -> KeepBest:
        count = self._number()
        self.take(",")
        metric = self._metric()
        self.take(",")
        mode: Mode = "min"
        if not self.took("min"):
            self.take("max", expected="min or max")
            mode = "max"
        without: WithoutMetric = "drop"
        force = False
        while not force and self.took(","):
            if without == "drop" and self.took("or-without"):
                without = "keep"
            else:
                self.take("force", expected="or-without or force")
                force = True
        return KeepBest(
            count, metric=metric, mode=mode, without_metric=without, force=force
        )

    def _steps(self) -> KeepSteps:
        steps = [] if self.next.text == ")" else [self._number()]
        while self.took(","):
            steps.append(self._number())
        return KeepSteps(*steps)

    def _number(self) -> int:
        if not _NUMBER.fullmatch(self.next.text) or abs(int(self.next.text)) > MAX_STEP:
            raise self.unexpected_error("a whole number")
        self.at += 1
        return int(self.tokens[self.at - 1].text)

    def _duration(self) -> timedelta:
        start, words = self.at, []
        while _WORD.fullmatch(self.next.text):
            words.append(self.next.text)
            self.at += 1
        try:
            return parse_duration(" ".join(words))
        except InvalidRequestError as e:
            self.at = start
            raise self.unexpected_error(
                "a time, such as 3d, 12 hours, 90 minutes"
            ) from e

    def _metric(self) -> str:
        token = self.next.text
        if not token.startswith('"') and not _WORD.fullmatch(token):
            raise self.unexpected_error("the name of a metric")
        try:
            metric = json.loads(token) if token.startswith('"') else token
        except ValueError as e:
            raise self.unexpected_error("a metric as a JSON string") from e
        self.at += 1
        return str(metric)

    def unexpected_error(self, expected: str) -> InvalidRequestError:
        _, token, place = self.next
        text = self.text
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
        return InvalidRequestError(
            f"retention policy {shown!r}: expected {expected} at character "
            f"{place + 1}, got {repr(token[:_SHOWN]) if token else 'the end'}"
        )


def _inside(policy: RetentionPolicy, *weaker: type[RetentionPolicy]) -> str:
    """The text of a part, in parentheses where it binds less than what is around."""
    text = format_policy(policy)
    return f"({text})" if isinstance(policy, weaker) else text


def _metric_text(metric: str) -> str:
    if _WORD.fullmatch(metric) and metric.isprintable():
        return metric
    return json.dumps(metric)
