"""Options of handlers and of saves that have no effect in a store, or are rejected.

An option that changes only how files are written is logged, once for each manager. One
that changes what a restore returns is followed, or rejected by name.
"""

import inspect
import logging
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any, Final

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_args import get_registered_args_cls

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
        """Logs the names that were not logged before.

        Args:
            names: The options.
            of: What they belong to.
            why: Why they have no effect.
        """
        new = [name for name in names if (of, name) not in self._known]
        self._known.update((of, name) for name in new)
        if new:
            _log.info(
                "%s: %s: without effect in a store: %s; %s",
                *(self._owner, of, ", ".join(new), why),
            )


def options_of_handler(place: str, handler: Any) -> list[str]:
    """Returns the options of a handler that is never called; [] if it is called.

    Raises:
        InvalidRequestError: It reads or writes other types of leaves than Orbax does.
    """
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
    one of Orbax for the argument of another, as Orbax does.

    Raises:
        InvalidRequestError: The handler does not belong to the argument.
    """
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


def options_of_save(place: str, args: Any) -> list[str]:
    """Returns the options of ``StandardSave`` or ``PyTreeSave`` without an effect.

    Raises:
        InvalidRequestError: An option cannot be followed; names it.
    """
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
        if field.default is MISSING and field.default_factory is MISSING:
            continue
        default = (
            field.default_factory()
            if field.default_factory is not MISSING
            else field.default
        )
        value = getattr(given, field.name)
        if value is not default and (default is None or value != default):
            found.append(field.name)
    return found
