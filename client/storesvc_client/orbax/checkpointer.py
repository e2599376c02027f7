"""``training.Checkpointer`` of Orbax's version 1 over a run of a store.

A checkpointable is a pytree, or an object that saves itself into a directory
(``StatefulCheckpointable``), such as an iterator of Grain.
"""

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as managers
from orbax.checkpoint.experimental.v1 import handlers

# Orbax has no public access to how it finds the handler of a checkpointable.
from orbax.checkpoint.experimental.v1._src.handlers import registration
from orbax.checkpoint.experimental.v1.training import CheckpointMetadata, RootMetadata

from storesvc_client.errors import InvalidRequestError
from storesvc_client.orbax.items import (
    Content,
    FilesContent,
    Part,
    TreeContent,
    restore_files,
    step_contents,
)
from storesvc_client.orbax.options import (
    NEEDLESS,
    ContextSettings,
    IgnoredOptions,
    context_settings,
    policy_retention,
)
from storesvc_client.orbax.sequence import (
    ManagedRun,
    StepSequence,
    rank_numbers,
    root_metadata,
    timestamps,
)
from storesvc_client.orbax.trees import restore_tree, saved_target, tree_structs

if TYPE_CHECKING:
    from storesvc_client._api.run import Run
    from storesvc_client._restore.checkpoint import OpenCheckpoint
    from storesvc_client.orbax.items import StepRecord

_PLAIN: Final = (handlers.PyTreeHandler, handlers.JsonHandler)
"""Handlers whose checkpointables a store keeps as trees: they are never called."""


def checkpointable_content(name: str, value: Any, registry: Any) -> Content:
    handler = None
    with suppress(registration.NoEntryError):  # the save says which leaf is none
        if value is not None:
            handler = registration.resolve_handler_for_save(registry, value, name=name)
    if handler is None or type(handler) in _PLAIN:
        return TreeContent(value)

    def write(folder: Path) -> None:
        _run(handler.save(_CreatedPath(folder), value))

    cls = type(handler)
    return FilesContent(write, handler=f"{cls.__module__}.{cls.__qualname__}")


def _load_checkpointable(
    opened: "OpenCheckpoint",
    name: str,
    part: Part,
    target: Any,
    settings: ContextSettings,
) -> Any:
    """Returns a checkpointable, or loads it into the target and returns that."""
    if part.kind == "tree":
        return restore_tree(opened, part.place, target, partial=settings.is_partial)
    if part.kind == "json":
        return opened.items[part.place]
    handler = _find_handler(name, part, target, settings.registry)
    is_stateful = type(handler).__name__ == "StatefulCheckpointableHandler"
    if handler is None or (is_stateful and target is None):
        raise InvalidRequestError(
            f"{opened.name} checkpointable {name!r}: expected the object to load it "
            f"into, which has save and load, or a target of the handler that wrote it, "
            f"{part.handler}, registered with register_handler, got "
            f"{type(target).__name__}"
        )
    return restore_files(
        *(opened, name, part),
        lambda folder: _run(handler.load(epath.Path(folder), target)),
    )


def describe_checkpointable(
    opened: "OpenCheckpoint", name: str, part: Part, registry: Any
) -> Any:
    """Returns the metadata of a checkpointable; None if its handler has none."""
    if part.kind == "tree":
        return tree_structs(opened, part.place, saved_target)
    handler = _find_handler(name, part, None, registry)
    if handler is None:
        return None

    def read(folder: Path) -> Any:
        try:
            return asyncio.run(handler.metadata(epath.Path(folder)))
        except NotImplementedError:
            return None

    return restore_files(opened, name, part, read)


def _find_handler(name: str, part: Part, target: Any, registry: Any) -> Any:
    """Returns the handler that reads the files of a checkpointable; None: there is
    none."""
    if part.kind != "files":
        return None
    try:
        return registration.resolve_handler_for_load(
            registry, target, name=name, handler_typestr=part.handler
        )
    except registration.NoEntryError:
        return None


class _CreatedPath:
    """A directory that exists; Orbax passes one that it creates in the background."""

    def __init__(self, folder: Path) -> None:
        self.path = epath.Path(folder)

    def __truediv__(self, part: str) -> "_CreatedPath":
        return _CreatedPath(Path(self.path) / part)

    def __fspath__(self) -> str:
        return str(self.path)

    async def await_creation(self) -> Any:
        return self.path


def _run(started: Awaitable[Any]) -> Any:
    """Runs a coroutine, and the work in the background that it returns."""

    async def both() -> Any:
        background = await started
        return await background if background is not None else None

    return asyncio.run(both())


STATE: Final = "state"
"""Name of the checkpointable of ``save`` and ``load``."""


class Response:
    """Something in the background; ``result`` waits for its end."""

    def __init__(self, ended: "Future[Any]", settle: Callable[[Any], object]) -> None:
        self._ended = ended
        self._settle = settle

    def result(self, timeout: float | None = None) -> bool:
        """Returns True once the step is committed, or whether one was deleted.

        Args:
            timeout: Seconds to wait; None waits without limit.

        Raises:
            StoreError: The save failed.
            TimeoutError: It is still running; it continues.
        """
        self._ended.exception(timeout)
        self._settle(self._ended)
        return self._ended.result() is not False

    def on_complete(self, callback: Callable[[bool], object]) -> None:
        """Calls a function with the result once there is one; not if it failed."""

        def call(ended: "Future[Any]") -> None:
            if ended.exception() is None:
                callback(ended.result() is not False)

        self._ended.add_done_callback(call)


def _deprecate(name: str) -> Callable[..., Any]:
    """Returns a method that warns, and calls the one that has another name now."""

    def call(self: "Checkpointer", *values: Any, **options: Any) -> Any:
        warnings.warn(f"Use `{name}` instead.", DeprecationWarning, stacklevel=2)
        return getattr(self, name)(*values, **options)

    return call


class Checkpointer(ManagedRun):
    """Manages the checkpoints of a run as Orbax's ``training.Checkpointer`` does.

    >>> with Checkpointer("file:///ckpts#prod/llama-8b") as checkpointer:
    ...     checkpointer.save(0, state)
    ...     state = checkpointer.load(0, state)
    """

    def __init__(
        self,
        directory: "Run | str | PathLike[str]",
        *,
        context: Any = None,
        save_decision_policy: Any = None,
        preservation_policy: Any = None,
        step_name_format: Any = None,
        custom_metadata: Mapping[str, Any] | None = None,
        cleanup_tmp_directories: bool = False,
        lightweight_initialize: bool = False,
        logger: Any = None,
        run: str | None = None,
    ) -> None:
        """Opens a run, and sets its retention policy if it has none.

        Args:
            directory: As for ``CheckpointManager``.
            context: Orbax's ``Context``; an active one counts before it, as in Orbax.
                ``partial_load`` is followed, options of files are logged, and those
                that change what is saved or loaded are rejected.
            save_decision_policy: Orbax's policy; None saves as often as possible.
            preservation_policy: Orbax's policy; None leaves that of the run unchanged.
            step_name_format: Logged, without effect: steps are numbers in a store.
            custom_metadata: Metadata of the run, kept unless it has some.
            cleanup_tmp_directories: Logged, without effect: the server collects what
                unfinished saves left.
            lightweight_initialize: Logged, without effect: one call lists all steps.
            logger: As for ``CheckpointManager``.
            run: Name of the run, if ``directory`` is a target without one.

        Raises:
            InvalidRequestError: A policy has no equal; names it.
            PreconditionError: The run has another retention policy.
            StoreError: The store cannot be reached.
        """
        self._ignored = IgnoredOptions("Checkpointer")
        for option, is_set in (
            ("cleanup_tmp_directories", cleanup_tmp_directories),
            ("lightweight_initialize", lightweight_initialize),
            ("step_name_format", step_name_format is not None),
        ):
            if is_set:
                self._ignored.log([option], of="arguments", why=NEEDLESS[option])
        self._context = context
        context_settings(context, self._ignored)
        keep = None
        if preservation_policy is not None:
            keep = policy_retention(preservation_policy)
        self._steps = StepSequence(
            directory,
            run,
            logger,
            metadata=custom_metadata,
            save_policy=save_decision_policy
            or managers.AnySavePolicy(  # as often as possible
                [
                    managers.InitialSavePolicy(),
                    managers.ContinuousCheckpointingPolicy(),
                    managers.PreemptionCheckpointingPolicy(),
                ]
            ),
            keep=keep,
            multiprocessing_options=ocp.options.MultiprocessingOptions(),
            is_read_only=False,
            reports_saving=True,
        )

    @property
    def latest(self) -> CheckpointMetadata | None:
        """The newest checkpoint; None if there is none."""
        found = self.checkpoints
        return found[-1] if found else None

    @property
    def checkpoints(self) -> list[CheckpointMetadata]:
        """The committed checkpoints and the one that is being saved, the lowest step
        first."""
        return [
            CheckpointMetadata(
                step=info.step,
                path=self.directory / info.step,
                metadata=None,
                commit_timestamp_nsecs=int(info.time.timestamp() * 1e9),
                metrics=info.metrics,
            )
            for info in self._steps.infos()
        ]

    def save(self, step: int, state: Any, **options: Any) -> bool:
        """Saves a pytree as ``save_async`` does, and returns after the commit: whether
        it was saved.

        Raises:
            StoreError: As for ``save_checkpointables_async``, or the save failed.
        """
        response = self.save_async(step, state, **options)
        return response is not None and response.result()

    def save_async(
        self, step: int, state: Any, *, checkpointable_name: str = STATE, **options: Any
    ) -> Response | None:
        """Starts to save a pytree as ``save_checkpointables_async`` does.

        Raises:
            StoreError: As for ``save_checkpointables_async``.
        """
        return self.save_checkpointables_async(
            step, {checkpointable_name: state}, **options
        )

    def save_checkpointables(
        self, step: int, checkpointables: Mapping[str, Any], **options: Any
    ) -> bool:
        """Saves as ``save_checkpointables_async`` does, and returns after the commit:
        whether it saved.

        Raises:
            StoreError: As for ``save_checkpointables_async``, or the save failed.
        """
        response = self.save_checkpointables_async(step, checkpointables, **options)
        return response is not None and response.result()

    def save_checkpointables_async(
        self,
        step: int,
        checkpointables: Mapping[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Mapping[str, Any] | None = None,
        custom_metadata: Any = None,
    ) -> Response | None:
        """Starts to save checkpointables, if the policy or ``force`` says so.

        Args:
            step: The step.
            checkpointables: Checkpointables by name.
            force: Whether to save whatever the policy says.
            overwrite: Rejected if True: a step is written once.
            metrics: Values of JSON; numbers become metrics of the checkpoint.
            custom_metadata: A value of JSON, which ``metadata`` returns.

        Returns:
            The save; None if the policy says no.

        Raises:
            StepExistsError: The step is committed or deleted.
            InvalidRequestError: An argument is out of range.
            StoreError: The save before failed, or this one could not begin.
        """
        if overwrite:
            raise InvalidRequestError(
                f"save of {self._steps.run.name}@{step}: overwrite=: expected False, "
                "as a step is written once, got True; run.delete and run.purge free a "
                "step"
            )
        settings = context_settings(self._context, self._ignored)
        self._steps.check_free(step)
        if not force and not self._steps.should_save(step):
            return None
        self._steps.wait()
        place = f"save of {self._steps.run.name}@{step}"
        tree, kept = step_contents(
            place,
            step,
            {
                name: checkpointable_content(name, value, settings.registry)
                for name, value in checkpointables.items()
            },
            default=STATE,
            is_default=True,
            metrics=None if metrics is None else dict(metrics),
            custom_metadata=custom_metadata,
        )
        ended = self._steps.begin(
            step,
            tree,
            items=kept,
            metrics=rank_numbers(place, metrics, None),
            after_commit=settings.after_commit,
        )
        return Response(ended, self._steps.settle)

    def load(
        self,
        step: "int | CheckpointMetadata | None" = None,
        abstract_state: Any = None,
        *,
        checkpointable_name: str = STATE,
    ) -> Any:
        """Returns the pytree of a step.

        Args:
            step: A step, or its metadata; None: the newest.
            abstract_state: Pytree of what to return; None: as it was saved.
            checkpointable_name: Name of the pytree in the step.

        Raises:
            StoreError: As for ``load_checkpointables``.
        """
        found = self.load_checkpointables(step, {checkpointable_name: abstract_state})
        return found[checkpointable_name]

    def load_checkpointables(
        self,
        step: "int | CheckpointMetadata | None" = None,
        abstract_checkpointables: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns the checkpointables of a step by name.

        Args:
            step: A step, or its metadata; None: the newest.
            abstract_checkpointables: What to return, by name: a pytree, None for what
                was saved, or the object to load into. None: all pytrees.

        Raises:
            StepMissingError: There is no such step.
            ItemMissingError: The step has no such checkpointable.
            MismatchError: The step does not fit a target; lists every leaf.
            StoreError: As for ``Run.restore``.
        """
        opened, record = self._open(_number(step))
        wanted = abstract_checkpointables
        if wanted is None:
            wanted = dict.fromkeys(record.parts)
        settings = context_settings(self._context, self._ignored)
        return {
            name: _load_checkpointable(
                opened, name, self._part(opened, record, name), target, settings
            )
            for name, target in wanted.items()
        }

    def metadata(
        self, step: "int | CheckpointMetadata | None" = None
    ) -> CheckpointMetadata:
        """Returns the metadata of a step with that of its pytree "state".

        Raises:
            StepMissingError: There is no such step.
            ItemMissingError: The step has no such pytree.
        """
        opened, record = self._open(_number(step))
        part = self._part(opened, record, STATE)
        structs = tree_structs(opened, part.place, saved_target)
        return self._metadata(opened, record, structs)

    def checkpointables_metadata(
        self, step: "int | CheckpointMetadata | None" = None
    ) -> CheckpointMetadata:
        """Returns the metadata of a step with that of each checkpointable; None for
        those whose handler has none.

        Raises:
            StepMissingError: There is no such step.
        """
        opened, record = self._open(_number(step))
        registry = context_settings(self._context, self._ignored).registry
        structs = {
            name: describe_checkpointable(opened, name, part, registry)
            for name, part in record.parts.items()
        }
        return self._metadata(opened, record, structs)

    def root_metadata(self) -> RootMetadata:
        """Returns the metadata of the run."""
        found = root_metadata(self._steps.run)
        return RootMetadata(directory=self.directory, custom_metadata=found)

    def delete(
        self,
        step: "int | CheckpointMetadata",
        *,
        checkpointable_name: str | None = None,
        missing_ok: bool = False,
    ) -> bool:
        """Deletes a step; ``run.undelete`` restores it until its purge time.

        Args:
            step: A step, or its metadata.
            checkpointable_name: Rejected: a step is deleted as a whole.
            missing_ok: Whether the step may be missing.

        Returns:
            Whether it was there.

        Raises:
            StepMissingError: There is no such step.
            PreconditionError: It is pinned or has a tag.
        """
        number = _number(step)
        if checkpointable_name is not None:
            raise InvalidRequestError(
                f"delete of {self._steps.run.name}@{number}: checkpointable_name=: "
                "expected none, as a step is written once, got "
                f"{checkpointable_name!r}; delete the whole step"
            )
        self._steps.wait()
        if missing_ok and number not in self._steps.steps():
            return False
        self._steps.delete(number)
        return True

    def delete_async(
        self, step: "int | CheckpointMetadata", **options: Any
    ) -> Response:
        """Deletes a step; takes what ``delete`` takes, and is done when it returns."""
        ended: Future[bool] = Future()
        ended.set_result(self.delete(step, **options))
        return Response(ended, lambda _: None)

    def cancel(self, step: "int | CheckpointMetadata | None" = None) -> None:
        """Ends the save in the background, deletes its step, and another one.

        Args:
            step: Another step to delete, if it is there.
        """
        self._steps.cancel(_number(step))

    def wait(self) -> None:
        """Waits for the save in the background.

        Raises:
            StoreError: It failed, and its error was not raised yet.
        """
        self._steps.wait()

    def load_async(self, *_: object, **__: object) -> Any:
        """Raises NotImplementedError, as Orbax does."""
        raise NotImplementedError("expected load or load_checkpointables")

    load_checkpointables_async = load_async
    save_pytree = _deprecate("save")
    save_pytree_async = _deprecate("save_async")
    load_pytree = _deprecate("load")
    load_pytree_async = _deprecate("load_async")
    pytree_metadata = _deprecate("metadata")

    def _metadata(
        self, opened: "OpenCheckpoint", record: "StepRecord", structs: Any
    ) -> CheckpointMetadata:
        return CheckpointMetadata(
            step=opened.info.step,
            path=self.directory / opened.info.step,
            metadata=structs,
            custom_metadata=record.custom_metadata or {},
            metrics=record.metrics,
            **timestamps(opened.info),
        )


def _number(step: Any) -> Any:
    return step.step if isinstance(step, CheckpointMetadata) else step
