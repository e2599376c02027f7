"""Decides which of Orbax's options are followed, logged, or rejected by name.

They are the options of handlers and of saves, of a manager, and of version 1's
``Context``. An option that changes only how files are written is logged, once for each
manager. One that changes what a restore returns is followed, or rejected by name.

The decisions when to save are Orbax's own policies, built from the options as Orbax
builds them. A policy of retention is code in Orbax that a process calls after each
save; that of a run is a value that the server applies. What has no equal value is
rejected by its name.

Decides only: reads no store and no clock.
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import reduce
from operator import or_
from typing import Any, Final

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers
from orbax.checkpoint import multihost
from orbax.checkpoint.checkpoint_args import get_registered_args_cls

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

_log = logging.getLogger("storesvc_client")

_PLAIN: Final = (
    ocp.StandardCheckpointHandler,
    ocp.PyTreeCheckpointHandler,
    ocp.JsonCheckpointHandler,
)
"""Handlers whose items a store keeps as trees and JSON: they are never called."""

_ARGUMENTS: Final = frozenset({"item", "save_args", "custom_metadata"})
"""Fields of ``StandardSave`` and ``PyTreeSave`` that are followed."""

_NEEDLESS: Final = frozenset(
    {
        "ocdbt_target_data_file_size",
        "SaveArgs.aggregate",
        "SaveArgs.chunk_byte_size",
        "SaveArgs.shard_axes",
        "SaveArgs.write_chunk_shape",
        "SaveArgs.read_chunk_shape",
    }
)
"""Fields without an effect on what a restore returns."""


class IgnoredOptions:
    """Logs options without an effect, each once."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._known: set[tuple[str, str]] = set()

    def log(self, names: Iterable[str], *, of: str, why: str) -> None:
        """Logs the names that were not logged before."""
        new = [name for name in names if (of, name) not in self._known]
        self._known.update((of, name) for name in new)
        if new:
            _log.info(
                "%s: %s: without effect in a store: %s; %s",
                *(self._owner, of, ", ".join(new), why),
            )


def handler_options(place: str, handler: Any) -> list[str]:
    """Returns the options of a handler that is never called; [] if it is called."""
    if type(handler) not in _PLAIN:
        return []
    options = inspect.signature(type(handler)).parameters
    for name, attribute in (
        ("type_handler_registry", "_type_handler_registry"),
        ("handler_impl", "_handler_impl"),
    ):
        value = getattr(handler, attribute, None)
        if name not in options or value is None:
            continue
        if options[name].default is None:  # as if it were not given
            is_default = type(value) is type(getattr(type(handler)(), attribute, None))
        else:
            is_default = value is options[name].default
        if not is_default:
            raise InvalidRequestError(
                f"{place}: {name}=: expected Orbax's default, as a store keeps arrays "
                f"and values itself, got {value!r}; leave it out, or register a "
                "handler and an argument of your own for the item"
            )
    return list(options)


def check_handler(place: str, args: Any, handler: Any) -> None:
    """Rejects a handler of the caller for an argument that a store keeps itself, and
    one of Orbax for the argument of another, as Orbax does."""
    if handler is None or (args is None and type(handler) in _PLAIN):
        return
    if type(handler) not in _PLAIN or type(args) not in get_registered_args_cls(
        handler
    ):
        raise InvalidRequestError(
            f"{place}: expected the argument that {type(handler).__name__} is "
            f"registered with, got {type(args).__name__}, which does not match with "
            "any registered handler of the item; register an argument of your own with "
            "it, or leave the handler out"
        )


def save_options(place: str, args: Any) -> list[str]:
    """Returns the options of ``StandardSave`` or ``PyTreeSave`` without an effect."""
    names = [name for name in _set_fields(args) if name not in _ARGUMENTS]
    for given in jax.tree.leaves(args.save_args):
        if not isinstance(given, ocp.SaveArgs):
            raise InvalidRequestError(
                f"{place}: save_args=: expected SaveArgs, got {type(given).__name__}"
            )
        names += [f"SaveArgs.{name}" for name in _set_fields(given) if name != "dtype"]
    for name in names:
        is_standard = isinstance(args, ocp.args.StandardSave)
        if name not in _NEEDLESS or (is_standard and name == "SaveArgs.aggregate"):
            raise InvalidRequestError(
                f"{place}: expected no {name}=, which a store cannot follow; leave it "
                "out"
            )
    return list(dict.fromkeys(names))


def _set_fields(given: Any) -> list[str]:
    """Returns the fields of a dataclass that differ from their defaults."""
    found = []
    for field in fields(given):
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        if default is MISSING:
            continue
        value = getattr(given, field.name)
        if value is not default and (default is None or value != default):
            found.append(field.name)
    return found


TAKEN: Final = frozenset(
    {
        "save_interval_steps",
        "max_to_keep",
        "keep_time_interval",
        "keep_period",
        "best_fn",
        "best_mode",
        "keep_checkpoints_without_metrics",
        "save_on_steps",
        "read_only",
        "enable_async_checkpointing",
        "should_save_fn",
        "save_decision_policy",
        "preservation_policy",
        "multiprocessing_options",
        "enable_should_save_is_saving_in_progress_check",
        "save_root_metadata",
    }
)
"""Options with the effect that they have in Orbax."""

NEEDLESS: Final = {
    "create": "the first save creates the run",
    "cleanup_tmp_directories": "the server collects what unfinished saves left",
    "single_host_load_and_broadcast": "steps are listed by the server",
    "todelete_subdir": "deleted checkpoints can be undeleted until their purge time",
    "todelete_full_path": "deleted checkpoints can be undeleted until their purge time",
    "enable_background_delete": "the server deletes",
    "num_deletion_threads": "the server deletes",
    "async_options": "client.run(save=) has the options of saves in the background",
    "file_options": "a store has no files of the caller",
    "atomicity_options": "each commit is one conditional write",
    "temporary_path_class": "a save is invisible until its commit",
    "step_prefix": "steps are numbers in a store",
    "step_format_fixed_length": "steps are numbers in a store",
    "step_name_format": "steps are numbers in a store",
    "lightweight_initialize": "steps and metrics are listed in one call",
    "enable_per_process_directory_creation": "a store has no directories",
}
"""Options without an effect, each with the reason."""

_REFUSED_SAVE_OPTIONS: Final = {
    "prevent_write_metrics": "pass metrics= only to the saves that keep them"
}
"""Options whose effect a store does not have, each with what to do."""


def needless_options(options: Any) -> list[str]:
    """Returns a line for each option that was set and has no effect."""
    check_processes("options: multiprocessing_options", options.multiprocessing_options)
    lines = []
    for name in _set_fields(options):
        if name in TAKEN:
            continue
        if name not in NEEDLESS:
            advice = _REFUSED_SAVE_OPTIONS.get(name, "leave it out")
            raise InvalidRequestError(
                f"options: expected no {name}=, which a store cannot follow, got "
                f"{getattr(options, name)!r}; {advice}"
            )
        lines.append(f"{name}= has no effect: {NEEDLESS[name]}")
    return lines


def check_processes(place: str, given: Any) -> None:
    """Rejects options that would have only some processes of a job save."""
    count = jax.process_count()
    active, primary = given.active_processes, given.primary_host
    for name, expected, found, is_same in (
        ("active_processes", None, active, active in (None, {*range(count)})),
        ("primary_host", 0, primary, primary == 0 or (primary is None and count == 1)),
    ):
        if not is_same:
            raise InvalidRequestError(
                f"{place}.{name}: expected {expected}, as all processes of a job save "
                f"and process 0 decides, got {found!r}; leave it out"
            )


def make_save_policy(options: Any) -> Any:
    """Returns Orbax's policy that decides when to save."""
    if options.save_decision_policy is not None:
        return options.save_decision_policy
    policies: list[Any] = []
    if options.should_save_fn is not None:
        policies.append(_ShouldSave(options.should_save_fn))
        policies.append(managers.PreemptionCheckpointingPolicy())
        return managers.AnySavePolicy(policies)
    if options.save_interval_steps is not None:
        if options.save_interval_steps < 1 and not options.read_only:
            raise InvalidRequestError(
                "options: save_interval_steps=: expected at least 1, got "
                f"{options.save_interval_steps}"
            )
        if not options.read_only:
            interval = options.save_interval_steps
            policies.append(managers.FixedIntervalPolicy(interval))
    if options.save_on_steps is not None:
        policies.append(managers.SpecificStepsPolicy(options.save_on_steps))
    policies.append(managers.PreemptionCheckpointingPolicy())
    policies.append(managers.InitialSavePolicy())
    return managers.AnySavePolicy(policies)


class _ShouldSave:
    """Asks a function of the step and the step before."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        del context
        before = previous_steps[-1].step if previous_steps else None
        return bool(self._function(step.step, before))


_GROUPS: Final = (
    *("array", "asynchronous", "atomicity", "checkpointables", "deletion", "file"),
    *("memory", "multiprocessing", "pathways", "pytree", "safetensors"),
)

_FOLLOWED: Final = frozenset(
    {
        "pytree.loading.partial_load",
        "asynchronous.post_finalization_callback",
        "checkpointables.registry",
    }
)

_REFUSED: Final = {
    "array.saving.storage_options.dtype": "save state.astype(dtype)",
    "array.saving.scoped_storage_options_creator": "save state.astype(dtype)",
    "memory.serialization_status_callback": "connect(step_logger=) has statistics",
    "pathways.checkpointing_impl": "each process saves its own shards",
    "checkpoint_layout": "import other layouts with storectl import",
}
"""Options that change what is saved, returned or called, with advice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSettings:
    """Decisions of a context that a store follows."""

    is_partial: bool
    """True if a checkpoint and a target may have leaves that the other lacks."""
    after_commit: Callable[[], object] | None
    """Called after each commit; None: nothing is."""
    registry: Any
    """Orbax's handlers of checkpointables."""


def context_settings(given: Any, ignored: IgnoredOptions) -> ContextSettings:
    """Returns what the active context decides, or the given one if none is active.

    Args:
        given: Orbax's ``Context``; None: its defaults.
        ignored: Logs options without an effect.
    """
    from orbax.checkpoint.experimental.v1 import Context

    # Orbax has no public access to the context of a with block.
    from orbax.checkpoint.experimental.v1._src.context.context import get_context

    if given is not None and not isinstance(given, Context):
        raise InvalidRequestError(
            f"context=: expected a Context of Orbax, got {type(given).__name__}"
        )
    context = get_context(given)
    defaults = dict(_options(Context()))
    names = [
        name
        for name, value in _options(context)
        if not _is_same(value, defaults[name]) and name not in _FOLLOWED
    ]
    for name in names:
        if name in _REFUSED and not _is_without_effect(context, name):
            raise InvalidRequestError(
                f"context=: expected no {name}=, which a store cannot follow; "
                f"{_REFUSED[name]}"
            )
    check_processes("context=: multiprocessing", context.multiprocessing)
    ignored.log(names, of="context=", why="it has a format and limits of its own")
    return ContextSettings(
        is_partial=context.pytree.loading.partial_load,
        after_commit=context.asynchronous.post_finalization_callback,
        registry=context.checkpointables.registry,
    )


def _is_without_effect(context: Any, name: str) -> bool:
    """Returns whether the value of an option changes nothing here."""
    if name == "checkpoint_layout":  # AUTO finds the layout of a checkpoint
        return bool(context.checkpoint_layout.name == "AUTO")
    return name == "pathways.checkpointing_impl" and not multihost.is_pathways_backend()


def _options(context: Any) -> Iterator[tuple[str, Any]]:
    yield "checkpoint_layout", context.checkpoint_layout
    for group in _GROUPS:
        yield from _below(group, getattr(context, group))


def _below(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not is_dataclass(value):
        yield name, value
        return
    for field in fields(value):
        yield from _below(f"{name}.{field.name}", getattr(value, field.name))


def _is_same(value: Any, default: Any) -> bool:
    """Returns whether an option is at its default; objects that are made for each
    context are compared by what they hold."""
    if value is default:
        return True
    if type(value) is not type(default):
        return False
    if value == default:
        return True
    held, other = (getattr(each, "__dict__", None) for each in (value, default))
    return held is not None and repr(held) == repr(other)


_ADVICE: Final = "set a policy of the run with run.retention.set, or use LatestN"


def options_retention(options: Any) -> RetentionPolicy | None:
    """Returns the retention policy of ``CheckpointManagerOptions``; None keeps all."""
    if options.preservation_policy is not None:
        for name in ("max_to_keep", "keep_period", "keep_time_interval"):
            if getattr(options, name):
                raise InvalidRequestError(
                    f"options: expected preservation_policy= or {name}=, got both"
                )
        return policy_retention(options.preservation_policy)
    if options.max_to_keep is None:
        return None  # as in Orbax: all stay, whatever else is given
    count = _positive("max_to_keep", options.max_to_keep)
    newest: RetentionPolicy = KeepLatest(count)
    if options.best_fn is not None:
        newest = _best(
            count,
            metric_name("best_fn", options.best_fn),
            mode="min" if options.best_mode == "min" else "max",
            keeps_without=options.keep_checkpoints_without_metrics,
        )
    rules = [newest]
    if options.keep_period is not None:
        rules.append(KeepEvery(steps=options.keep_period))
    if options.keep_time_interval is not None:
        rules.append(KeepEvery(duration=options.keep_time_interval))
    return reduce(or_, rules)


def policy_retention(policy: Any) -> RetentionPolicy | None:
    """Returns the retention policy of a policy of Orbax; None keeps all."""
    match policy:
        case managers.AnyPreservationPolicy(policies=members):
            found = [policy_retention(member) for member in members]
            if not found:
                raise InvalidRequestError(
                    f"AnyPreservationPolicy: expected policies, got none; {_ADVICE}"
                )
            rules = [rule for rule in found if rule is not None]
            return reduce(or_, rules) if len(rules) == len(found) else None
        case managers.LatestN(n=count):
            return None if count is None else KeepLatest(_positive("LatestN", count))
        case managers.EveryNSeconds(interval_secs=seconds):
            return KeepEvery(duration=seconds)
        case managers.EveryNSteps():
            return _every_steps(policy)
        case managers.CustomSteps(_steps_set=steps):  # there is no public field
            return KeepSteps(*sorted(steps))
        case managers.LatestDuration(duration=duration):
            return KeepNewerThan(duration)
        case managers.preservation_policy.PreserveAll():
            return None
        case managers.BestN(n=count):
            if count is None:
                return None
            return _best(
                _positive("BestN", count),
                metric_name("BestN: get_metric_fn", policy.get_metric_fn),
                mode="min" if policy.reverse else "max",
                keeps_without=policy.keep_checkpoints_without_metrics,
            )
        case _:
            raise InvalidRequestError(
                "preservation policy: expected LatestN, EveryNSteps, EveryNSeconds, "
                "BestN, CustomSteps, LatestDuration, PreserveAll or any of these, got "
                f"{type(policy).__name__}, which no policy of a run equals; {_ADVICE}"
            )


def metric_name(place: str, function: Callable[[Any], Any]) -> str:
    """Returns the name of the metric that a function of metrics returns.

    The function is called once with a mapping that records what it reads: whatever else
    it computes is visible, as its result is not the value that it was given.

    >>> metric_name("best_fn", lambda metrics: metrics["loss"])
    'loss'
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


def _best(
    count: int, metric: str, *, mode: Mode, keeps_without: bool
) -> RetentionPolicy:
    without: Any = "keep" if keeps_without else "drop"
    return KeepBest(count, metric=metric, mode=mode, without_metric=without)


def _every_steps(policy: Any) -> RetentionPolicy:
    for name, plain in (("exact_interval", True), ("max_to_keep", None)):
        if (got := getattr(policy, name)) != plain:
            raise InvalidRequestError(
                f"EveryNSteps: expected {name}={plain}, got {got!r}, which no policy "
                f"of a run equals; {_ADVICE}"
            )
    return KeepEvery(steps=policy.interval_steps)


def _positive(place: str, count: int) -> int:
    if count < 1:
        raise InvalidRequestError(
            f"{place}: expected at least 1, as the newest checkpoint always stays, got "
            f"{count}"
        )
    return count
