"""Items of a training loop's checkpoints: the data iterator and other values.

All that the loop knows of ``Run.save(items=)`` and ``Run.items`` is in this module.
"""

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from storesvc_client.errors import InvalidRequestError

if TYPE_CHECKING:
    from storesvc_client._api.run import Run

DATA: Final = "data"
"""Name of the item with the state of the data iterator."""


def save_options(run: "Run", items: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the options of a save with items.

    Raises:
        InvalidRequestError: This release saves no items.
    """
    if items is None:
        return {}
    if "items" not in inspect.signature(run.save).parameters:
        raise _unsupported(run, "items=")
    return {"items": items}


def check_data(run: "Run", data: object) -> None:
    """Checks ``data=`` before anything is restored.

    Raises:
        InvalidRequestError: This release restores no items, or the object takes no
            state.
    """
    if data is None:
        return
    if not hasattr(run, "items"):
        raise _unsupported(run, "data=")
    if _setter(data) is None:
        raise InvalidRequestError(
            f"loop of {run.name}: data=: expected an object with set_state or "
            f"load_state_dict, got {type(data).__name__}"
        )


def restore_data(run: "Run", step: int, data: object) -> None:
    """Gives a data iterator the state that was saved with a step.

    Raises:
        NotFoundError: The checkpoint has no such item.
    """
    if data is not None:
        setter: Any = _setter(data)
        items: Any = run
        setter(items.items(step)[DATA])


def _setter(data: object) -> object:
    for name in ("set_state", "load_state_dict"):
        if hasattr(data, name):
            return getattr(data, name)
    return None


def _unsupported(run: "Run", option: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"loop of {run.name}: {option}: this release saves no items; leave it out"
    )
