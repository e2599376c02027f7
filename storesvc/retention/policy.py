"""Validates and evaluates retention policies: decides which checkpoints are kept.

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

Before a policy is stored or applied, it is rejected if it breaks a bound of
``retention.proto``, or could keep no checkpoint: it would delete all but the protected
ones, which is never intended.
"""

import difflib
import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, assert_never

from google.protobuf.duration_pb2 import Duration

from storesvc.errors import (
    FormatUnsupportedError,
    InvalidPolicyError,
    PolicyKeepsNothingError,
)
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


def list_metrics(policy: pb.RetentionPolicy) -> frozenset[str]:
    if policy.HasField("best"):
        return frozenset({policy.best.metric})
    return frozenset[str]().union(*map(list_metrics, list_members(policy)))


def decide(
    policy: pb.RetentionPolicy | None, checkpoints: Sequence[Candidate], now: datetime
) -> list[Decision]:
    """Decides on the checkpoints of a run; returns decisions newest step first.

    Args:
        policy: A policy that ``validation.check`` accepts; None keeps all.
        checkpoints: All committed checkpoints of the run, in any order.

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


def list_members(policy: pb.RetentionPolicy) -> Sequence[pb.RetentionPolicy]:
    match policy.WhichOneof("rule"):
        case "any":
            return policy.any.policies
        case "all":
            return policy.all.policies
        case "not":
            return (negated_policy(policy),)
        case "latest" | "every_duration" | "best":
            return ()
        case "every_steps" | "newer_than" | "steps" | "tagged" | "pinned":
            return ()
        case None:
            return ()
        case rule:
            assert_never(rule)


def negated_policy(policy: pb.RetentionPolicy) -> pb.RetentionPolicy:
    """Returns the policy that a `not` negates."""
    inner: pb.RetentionPolicy = getattr(policy, "not")  # a keyword of Python
    return inner


def nanos(length: Duration) -> int:
    return length.seconds * 10**9 + length.nanos


def describe(policy: pb.RetentionPolicy) -> str:
    match policy.WhichOneof("rule"):
        case "latest":
            return f"latest {policy.latest.count}"
        case "every_steps":
            return f"every {_count_text(policy.every_steps.steps, 'step')}"
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
            return f"({word.join(map(describe, list_members(policy))) or 'none'})"
        case "not":
            return f"not {describe(negated_policy(policy))}"
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
    members = [_kept(member, run, now) for member in list_members(policy)]
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
                return _count_text(length.seconds // seconds, unit)
    return f"{nanos(length) / 10**9:g} seconds"


def _steps_text(steps: Sequence[int]) -> str:
    if not steps:
        return "no step"
    text = ", ".join(map(str, steps[:_SHOWN_STEPS]))
    more = len(steps) - _SHOWN_STEPS
    text += f" and {more} more" if more > 0 else ""
    return f"{'step' if len(steps) == 1 else 'steps'} {text}"


def _count_text(count: int, noun: str) -> str:
    return f"{count} {noun if count == 1 else f'{noun}s'}"


MAX_POLICIES: Final = 64
"""Maximum members of one `any` or `all`."""

MAX_DEPTH: Final = 8
MAX_STEPS: Final = 10_000
MAX_METRIC_BYTES: Final = 256
MAX_DURATION_SECONDS: Final = 315_576_000_000
"""Maximum duration of protobuf: ten thousand years."""

MAX_RULES: Final = 256
"""Maximum rules of a policy: each one visits every checkpoint of a run."""

MAX_BYTES: Final = 128 << 10
"""Maximum size of a policy: it is read and sent with its run."""

_CHOICES: Final = frozenset({"latest", "every_duration", "best"})
"""Rules that choose among several checkpoints."""

_NONE: Final = frozenset[int]()

_NEAREST: Final = 5
"""Metrics that an error names."""

_SHORTEN: Final = "use a shorter policy"


def check(policy: pb.RetentionPolicy) -> None:
    """Rejects a policy that is invalid or could keep no checkpoint.

    A policy keeps nothing if its structure shows it: a count of 0; no steps; `any`
    without members, or with only such members; `all` with such a member, with a policy
    and its negation, or without a step that all members could keep; `not` of a policy
    that keeps everything. Such a part next to others makes the policy merely invalid.

    Raises:
        InvalidPolicyError: It breaks a bound; names the place in the policy.
        PolicyKeepsNothingError: It could keep no checkpoint of any run.
    """
    size = policy.ByteSize()
    if size > MAX_BYTES:
        raise _invalid("", f"at most {MAX_BYTES} bytes", str(size), _SHORTEN)
    parts = list(_parts(policy, ()))
    if len(parts) > MAX_RULES:
        wanted = f"at most {MAX_RULES} rules in all"
        raise _invalid("", wanted, str(len(parts)), _SHORTEN)
    for place, part in parts:
        _check_rule(place, part)
    if _keeps_none(policy):
        raise PolicyKeepsNothingError(
            f"retention policy: expected one that could keep a checkpoint, got "
            f"{cut(describe(policy))}; clear the policy to keep all of them"
        )
    for place, part in parts:
        if _keeps_none(part) and not any(map(_keeps_none, list_members(part))):
            wanted = "what could keep a checkpoint"
            raise _invalid(place, wanted, describe(part), "leave it out")


def check_metrics(
    policy: pb.RetentionPolicy, run: str, present: Collection[str]
) -> None:
    """Rejects a policy with a metric that no checkpoint of a run has, unless the rule
    says `force`, or keeps the checkpoints without it.

    Raises:
        InvalidPolicyError: It has such a metric; names those that are there.
    """
    for place, part in _parts(policy, ()):
        best, at = part.best, ".".join(filter(None, (place, "best.metric")))
        is_free = best.force or best.keep_without_metric or best.metric in present
        if part.HasField("best") and not is_free:
            near = difflib.get_close_matches(best.metric, present, _NEAREST, cutoff=0)
            more = len(present) - len(near)
            there = ", ".join(near) + (f" and {more} more" if more else "")
            raise _invalid(
                at,
                f"a metric of the checkpoints of {run} (there are {there or 'none'})",
                repr(best.metric),
                "name one of them, or add force to the rule: "
                f"best({best.count}, {best.metric}, ..., force)",
            )


def _parts(
    policy: pb.RetentionPolicy, path: tuple[str, ...]
) -> Iterator[tuple[str, pb.RetentionPolicy]]:
    """Yields a policy and all nested policies, with their places in it."""
    place = ".".join(path)
    if len(path) == MAX_DEPTH:
        wanted = f"policies nested at most {MAX_DEPTH} deep"
        raise _invalid(place, wanted, "more", _SHORTEN)
    yield place, policy
    rule = policy.WhichOneof("rule")
    for at, member in enumerate(list_members(policy)):
        part = "not" if rule == "not" else f"{rule}[{at}]"
        yield from _parts(member, (*path, part))


def _check_rule(place: str, policy: pb.RetentionPolicy) -> None:
    """Rejects a rule that breaks a bound; `_keeps_none` is checked later."""
    at = ".".join(filter(None, (place, policy.WhichOneof("rule"))))
    match policy.WhichOneof("rule"):
        case None:
            wanted = "exactly one rule that this server knows"
            raise _invalid(place, wanted, "none", "name one, or use a newer server")
        case "latest":
            _check_count(f"{at}.count", policy.latest.count)
        case "every_steps":
            _check_least(f"{at}.steps", policy.every_steps.steps, least=1)
        case "every_duration":
            _check_duration(f"{at}.duration", policy.every_duration.duration)
        case "newer_than":
            _check_duration(f"{at}.duration", policy.newer_than.duration)
        case "best":
            _check_best(at, policy.best)
        case "steps":
            _check_steps(f"{at}.steps", policy.steps.steps)
        case "any" | "all":
            _check_members(at, policy)
        case "not":
            for member, part in _parts(negated_policy(policy), (at,)):
                if part.WhichOneof("rule") in _CHOICES:
                    wanted = "rules that look at one checkpoint at a time"
                    advice = "leave it out of what is negated"
                    raise _invalid(member, wanted, describe(part), advice)
        case "tagged" | "pinned":
            pass
        case rule:
            assert_never(rule)


def _check_best(at: str, best: pb.KeepBest) -> None:
    if best.keep_without_metric:  # then 0 keeps something
        _check_least(f"{at}.count", best.count, least=1)
    _check_count(f"{at}.count", best.count)
    size = len(best.metric.encode())
    if not 1 <= size <= MAX_METRIC_BYTES:
        wanted = f"1 to {MAX_METRIC_BYTES} bytes"
        raise _invalid(f"{at}.metric", wanted, str(size), "name another metric")
    if best.mode not in (pb.KeepBest.MODE_MIN, pb.KeepBest.MODE_MAX):
        wanted = "MODE_MIN or MODE_MAX"
        raise _invalid(f"{at}.mode", wanted, str(best.mode), "say which is better")


def _check_steps(at: str, steps: Sequence[int]) -> None:
    if len(steps) > MAX_STEPS:
        wanted = f"at most {MAX_STEPS} steps"
        raise _invalid(at, wanted, str(len(steps)), "tag or pin checkpoints instead")
    for number, step in enumerate(steps):
        _check_least(f"{at}[{number}]", step, least=0)


def _check_members(at: str, policy: pb.RetentionPolicy) -> None:
    count = len(list_members(policy))
    # An empty `any` keeps nothing and is reported so; an empty `all` would keep all.
    least = 1 if policy.HasField("all") else 0
    if not least <= count <= MAX_POLICIES:
        wanted = f"1 to {MAX_POLICIES} policies"
        raise _invalid(at, wanted, str(count), _SHORTEN if count else "give one")


def _check_count(place: str, count: int) -> None:
    # 0 breaks no bound; the policy as a whole is reported as keeping nothing.
    if count < 0:
        _check_least(place, count, least=1)


def _check_least(place: str, number: int, *, least: int) -> None:
    if number < least:
        wanted = f"at least {least}"
        raise _invalid(place, wanted, str(number), "give a higher number")


def _check_duration(place: str, length: Duration) -> None:
    in_range = 0 <= length.seconds <= MAX_DURATION_SECONDS and 0 <= length.nanos < 10**9
    if not in_range or nanos(length) == 0:
        raise _invalid(
            place,
            f"more than 0 and at most {MAX_DURATION_SECONDS} s",
            f"{length.seconds} s and {length.nanos} ns",
            "give another length of time",
        )


def _keeps_none(policy: pb.RetentionPolicy) -> bool:
    """Returns whether the structure of a policy shows that it keeps no checkpoint."""
    return _only_steps(policy) == _NONE


def _only_steps(policy: pb.RetentionPolicy) -> frozenset[int] | None:
    """Returns the only steps that a policy could keep; None: it could keep any step."""
    match policy.WhichOneof("rule"):
        case "latest":
            return None if policy.latest.count else _NONE
        case "best":
            return None if policy.best.count else _NONE
        case "steps":
            return frozenset(policy.steps.steps)
        case "any":
            each = [_only_steps(member) for member in list_members(policy)]
            known = [steps for steps in each if steps is not None]
            return _NONE.union(*known) if len(known) == len(each) else None
        case "all":
            return _common_steps(list_members(policy))
        case "not":
            return _NONE if _keeps_all(negated_policy(policy)) else None
        case "every_steps" | "every_duration" | "newer_than" | "tagged" | "pinned":
            return None
        case None:
            return None
        case rule:
            assert_never(rule)


def _common_steps(policies: Sequence[pb.RetentionPolicy]) -> frozenset[int] | None:
    if _contradict(policies):
        return _NONE
    each = [_only_steps(policy) for policy in policies]
    known = [steps for steps in each if steps is not None]
    if not known:
        return None
    every = [p.every_steps.steps for p in policies if p.HasField("every_steps")]
    common = known[0].intersection(*known)
    return frozenset(s for s in common if all(s % steps == 0 for steps in every))


def _keeps_all(policy: pb.RetentionPolicy) -> bool:
    """Returns whether the structure of a policy shows that it keeps all checkpoints."""
    members = list_members(policy)
    match policy.WhichOneof("rule"):
        case "every_steps":
            return policy.every_steps.steps == 1
        case "any":
            return any(map(_keeps_all, members)) or _contradict(members)
        case "all":
            return all(map(_keeps_all, members))
        case "not":
            return _keeps_none(negated_policy(policy))
        case "latest" | "every_duration" | "newer_than" | "best" | "steps":
            return False
        case "tagged" | "pinned" | None:
            return False
        case rule:
            assert_never(rule)


def _contradict(policies: Sequence[pb.RetentionPolicy]) -> bool:
    """Returns whether one of the policies is the negation of another."""
    return any(p.HasField("not") and negated_policy(p) in policies for p in policies)


def _invalid(place: str, expected: str, got: str, advice: str) -> InvalidPolicyError:
    at = f", {place}" if place else ""
    return InvalidPolicyError(
        f"retention policy{at}: expected {expected}, got {cut(got)}; {advice}",
        place=place,
    )
