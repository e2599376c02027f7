"""``CheckpointManager`` of Orbax over a run of a store.

A step has either one unnamed item, or several named ones (``args.Composite``); which
of the two is settled by the constructor, or by the first save or restore.

Orbax's ``CheckpointArgs`` are translated to what a step holds, and back. Trees and JSON
values are stored as such; every other argument belongs to a handler, which writes
files. ``items=`` and its keywords, which Orbax deprecates, are taken as in Orbax for
items whose handler the manager was created with: the handler is registered with the
class of argument that they belong to.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_args import (
    get_registered_args_cls,
    get_registered_handler_cls,
)
from orbax.checkpoint.checkpoint_manager import (
    AbstractCheckpointManager,
    RootMetadata,
    StepMetadata,
)

from storesvc_client._items.values import encode_item
from storesvc_client.errors import InvalidRequestError
from storesvc_client.orbax.items import (
    DEFAULT_ITEM,
    Content,
    FilesContent,
    JsonContent,
    Part,
    StepRecord,
    TreeContent,
    restore_files,
    step_contents,
)
from storesvc_client.orbax.options import (
    IgnoredOptions,
    check_handler,
    handler_options,
    make_save_policy,
    metric_name,
    needless_options,
    options_retention,
    save_options,
)
from storesvc_client.orbax.sequence import (
    ManagedRun,
    StepSequence,
    rank_numbers,
    root_metadata,
    timestamps,
)
from storesvc_client.orbax.step_errors import StepMissingError
from storesvc_client.orbax.trees import (
    TreeMetadata,
    plain_tree,
    restore_tree,
    tree_structs,
)

if TYPE_CHECKING:
    from storesvc_client._api.run import Run
    from storesvc_client._restore.checkpoint import OpenCheckpoint

_REFUSED: Final = {
    ocp.args.ArraySave: "use StandardSave({'name': array})",
    ocp.args.ArrayRestore: "use StandardRestore({'name': array})",
}
_TREES_OF_SAVES: Final = (ocp.args.StandardSave, ocp.args.PyTreeSave)
"""A class below them belongs to a handler of the caller."""


def find_content(
    place: str, args: Any, handler: Any, ignored: IgnoredOptions
) -> Content:
    """Returns the content that an argument of a save describes."""
    match args:
        case _ if type(args) in _TREES_OF_SAVES:
            check_handler(place, args, handler)
            names = save_options(place, args)
            ignored.log(names, of=type(args).__name__, why="it has a format of its own")
            if jax.tree_util.treedef_is_leaf(jax.tree.structure(args.item)):
                raise InvalidRequestError(
                    f"{place}: expected a pytree with containers, got "
                    f"{type(args.item).__name__}; use a dict of it"
                )
            return TreeContent(
                _cast(place, args.item, args.save_args),
                custom_metadata=_json(place, args.custom_metadata),
            )
        case ocp.args.JsonSave():
            check_handler(place, args, handler)
            return JsonContent(args.item)
        case _:
            used = _find_handler(place, args, handler)

            def write(folder: Path) -> None:
                used.save(epath.Path(folder), args=args)
                used.finalize(epath.Path(folder))

            return FilesContent(write)


def restore_part(
    opened: "OpenCheckpoint", name: str, part: Part, args: Any, handler: Any
) -> Any:
    """Returns an item as an argument of a restore describes it.

    Args:
        opened: The checkpoint.
        name: Name of the item, for messages.
        part: Where it is.
        args: The argument; None restores what was saved.
        handler: Handler of the item, if one was given to the manager.

    Raises:
        InvalidRequestError: The argument is one of another kind of item, or has no
            equal.
        StoreError: As for ``OpenCheckpoint.restore``.
    """
    place = f"{opened.name} item {name!r}"
    if part.kind == "files":
        if args is None and handler is None:
            raise InvalidRequestError(
                f"{place}: expected the argument or the handler that reads its files, "
                "got none; pass args=Composite(...) with it, or item_handlers="
            )
        given = args
        if args is None:
            try:
                given = get_registered_args_cls(handler)[1]()
            except (ValueError, TypeError) as e:
                raise InvalidRequestError(
                    "expected the argument of a restore for "
                    f"{type(handler).__name__}, got none: {e}"
                ) from e
        used = _find_handler(place, given, handler)
        return restore_files(
            *(opened, name, part),
            lambda folder: used.restore(epath.Path(folder), args=given),
        )
    check_handler(place, args, handler)
    match args:
        case None if part.kind == "tree":
            return restore_tree(opened, part.place)
        case ocp.args.StandardRestore() | ocp.args.PyTreeRestore() if (
            part.kind == "tree"
        ):
            return _restore_target(opened, place, part, args)
        case None | ocp.args.JsonRestore() if part.kind == "json":
            return opened.items[part.place]
        case _:
            raise InvalidRequestError(
                f"{place}: expected the argument of a restore of its kind, "
                f"{part.kind}, got {type(args).__name__}"
            )


def _restore_target(opened: "OpenCheckpoint", place: str, part: Part, args: Any) -> Any:
    """Returns a tree as ``StandardRestore`` or ``PyTreeRestore`` describes it."""
    allowed = {
        "item",
        "restore_args",
        "partial_restore",
        "transforms_default_to_original",
        "strict",  # no array is padded or cut: other shapes are a mismatch
    }
    for field in fields(args):
        if field.name not in allowed and getattr(args, field.name) != field.default:
            raise InvalidRequestError(
                f"{place}: expected {field.name}={field.default}, which is all that a "
                f"store can follow, got {getattr(args, field.name)!r}"
            )
    target = plain_tree(args.item)
    given = plain_tree(getattr(args, "restore_args", None))
    if target is None:
        target, given = given, None
    elif given is None and isinstance(args, ocp.args.PyTreeRestore):
        # a number stands for any leaf, which is restored as it was saved
        given = jax.tree.map(
            lambda x: ocp.RestoreArgs() if isinstance(x, int | float | complex) else x,
            target,
        )
    partial = bool(getattr(args, "partial_restore", False))
    return restore_tree(opened, part.place, target, given, partial=partial)


def _json(place: str, metadata: Any) -> Any:
    """Returns the metadata of a tree, if a restore returns an equal value."""
    try:
        encode_item(metadata)
    except ValueError as e:
        raise InvalidRequestError(f"{place}: custom_metadata=: {e}") from e
    return metadata


def _cast(place: str, tree: Any, save_args: Any) -> Any:
    """Returns a tree in the dtypes of Orbax's ``SaveArgs``."""
    if save_args is None:
        return tree

    def cast(value: Any, given: Any) -> Any:
        dtype = None if given is None else given.dtype
        return value if dtype is None else value.astype(dtype)

    try:
        return jax.tree.map(cast, tree, save_args)
    except (ValueError, TypeError, AttributeError) as e:
        raise InvalidRequestError(
            f"{place}: save_args=: expected SaveArgs in the structure of the item, and "
            f"dtype= for arrays alone, got others: {e}"
        ) from e


def _find_handler(place: str, args: Any, handler: Any) -> Any:
    """Returns the handler that was given, or a new one of the registered class."""
    if type(args) in _REFUSED:
        raise InvalidRequestError(
            f"{place}: expected another argument than {type(args).__name__}; "
            f"{_REFUSED[type(args)]}"
        )
    if handler is not None:
        return handler
    try:
        return get_registered_handler_cls(args)()
    except (ValueError, TypeError) as e:
        raise InvalidRequestError(
            f"{place}: expected an argument whose handler is registered, got "
            f"{type(args).__name__}: {e}"
        ) from e


def items_arguments(
    items: Any, keywords: Any, handlers: Mapping[str, Any], *, for_restore: bool
) -> Any:
    """Returns the argument that deprecated arguments stand for.

    Args:
        items: The only item, or items by name; None: none.
        keywords: Keywords of its argument, or of their arguments by name; None: none.
        handlers: Handlers of the manager, by item.
        for_restore: Whether it is the argument of a restore.
    """
    is_default = not handlers or DEFAULT_ITEM in handlers
    by_name = _by_name(items, is_default=is_default)
    more = _by_name(keywords, is_default=is_default)
    made: dict[str, Any] = {}
    for name in {**by_name, **(more if for_restore else {})}:
        if name not in handlers:
            raise InvalidRequestError(
                f"items=: expected args=, such as args=ocp.args.StandardSave(tree), "
                f"or a manager with item_handlers= for it, got the item {name!r} "
                "without a handler"
            )
        of_save, of_restore = get_registered_args_cls(handlers[name])
        made[name] = (of_restore if for_restore else of_save)(
            by_name.get(name), **(more.get(name) or {})
        )
    return made[DEFAULT_ITEM] if is_default else ocp.args.Composite(**made)


def _by_name(given: Any, *, is_default: bool) -> dict[str, Any]:
    if given is None:
        return {}
    if isinstance(given, ocp.args.CheckpointArgs):
        raise InvalidRequestError(
            f"items=: expected an item, got {type(given).__name__}; pass it as args="
        )
    if is_default or not isinstance(given, Mapping):
        return {DEFAULT_ITEM: given}
    return dict(given)


_log = logging.getLogger("storesvc_client")


class CheckpointManager(ManagedRun, AbstractCheckpointManager):  # type: ignore[misc]  # no annotations
    """Manages the checkpoints of a run as ``orbax.checkpoint.CheckpointManager`` does.

    >>> with CheckpointManager("file:///ckpts#prod/llama-8b") as manager:
    ...     manager.save(0, args=ocp.args.StandardSave(state))
    ...     manager.wait_until_finished()
    ...     state = manager.restore(0, args=ocp.args.StandardRestore(state))
    """

    def __init__(
        self,
        directory: "Run | str | PathLike[str]",
        checkpointers: Any = None,
        options: ocp.CheckpointManagerOptions | None = None,
        metadata: Mapping[str, Any] | None = None,
        item_names: Sequence[str] | None = None,
        item_handlers: Any = None,
        logger: Any = None,
        handler_registry: None = None,
        *,
        run: str | None = None,
    ) -> None:
        """Opens a run, and sets its retention policy if it has none.

        Args:
            directory: A ``Run``; or the target of ``connect``, "#" and the name of the
                run, such as "file:///ckpts#prod/llama-8b", as a text or a path; more
                parts, as in "#prod/llama-8b/checkpoints/", are parts of the name.
            checkpointers: Deprecated: checkpointers by item, or the one of the only
                item, of which the handlers are taken; use ``item_handlers``.
            options: Orbax's options; those without an effect here are logged.
            metadata: Metadata of the run, kept unless it has some.
            item_names: Names of the items; None settles them by use.
            item_handlers: Handlers of items by name, or of the only item.
            logger: ``log_entry`` of it receives the statistics of each save and
                restore, if the manager opens the store; a ``Run`` has the one of
                ``connect(step_logger=)``.
            handler_registry: Rejected; use ``item_handlers``.
            run: Name of the run, if ``directory`` is a target without one.

        Raises:
            InvalidRequestError: An option cannot be followed; names it.
            PreconditionError: The run has another retention policy.
            StoreError: The store cannot be reached.
        """
        _reject("handler_registry", handler_registry, "use item_handlers=")
        self._options = options or ocp.CheckpointManagerOptions()
        for line in needless_options(self._options):
            _log.info("options: %s", line)
        keep = options_retention(self._options)
        policy = make_save_policy(self._options)
        self._best: str | None = None
        if self._options.best_fn is not None:
            self._best = metric_name("best_fn", self._options.best_fn)
        self._names = None if item_names is None else frozenset(item_names)
        self._is_async = self._options.enable_async_checkpointing
        if checkpointers is not None:
            item_handlers, is_async = _unwrap_handlers(checkpointers)
            self._is_async &= is_async
        self._handlers, self._is_default = _handlers(item_names, item_handlers)
        self._ignored = IgnoredOptions("CheckpointManager")
        for name, handler in self._handlers.items():
            self._ignored.log(
                handler_options(f"item_handlers= of {name!r}", handler),
                of=f"{type(handler).__name__} of {name!r}",
                why="it has a format and limits of its own",
            )
        is_read_only = self._options.read_only
        self._unsaved_metadata = (metadata or {}) if is_read_only else {}
        self._steps = StepSequence(
            directory,
            run,
            logger,
            metadata=metadata if self._options.save_root_metadata else None,
            save_policy=policy,
            keep=keep,
            multiprocessing_options=self._options.multiprocessing_options,
            is_read_only=is_read_only,
            reports_saving=(
                self._options.enable_should_save_is_saving_in_progress_check
            ),
        )

    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        force: bool | None = False,  # noqa: FBT001, FBT002 - Orbax's
        args: Any = None,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> bool:
        """Starts to save a step, if the policy or ``force`` says so.

        Args:
            step: The step.
            items: Deprecated: the item, or items by name, whose handlers the manager
                has; use ``args``.
            save_kwargs: Deprecated: keywords of the argument of ``items``.
            metrics: Values of JSON; numbers become metrics of the checkpoint.
            force: Whether to save whatever the policy says, and a step that is lower
                than the newest.
            args: ``StandardSave``, ``PyTreeSave``, ``JsonSave``, an argument of a
                registered handler, or a ``Composite`` of these by item.
            custom_metadata: Values of JSON, which ``metadata`` returns.

        Returns:
            Whether a save was started.

        Raises:
            StepExistsError: The step is committed or deleted, and ``force`` is given.
            InvalidRequestError: An argument has no equal; says what to use.
            StoreError: The save before failed, or this one could not begin.
        """
        args = self._arguments(args, items, save_kwargs, for_restore=False)
        by_name = self._by_name(args, "args")
        if args is None or not by_name:
            raise InvalidRequestError("save: expected args=, got none")
        self._check_names(by_name)
        if self._options.read_only or (not force and not self.should_save(step)):
            return False
        self.wait_until_finished()
        self._steps.check_free(step)
        place = f"save of {self._steps.run.name}@{step}"
        numbers = rank_numbers(place, metrics, self._best)
        tree, kept = step_contents(
            place,
            step,
            {
                name: find_content(
                    f"{place} item {name!r}",
                    given,
                    self._handlers.get(name),
                    self._ignored,
                )
                for name, given in by_name.items()
            },
            default=DEFAULT_ITEM,
            is_default=bool(self._is_default),
            metrics=None if metrics is None else dict(metrics),
            custom_metadata=None if custom_metadata is None else dict(custom_metadata),
        )
        self._steps.begin(
            step,
            tree,
            items=kept,
            metrics=numbers,
            after_commit=getattr(
                self._options.async_options, "post_finalization_callback", None
            ),
        )
        if not self._is_async:
            self.wait_until_finished()
        return True

    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Mapping[str, Any] | None = None,
        directory: None = None,
        args: Any = None,
    ) -> Any:
        """Returns the items of a step; waits for its commit if it is being saved.

        Args:
            step: The step; None: the newest.
            items: Deprecated: the target, or targets by name, of items whose handlers
                the manager has; use ``args``.
            restore_kwargs: Deprecated: keywords of the argument of ``items``.
            directory: Rejected; use a manager of the other run.
            args: ``StandardRestore``, ``PyTreeRestore``, ``JsonRestore``, an argument
                of a registered handler, or a ``Composite`` of these or of None by item.
                None restores what was saved.

        Returns:
            The only item, or a ``Composite`` of the items.

        Raises:
            StepMissingError: There is no such step.
            ItemMissingError: The step has no such item.
            MismatchError: The step does not fit the target; lists every leaf.
            StoreError: As for ``Run.restore``.
        """
        args = self._arguments(args, items, restore_kwargs, for_restore=True)
        _reject("directory", directory, "use a manager of the other run")
        opened, record = self._open(step)
        if self._is_default is None:
            is_composite = isinstance(args, ocp.args.Composite)
            self._is_default = record.is_default and not is_composite
        by_name = self._by_name(args, "args") if args is not None else {}
        if not by_name:
            by_name = dict.fromkeys(self._restorable(opened, record))
        restored = {
            name: restore_part(
                opened,
                name,
                self._part(opened, record, name),
                given,
                self._handlers.get(name),
            )
            for name, given in by_name.items()
        }
        if self._is_default:
            return restored[DEFAULT_ITEM]
        return ocp.args.Composite(**restored)

    def latest_step(self) -> int | None:
        """Returns the highest step, which may be the one that is being saved; None if
        there is none."""
        return self._steps.latest()

    def all_steps(self, read: bool = False) -> list[int]:  # noqa: FBT001, FBT002 - Orbax's
        """Returns the committed steps and the one that is being saved, ascending.

        Args:
            read: Whether to read them from the server.
        """
        if read:
            self.reload()
        return self._steps.steps()

    def best_step(self) -> int | None:
        """Returns the step with the best metric of ``best_fn``; without that function
        the newest. None if there is none."""
        if self._best is None:
            return self.latest_step()
        sign = -1.0 if self._options.best_mode == "min" else 1.0
        ranked = []
        for info in self._steps.infos():
            value = (info.metrics or {}).get(self._best)
            if value is not None:
                ranked.append((value == value, sign * value, info.step))  # noqa: PLR0124 - NaN is worst
        return max(ranked)[-1] if ranked else None

    def reached_preemption(self, step: int) -> bool:
        """Returns whether jax's preemption service ends the job at a step."""
        return bool(ocp.utils.reached_preemption(step))

    def wait_until_finished(self) -> None:
        """Waits for the save in the background.

        Raises:
            StoreError: It failed, and its error was not raised yet.
        """
        self._steps.wait()

    def check_for_errors(self) -> None:
        """Raises the error of a save in the background that has failed."""
        self._steps.check_errors()

    def item_metadata(self, step: int) -> Any:
        """Returns the ``TreeMetadata`` of a step, or a ``Composite`` of these by item:
        the tree with a ``ShapeDtypeStruct`` for each array, and ``custom_metadata``.

        Raises:
            StepMissingError: There is no such step.
        """
        return self.metadata(step).item_metadata

    def metadata(self, step: int | None = None) -> Any:
        """Returns the ``StepMetadata`` of a step; of the run its ``RootMetadata``.

        Raises:
            StepMissingError: There is no such step.
        """
        if step is None:
            found = root_metadata(self._steps.run) or dict(self._unsaved_metadata)
            return RootMetadata(custom_metadata=found)
        opened, record = self._open(step)
        structs = {
            name: TreeMetadata(
                tree=tree_structs(opened, part.place),
                custom_metadata=part.custom_metadata,
            )
            if part.kind == "tree"
            else None
            for name, part in record.parts.items()
        }
        is_default = record.is_default if self._is_default is None else self._is_default
        item = (
            structs.get(DEFAULT_ITEM) if is_default else ocp.args.Composite(**structs)
        )
        return StepMetadata(
            item_handlers={name: part.kind for name, part in record.parts.items()},
            item_metadata=item,
            metrics=record.metrics or {},
            custom_metadata=record.custom_metadata or {},
            **timestamps(opened.info),
        )

    def metrics(self, step: int) -> Any:
        """Returns the metrics that a step was saved with; None if it has none, or if
        there is no such step."""
        try:
            return self._open(step)[1].metrics
        except StepMissingError:
            return None

    def delete(self, step: int) -> None:
        """Deletes a step; ``run.undelete`` restores it until its purge time.

        Raises:
            StepMissingError: There is no such step.
            PreconditionError: It is pinned or has a tag.
        """
        self._steps.delete(step)

    def _arguments(
        self, args: Any, items: Any, keywords: Any, *, for_restore: bool
    ) -> Any:
        """Returns ``args``, or what the deprecated arguments stand for."""
        if items is None and keywords is None:
            return args
        if args is not None:
            raise InvalidRequestError(
                "items=: expected none with args=, got both; use args="
            )
        return items_arguments(items, keywords, self._handlers, for_restore=for_restore)

    def _by_name(self, args: Any, what: str) -> dict[str, Any]:
        """Returns arguments by item, and settles whether there is only one."""
        is_composite = isinstance(args, ocp.args.Composite)
        if not isinstance(args, ocp.args.CheckpointArgs) and args is not None:
            raise InvalidRequestError(
                f"{what}=: expected one of ocp.args, got {type(args).__name__}"
            )
        if self._is_default is None:
            self._is_default = not is_composite
        if self._is_default == is_composite and args is not None:
            expected = "one argument" if self._is_default else "a Composite"
            raise InvalidRequestError(
                f"{what}=: expected {expected}, as the steps of this manager have "
                f"{'one item' if self._is_default else 'named items'}, got "
                f"{type(args).__name__}"
            )
        return dict(args.items()) if is_composite else {DEFAULT_ITEM: args}

    def _check_names(self, names: Mapping[str, Any]) -> None:
        if self._names is not None and not self._is_default:
            unknown = sorted(set(names) - self._names - set(self._handlers))
            if unknown:
                raise InvalidRequestError(
                    f"args=: expected items of {sorted(self._names)}, got {unknown}, "
                    "which does not match with any registered handler"
                )

    def _restorable(self, opened: "OpenCheckpoint", record: StepRecord) -> list[str]:
        """Returns the items that can be restored without an argument."""
        names = []
        for name, part in record.parts.items():
            if part.kind == "files" and self._handlers.get(name) is None:
                _log.warning(
                    "%s item %r is not restored: it needs args= or item_handlers=",
                    *(opened.name, name),
                )
                continue
            names.append(name)
        return names


def _unwrap_handlers(checkpointers: Any) -> tuple[Any, bool]:
    """Returns the handlers of deprecated checkpointers, and whether one is async."""
    is_named = isinstance(checkpointers, Mapping)
    given = checkpointers if is_named else {DEFAULT_ITEM: checkpointers}
    for each in given.values():
        if not isinstance(each, ocp.Checkpointer):
            _reject("checkpointers", each, "use item_names= and item_handlers=")
    is_async = any(isinstance(each, ocp.AsyncCheckpointer) for each in given.values())
    handlers = {name: each.handler for name, each in given.items()}
    return handlers if is_named else handlers[DEFAULT_ITEM], is_async


def _handlers(
    names: Sequence[str] | None, handlers: Any
) -> tuple[Mapping[str, Any], bool | None]:
    """Returns handlers by item, and whether steps have only one item; None: unknown."""
    if handlers is None:
        return {}, None if names is None else False
    if isinstance(handlers, Mapping):
        return handlers, False
    if names is not None:
        raise InvalidRequestError(
            "item_handlers=: expected a dict by item with item_names=, got "
            f"{type(handlers).__name__}"
        )
    return {DEFAULT_ITEM: handlers}, True


def _reject(name: str, value: object, advice: str) -> None:
    if value is not None:
        raise InvalidRequestError(
            f"CheckpointManager: {name}=: expected none, got {type(value).__name__}; "
            f"{advice}"
        )
