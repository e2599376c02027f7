"""Decides which of Orbax's options a manager takes, and when it saves.

The decisions when to save are Orbax's own policies, built from the options as Orbax
builds them.

Decides only: reads no store and no clock.
"""

from dataclasses import MISSING, fields
from typing import Any, Final

import jax
from orbax.checkpoint import checkpoint_managers as managers

from storesvc_client.errors import InvalidRequestError

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

_REFUSED: Final = {
    "prevent_write_metrics": "pass metrics= only to the saves that keep them",
}
"""Options whose effect a store does not have, each with what to do."""


def default_options() -> Any:
    """Returns Orbax's default options."""
    from orbax.checkpoint import CheckpointManagerOptions

    return CheckpointManagerOptions()


def needless_options(options: Any) -> list[str]:
    """Returns a line for each option that was set and has no effect.

    Raises:
        InvalidRequestError: An option that was set cannot be followed; names it.
    """
    check_processes("options: multiprocessing_options", options.multiprocessing_options)
    lines = []
    for field in fields(options):
        if not _is_set(field, getattr(options, field.name)):
            continue
        if field.name in TAKEN:
            continue
        if field.name not in NEEDLESS:
            advice = _REFUSED.get(field.name, "leave it out")
            raise InvalidRequestError(
                f"options: expected no {field.name}=, which a store cannot follow, got "
                f"{getattr(options, field.name)!r}; {advice}"
            )
        lines.append(f"{field.name}= has no effect: {NEEDLESS[field.name]}")
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


def save_policy_of_options(options: Any) -> Any:
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


def _is_set(field: Any, value: Any) -> bool:
    """Returns whether an option differs from its default."""
    if field.default is not MISSING:
        return bool(value != field.default)
    return bool(value != field.default_factory())
