"""Converts retention policies to protobuf messages and back."""

import operator
from collections.abc import Sequence
from datetime import timedelta
from functools import reduce
from typing import Final, assert_never

from storesvc_client._values.durations import duration_message
from storesvc_client._values.policies import (
    KeepAll,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepNewerThan,
    KeepNot,
    KeepPinned,
    KeepSteps,
    KeepTagged,
    Mode,
    RetentionPolicy,
    rule_of,
)
from storesvc_client.errors import InvalidRequestError
from storesvc_proto.v1 import retention_pb2 as pb

_MODES: Final[dict[Mode, "pb.KeepBest.Mode.ValueType"]] = {
    "min": pb.KeepBest.MODE_MIN,
    "max": pb.KeepBest.MODE_MAX,
}
_MODE_NAMES: Final = {number: mode for mode, number in _MODES.items()}


def policy_message(policy: RetentionPolicy) -> pb.RetentionPolicy:
    """Returns the message of a policy.

    Raises:
        InvalidRequestError: It is of an unknown kind.
    """
    match rule_of(policy):
        case KeepLatest(count):
            return pb.RetentionPolicy(latest=pb.KeepLatest(count=count))
        case KeepEvery(interval):
            return _every_message(interval)
        case KeepNewerThan(length):
            newer = pb.KeepNewerThan(duration=duration_message(length, "duration="))
            return pb.RetentionPolicy(newer_than=newer)
        case KeepBest() as best:
            return pb.RetentionPolicy(best=_best_message(best))
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
            message = pb.RetentionPolicy()
            getattr(message, "not").CopyFrom(policy_message(negated))  # a keyword
            return message
        case rule:
            assert_never(rule)


def policy_of(message: pb.RetentionPolicy) -> RetentionPolicy:
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
            return reduce(operator.or_, map(policy_of, message.any.policies))
        case "all" if message.all.policies:
            return reduce(operator.and_, map(policy_of, message.all.policies))
        case "not":
            return ~policy_of(getattr(message, "not"))
        case "best" | "any" | "all" | None:
            pass  # a mode of a newer release, or an empty combination
        case rule:
            assert_never(rule)
    raise InvalidRequestError(
        "retention policy: expected rules that this release knows, got another; use a "
        "newer release"
    )


def _every_message(interval: int | timedelta) -> pb.RetentionPolicy:
    if isinstance(interval, int):
        return pb.RetentionPolicy(every_steps=pb.KeepEverySteps(steps=interval))
    every = pb.KeepEveryDuration(duration=duration_message(interval, "duration="))
    return pb.RetentionPolicy(every_duration=every)


def _best_message(best: KeepBest) -> pb.KeepBest:
    return pb.KeepBest(
        count=best.count,
        metric=best.metric,
        mode=_MODES[best.mode],
        keep_without_metric=best.without_metric == "keep",
        force=best.force,
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
