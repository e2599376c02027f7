"""Translates Orbax's options of retention to a retention policy of a run.

A policy of Orbax is code that a process calls after each save; a policy of a run is
a value that the server applies. What has no equal value is rejected by its name.

Decides only: reads no store.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, Final

from orbax.checkpoint import checkpoint_managers as managers

from storesvc_client._values.policies import (
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepNewerThan,
    KeepSteps,
    Mode,
    RetentionPolicy,
)
from storesvc_client.errors import InvalidRequestError

_ADVICE: Final = "set a policy of the run with run.retention.set, or use LatestN"


def retention_of_options(options: Any) -> RetentionPolicy | None:
    """Returns the retention policy of ``CheckpointManagerOptions``; None keeps all.

    Raises:
        InvalidRequestError: An option has no equal, or two exclude each other.
    """
    if options.preservation_policy is not None:
        for name in ("max_to_keep", "keep_period", "keep_time_interval"):
            if getattr(options, name):
                raise InvalidRequestError(
                    f"options: expected preservation_policy= or {name}=, got both"
                )
        return retention_of_policy(options.preservation_policy)
    if options.max_to_keep is None:
        return None  # as in Orbax: all stay, whatever else is given
    rules: list[RetentionPolicy] = [_newest(options)]
    if options.keep_period is not None:
        rules.append(KeepEvery(steps=options.keep_period))
    if options.keep_time_interval is not None:
        rules.append(KeepEvery(duration=options.keep_time_interval))
    return reduce(or_, rules)


def retention_of_policy(policy: Any) -> RetentionPolicy | None:
    """Returns the retention policy of one of Orbax's preservation policies.

    Returns:
        The policy; None if all checkpoints stay.

    Raises:
        InvalidRequestError: There is no equal policy; names it.
    """
    match policy:
        case managers.AnyPreservationPolicy(policies=members):
            return _any(members)
        case managers.LatestN(n=count):
            return None if count is None else KeepLatest(_positive("LatestN", count))
        case managers.EveryNSeconds(interval_secs=seconds):
            return KeepEvery(duration=seconds)
        case managers.EveryNSteps():
            return _every_steps(policy)
        case managers.CustomSteps():
            return KeepSteps(*sorted(_steps_of(policy)))
        case managers.BestN(n=count):
            if count is None:
                return None
            return _best(
                _positive("BestN", count),
                metric_of("BestN: get_metric_fn", policy.get_metric_fn),
                mode="min" if policy.reverse else "max",
                keeps_without=policy.keep_checkpoints_without_metrics,
            )
        case _:
            return _by_name(policy)


def metric_of(place: str, function: Callable[[Any], Any]) -> str:
    """Returns the name of the metric that a function of metrics returns.

    The function is called once with a mapping that records what it reads: whatever else
    it computes is visible, as its result is not the value that it was given.

    >>> metric_of("best_fn", lambda metrics: metrics["loss"])
    'loss'

    Args:
        place: Name of the option, for the message.
        function: The function.

    Raises:
        InvalidRequestError: It returns another value than one metric.
    """
    probe = _Probe()
    try:
        found = function(probe)
    except Exception as e:
        raise _no_metric(place, f"{type(e).__name__}: {e}") from e
    names = [name for name, value in probe.given.items() if value is found]
    if not names:
        raise _no_metric(place, "one that computes another value")
    return names[0]


class _Value:
    """Stands for the value of one metric."""


class _Probe(Mapping[str, Any]):
    """Stands for the metrics of a checkpoint; each name has a value of its own."""

    def __init__(self) -> None:
        self.given: dict[str, _Value] = {}

    def __getitem__(self, name: str) -> _Value:
        return self.given.setdefault(name, _Value())

    def __iter__(self) -> Any:
        raise TypeError("it reads all metrics")

    def __len__(self) -> int:
        raise TypeError("it counts the metrics")


def _no_metric(place: str, got: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{place}: expected a function that returns one metric, such as lambda "
        f"metrics: metrics['loss'], got {got}; compute the value before save(metrics=)"
    )


def _newest(options: Any) -> RetentionPolicy:
    count = _positive("max_to_keep", options.max_to_keep)
    if options.best_fn is None:
        return KeepLatest(count)
    mode: Mode = "min" if options.best_mode == "min" else "max"
    return _best(
        count,
        metric_of("best_fn", options.best_fn),
        mode=mode,
        keeps_without=options.keep_checkpoints_without_metrics,
    )


def _best(
    count: int, metric: str, *, mode: Mode, keeps_without: bool
) -> RetentionPolicy:
    without: Any = "keep" if keeps_without else "drop"
    return KeepBest(count, metric=metric, mode=mode, without_metric=without)


def _any(members: Sequence[Any]) -> RetentionPolicy | None:
    found = [retention_of_policy(member) for member in members]
    if not found:
        raise InvalidRequestError(
            f"AnyPreservationPolicy: expected policies, got none; {_ADVICE}"
        )
    rules = [rule for rule in found if rule is not None]
    return reduce(or_, rules) if len(rules) == len(found) else None


def _every_steps(policy: Any) -> RetentionPolicy:
    for name, plain in (("exact_interval", True), ("max_to_keep", None)):
        got = getattr(policy, name, plain)  # earlier releases lack some
        if got != plain:
            raise InvalidRequestError(
                f"EveryNSteps: expected {name}={plain}, got {got!r}, which no policy "
                f"of a run equals; {_ADVICE}"
            )
    return KeepEvery(steps=policy.interval_steps)


def _steps_of(policy: Any) -> Sequence[int]:
    """Returns the steps of ``CustomSteps``, which keeps them in a private field."""
    steps: Iterable[int] | None = getattr(policy, "_steps_set", None)
    return [*(policy.steps if steps is None else steps)]


def _by_name(policy: Any) -> RetentionPolicy | None:
    """Returns the policy of a class that only newer releases of Orbax have."""
    name = type(policy).__name__
    is_of_orbax = type(policy).__module__.startswith("orbax.")
    if is_of_orbax and name == "LatestDuration":
        return KeepNewerThan(policy.duration)
    if is_of_orbax and name == "PreserveAll":
        return None
    raise InvalidRequestError(
        f"preservation policy: expected LatestN, EveryNSteps, EveryNSeconds, BestN, "
        f"CustomSteps, LatestDuration, PreserveAll or any of these, got {name}, which "
        f"no policy of a run equals; {_ADVICE}"
    )


def _positive(place: str, count: int) -> int:
    if count < 1:
        raise InvalidRequestError(
            f"{place}: expected at least 1, as the newest checkpoint always stays, got "
            f"{count}"
        )
    return count
