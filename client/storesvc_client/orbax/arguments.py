"""Translates Orbax's ``CheckpointArgs`` to what a step holds, and back.

Trees and JSON values are stored as such; every other argument belongs to a handler,
which writes files.
"""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jax
import orbax.checkpoint as ocp
from etils import epath

from storesvc_client._values.item_values import encode_item
from storesvc_client.errors import InvalidRequestError
from storesvc_client.orbax.ignored_options import (
    IgnoredOptions,
    check_handler,
    options_of_save,
)
from storesvc_client.orbax.step_items import (
    Content,
    FilesContent,
    JsonContent,
    TreeContent,
    restore_files,
)
from storesvc_client.orbax.step_record import Part
from storesvc_client.orbax.tree_metadata import plain_tree
from storesvc_client.orbax.tree_restore import restore_tree

if TYPE_CHECKING:
    from storesvc_client._restore.checkpoint import OpenCheckpoint

_REFUSED: Final = {
    ocp.args.ArraySave: "use StandardSave({'name': array})",
    ocp.args.ArrayRestore: "use StandardRestore({'name': array})",
}
_TREES_OF_SAVES: Final = (ocp.args.StandardSave, ocp.args.PyTreeSave)
"""A class below them belongs to a handler of the caller."""

_NO_TREE: Final = "expected a pytree with containers, got {}; use a dict of it"


def content_of(place: str, args: Any, handler: Any, ignored: IgnoredOptions) -> Content:
    """Returns the content that an argument of a save describes.

    Args:
        place: Name of the item, for messages.
        args: The argument.
        handler: Handler of the item, if one was given to the manager.
        ignored: Logs options without an effect.

    Raises:
        InvalidRequestError: The argument has no equal; says what to use.
    """
    match args:
        case _ if type(args) in _TREES_OF_SAVES:
            check_handler(place, args, handler)
            names = options_of_save(place, args)
            ignored.log(names, of=type(args).__name__, why="it has a format of its own")
            if jax.tree_util.treedef_is_leaf(jax.tree.structure(args.item)):
                got = type(args.item).__name__
                raise InvalidRequestError(f"{place}: {_NO_TREE.format(got)}")
            return TreeContent(
                _cast(place, args.item, args.save_args),
                custom_metadata=_json(place, args.custom_metadata),
            )
        case ocp.args.JsonSave():
            check_handler(place, args, handler)
            return JsonContent(args.item)
        case _:
            used = _handler_of(place, args, handler)
            return FilesContent(_writer(used, args))


def restored_part(
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
        given = _default_arguments(handler) if args is None else args
        used = _handler_of(place, given, handler)
        return restore_files(opened, name, part, _reader(used, given))
    check_handler(place, args, handler)
    match args:
        case None:
            pass
        case ocp.args.StandardRestore() | ocp.args.PyTreeRestore():
            _check_kind(place, part, "tree", args)
            return _restore_target(opened, place, part, args)
        case ocp.args.JsonRestore():
            _check_kind(place, part, "json", args)
        case _:
            raise _other_kind(place, part, args)
    if part.kind == "json":
        return opened.items[part.place]
    return restore_tree(opened, part.place)


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
        given = jax.tree.map(_any_if_number, target)
    partial = bool(getattr(args, "partial_restore", False))
    return restore_tree(opened, part.place, target, given, partial=partial)


def _any_if_number(leaf: Any) -> Any:
    """Returns what restores a leaf as it was saved for a number, which stands for any
    leaf in the item of ``PyTreeRestore``."""
    return ocp.RestoreArgs() if isinstance(leaf, int | float | complex) else leaf


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


def _handler_of(place: str, args: Any, handler: Any) -> Any:
    """Returns the handler that was given, or a new one of the registered class."""
    if type(args) in _REFUSED:
        raise InvalidRequestError(
            f"{place}: expected another argument than {type(args).__name__}; "
            f"{_REFUSED[type(args)]}"
        )
    if handler is not None:
        return handler
    from orbax.checkpoint.checkpoint_args import get_registered_handler_cls

    try:
        return get_registered_handler_cls(args)()
    except (ValueError, TypeError) as e:
        raise InvalidRequestError(
            f"{place}: expected an argument whose handler is registered, got "
            f"{type(args).__name__}: {e}"
        ) from e


def _default_arguments(handler: Any) -> Any:
    from orbax.checkpoint.checkpoint_args import get_registered_args_cls

    try:
        return get_registered_args_cls(handler)[1]()
    except (ValueError, TypeError) as e:
        raise InvalidRequestError(
            f"expected the argument of a restore for {type(handler).__name__}, got "
            f"none: {e}"
        ) from e


def _writer(handler: Any, args: Any) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        handler.save(epath.Path(folder), args=args)
        handler.finalize(epath.Path(folder))

    return write


def _reader(handler: Any, args: Any) -> Callable[[Path], Any]:
    return lambda folder: handler.restore(epath.Path(folder), args=args)


def _check_kind(place: str, part: Part, kind: str, args: Any) -> None:
    if part.kind != kind:
        raise _other_kind(place, part, args)


def _other_kind(place: str, part: Part, args: Any) -> InvalidRequestError:
    return InvalidRequestError(
        f"{place}: expected the argument of a restore of its kind, {part.kind}, got "
        f"{type(args).__name__}"
    )
