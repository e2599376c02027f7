"""Evaluates retention policies: decides which checkpoints of a run are kept.

``retention.proto`` defines what each rule keeps. Why the guarantees there hold:

1. With any policy, the newest, the pinned and the tagged checkpoints are kept.
2. A checkpoint that a rule keeps among many, it also keeps among fewer: the rule either
   looks at one checkpoint at a time, or takes the first ones of an order that does not
   depend on the others. `any` and `all` preserve this, and `not` may only negate rules
   of the first kind. So a second pass over the remaining checkpoints deletes nothing.
3. `any` is a union, so one more member never keeps less.

>>> policy = pb.RetentionPolicy(latest=pb.KeepLatest(count=1))
>>> moment = datetime(2026, 1, 1, tzinfo=UTC)
>>> run = [Candidate(step=step, commit_time=moment) for step in (1, 2)]
>>> [(d.step, d.kept, d.reasons) for d in decide(policy, run, moment)]
[(2, True, ('newest', 'latest 1')), (1, False, ())]
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, assert_never

from google.protobuf.duration_pb2 import Duration

from storesvc.errors import FormatUnsupportedError
from storesvc_proto.v1 import retention_pb2 as pb

MAX_REASONS: Final = 8
"""Maximum reasons in one decision."""

MAX_REASON_CHARACTERS: Final = 120
"""Maximum length of one reason."""

_SHOWN_STEPS: Final = 5
"""Maximum steps that the text of a `steps` rule lists."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS: Final = {"day": 86_400, "hour": 3600, "minute": 60, "second": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The values of a committed checkpoint that a policy may use."""

    step: int
    commit_time: datetime
    metrics: Mapping[str, float] = field(default_factory=dict)
    pinned: bool = False
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision on one checkpoint."""

    step: int
    reasons: tuple[str, ...]
    """Reasons why it is kept, as text; empty: it is not kept."""

    @property
    def kept(self) -> bool:
        """True if the checkpoint is kept."""
        return bool(self.reasons)


def metrics_of(policy: pb.RetentionPolicy) -> frozenset[str]:
    """Returns the names of the metrics that a policy uses."""
    if policy.HasField("best"):
        return frozenset({policy.best.metric})
    return frozenset[str]().union(*map(metrics_of, members_of(policy)))


def decide(
    policy: pb.RetentionPolicy | None,
    checkpoints: Sequence[Candidate],
    now: datetime,
) -> list[Decision]:
    """Decides on the checkpoints of a run; returns decisions newest step first.

    Args:
        policy: A policy that ``validation.check`` accepts; None keeps all.
        checkpoints: All committed checkpoints of the run, in any order.
        now: The current time.

    Raises:
        FormatUnsupportedError: The policy has a rule that this release does not know.
    """
    kept: Mapping[int, tuple[str, ...]]
    if policy is None:
        kept = {c.step: ("no policy",) for c in checkpoints}
    else:
        kept = _kept(policy, checkpoints, now)
    newest = max((c.step for c in checkpoints), default=None)
    decisions = []
    for c in sorted(checkpoints, key=lambda c: -c.step):
        reasons = [*_protections(c, newest), *kept.get(c.step, ())]
        once = dict.fromkeys(map(cut, reasons))
        decisions.append(Decision(c.step, tuple(once)[:MAX_REASONS]))
    return decisions


def members_of(policy: pb.RetentionPolicy) -> Sequence[pb.RetentionPolicy]:
    """Returns the member policies of a policy."""
    match policy.WhichOneof("rule"):
        case "any":
            return policy.any.policies
        case "all":
            return policy.all.policies
        case "not":
            return (negated(policy),)
        case "latest" | "every_duration" | "best":
            return ()
        case "every_steps" | "newer_than" | "steps" | "tagged" | "pinned":
            return ()
        case None:
            return ()
        case rule:
            assert_never(rule)


def negated(policy: pb.RetentionPolicy) -> pb.RetentionPolicy:
    """Returns the policy that a `not` negates."""
    inner: pb.RetentionPolicy = getattr(policy, "not")  # a keyword of Python
    return inner


def nanos(length: Duration) -> int:
    """Returns a duration in nanoseconds."""
    return length.seconds * 10**9 + length.nanos


def describe(policy: pb.RetentionPolicy) -> str:
    """Returns a policy as text."""
    match policy.WhichOneof("rule"):
        case "latest":
            return f"latest {policy.latest.count}"
        case "every_steps":
            return f"every {_counted(policy.every_steps.steps, 'step')}"
        case "every_duration":
            return f"every {_length_text(policy.every_duration.duration)}"
        case "newer_than":
            return f"newer than {_length_text(policy.newer_than.duration)}"
        case "best":
            best = policy.best
            mode = "max" if _is_higher_better(best) else "min"
            without = " or without it" if best.keep_without_metric else ""
            return f"best {best.count} by {best.metric} ({mode}){without}"
        case "steps":
            return _steps_text(policy.steps.steps)
        case "any" | "all" as rule:
            word = " or " if rule == "any" else " and "
            return f"({word.join(map(describe, members_of(policy))) or 'none'})"
        case "not":
            return f"not {describe(negated(policy))}"
        case "tagged":
            return "tagged"
        case "pinned":
            return "pinned"
        case None:
            raise _unknown("a rule")
        case rule:
            assert_never(rule)


def cut(text: str) -> str:
    """Truncates a text to `MAX_REASON_CHARACTERS`."""
    return text if len(text) <= MAX_REASON_CHARACTERS else f"{text[:119]}…"


def _protections(candidate: Candidate, newest: int | None) -> Iterator[str]:
    """Yields the reasons that keep a checkpoint under any policy."""
    if candidate.step == newest:
        yield "newest"
    if candidate.pinned:
        yield "pinned"
    if candidate.tags:
        yield f"tagged {', '.join(sorted(candidate.tags))}"


def _kept(
    policy: pb.RetentionPolicy, run: Sequence[Candidate], now: datetime
) -> dict[int, tuple[str, ...]]:
    """Returns the steps that a policy keeps, with the reasons of each."""
    members = [_kept(member, run, now) for member in members_of(policy)]
    steps = {c.step for c in run}
    match policy.WhichOneof("rule"):
        case "any":
            return _union(members)
        case "all":
            steps.intersection_update(*members)
        case "not":
            steps.difference_update(*members)
        case "latest":
            steps = set(heapq.nlargest(policy.latest.count, steps))
        case "every_duration":
            steps = _firsts(policy.every_duration, run)
        case "best":
            steps = _best(policy.best, run)
        case "every_steps":
            every = policy.every_steps.steps
            steps = {step for step in steps if step % every == 0}
        case "newer_than":
            length = nanos(policy.newer_than.duration)
            steps = {
                c.step for c in run if _nanos_between(c.commit_time, now) <= length
            }
        case "steps":
            steps.intersection_update(policy.steps.steps)
        case "tagged":
            steps = {c.step for c in run if c.tags}
        case "pinned":
            steps = {c.step for c in run if c.pinned}
        case None:
            raise _unknown("a rule")
        case rule:
            assert_never(rule)
    return dict.fromkeys(steps, (describe(policy),))


def _union(members: Iterable[dict[int, tuple[str, ...]]]) -> dict[int, tuple[str, ...]]:
    kept: dict[int, tuple[str, ...]] = {}
    for member in members:
        for step, reasons in member.items():
            kept[step] = (kept.get(step, ()) + reasons)[:MAX_REASONS]
    return kept


def _firsts(every: pb.KeepEveryDuration, run: Sequence[Candidate]) -> set[int]:
    """Returns the first committed step of each time span."""
    length = nanos(every.duration)
    firsts: dict[int, int] = {}
    for c in sorted(run, key=lambda c: (c.commit_time, c.step)):
        span = _nanos_between(_EPOCH, c.commit_time) // length
        firsts.setdefault(span, c.step)
    return set(firsts.values())


def _best(best: pb.KeepBest, run: Sequence[Candidate]) -> set[int]:
    """Returns the steps with the best values of a metric."""
    ranked = [c for c in run if best.metric in c.metrics]
    ranked = heapq.nlargest(best.count, ranked, key=lambda c: _goodness(best, c))
    without = [c for c in run if best.metric not in c.metrics]
    return {c.step for c in (ranked + without if best.keep_without_metric else ranked)}


def _goodness(best: pb.KeepBest, candidate: Candidate) -> tuple[bool, float, int]:
    """Returns the sort key of a metric: NaN below every number, ties to the higher
    step."""
    value = candidate.metrics[best.metric]
    if math.isnan(value):
        return False, 0.0, candidate.step
    return True, value if _is_higher_better(best) else -value, candidate.step


def _is_higher_better(best: pb.KeepBest) -> bool:
    """Returns whether higher values of the metric are better."""
    if best.mode not in (pb.KeepBest.MODE_MIN, pb.KeepBest.MODE_MAX):
        raise _unknown("a mode of best")
    return best.mode == pb.KeepBest.MODE_MAX


def _unknown(what: str) -> FormatUnsupportedError:
    return FormatUnsupportedError(
        f"retention policy: expected {what} that this release knows, got another; use "
        "a newer release"
    )


def _nanos_between(start: datetime, end: datetime) -> int:
    # Integers: a float of seconds would lose nanoseconds.
    return (end - start) // timedelta(microseconds=1) * 1000


def _length_text(length: Duration) -> str:
    if length.nanos == 0:
        for unit, seconds in _UNITS.items():
            if length.seconds % seconds == 0:
                return _counted(length.seconds // seconds, unit)
    return f"{nanos(length) / 10**9:g} seconds"


def _steps_text(steps: Sequence[int]) -> str:
    if not steps:
        return "no step"
    text = ", ".join(map(str, steps[:_SHOWN_STEPS]))
    more = len(steps) - _SHOWN_STEPS
    text += f" and {more} more" if more > 0 else ""
    return f"{'step' if len(steps) == 1 else 'steps'} {text}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun if count == 1 else f'{noun}s'}"
