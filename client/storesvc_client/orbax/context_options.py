"""Options of Orbax's ``Context``, version 1: followed, logged, or rejected by name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

from orbax.checkpoint import multihost

from storesvc_client.errors import InvalidRequestError
from storesvc_client.orbax.ignored_options import IgnoredOptions
from storesvc_client.orbax.save_options import check_processes

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

    Raises:
        InvalidRequestError: An option cannot be followed; names it.
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
        yield from _below(group, getattr(context, group, None))


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
