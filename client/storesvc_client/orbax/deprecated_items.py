"""Arguments of an item from ``items=`` and its keywords, which Orbax deprecates.

As in Orbax they are taken for items whose handler the manager was created with: the
handler is registered with the class of argument that they belong to.
"""

from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_args import get_registered_args_cls

from storesvc_client.errors import InvalidRequestError
from storesvc_client.orbax.step_record import DEFAULT_ITEM


def arguments_of_items(
    items: Any, keywords: Any, handlers: Mapping[str, Any], *, for_restore: bool
) -> Any:
    """Returns the argument that deprecated arguments stand for.

    Args:
        items: The only item, or items by name; None: none.
        keywords: Keywords of its argument, or of their arguments by name; None: none.
        handlers: Handlers of the manager, by item.
        for_restore: Whether it is the argument of a restore.

    Raises:
        InvalidRequestError: An item has no handler; says what to use.
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
