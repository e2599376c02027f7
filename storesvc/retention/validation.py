"""Validates retention policies before they are stored or applied.

Rejects a policy that breaks a bound of ``retention.proto``, and one that could keep no
checkpoint: it would delete all but the protected ones, which is never intended.
"""

import difflib
from collections.abc import Collection, Iterator, Sequence
from typing import Final, assert_never

from google.protobuf.duration_pb2 import Duration

from storesvc.errors import InvalidPolicyError, PolicyKeepsNothingError
from storesvc.retention.policy import cut, describe, members_of, nanos, negated
from storesvc_proto.v1 import retention_pb2 as pb

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
        if _keeps_none(part) and not any(map(_keeps_none, members_of(part))):
            wanted = "what could keep a checkpoint"
            raise _invalid(place, wanted, describe(part), "leave it out")


def check_metrics(
    policy: pb.RetentionPolicy, run: str, present: Collection[str]
) -> None:
    """Rejects a policy with a metric that no checkpoint of a run has, unless the rule
    says `force`, or keeps the checkpoints without it.

    Args:
        policy: The policy.
        run: Name of the run.
        present: Names of the metrics that its checkpoints have.

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
    for at, member in enumerate(members_of(policy)):
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
            _check_negated(at, negated(policy))
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
    count = len(members_of(policy))
    # An empty `any` keeps nothing and is reported so; an empty `all` would keep all.
    least = 1 if policy.HasField("all") else 0
    if not least <= count <= MAX_POLICIES:
        wanted = f"1 to {MAX_POLICIES} policies"
        raise _invalid(at, wanted, str(count), _SHORTEN if count else "give one")


def _check_negated(at: str, policy: pb.RetentionPolicy) -> None:
    for place, part in _parts(policy, (at,)):
        if part.WhichOneof("rule") in _CHOICES:
            expected = "rules that look at one checkpoint at a time"
            advice = "leave it out of what is negated"
            raise _invalid(place, expected, describe(part), advice)


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
            each = [_only_steps(member) for member in members_of(policy)]
            known = [steps for steps in each if steps is not None]
            return _NONE.union(*known) if len(known) == len(each) else None
        case "all":
            return _common_steps(members_of(policy))
        case "not":
            return _NONE if _keeps_all(negated(policy)) else None
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
    """Returns whether the structure of a policy shows that it keeps every
    checkpoint."""
    members = members_of(policy)
    match policy.WhichOneof("rule"):
        case "every_steps":
            return policy.every_steps.steps == 1
        case "any":
            return any(map(_keeps_all, members)) or _contradict(members)
        case "all":
            return all(map(_keeps_all, members))
        case "not":
            return _keeps_none(negated(policy))
        case "latest" | "every_duration" | "newer_than" | "best" | "steps":
            return False
        case "tagged" | "pinned" | None:
            return False
        case rule:
            assert_never(rule)


def _contradict(policies: Sequence[pb.RetentionPolicy]) -> bool:
    """Returns whether one of the policies is the negation of another."""
    return any(p.HasField("not") and negated(p) in policies for p in policies)


def _invalid(place: str, expected: str, got: str, advice: str) -> InvalidPolicyError:
    at = f", {place}" if place else ""
    return InvalidPolicyError(
        f"retention policy{at}: expected {expected}, got {cut(got)}; {advice}",
        place=place,
    )
