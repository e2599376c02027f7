"""Objects that have a state: data iterators and random generators.

An object has a state if it has one of these pairs of methods; the first one counts:

- ``get_shard_states``, ``set_shard_states``, with ``shard_options``: the
  ``ElasticIterator`` of an ``IterDataset`` in coming releases of Grain
- ``get_state``, ``set_state``: the other iterators of Grain, NumPy's ``RandomState``
- ``state_dict``, ``load_state_dict``: torchdata's ``StatefulDataLoader``, the
  ``IterableDataset`` of datasets
- ``bit_generator.state``: NumPy's ``Generator``

A state is that of one process of a job, for its part of the data. Two kinds of states
fit any number of processes:

- A shared state is equal in all processes. The state of Grain's ``ElasticIterator`` of
  a ``MapDataset`` is one: a position in the order of all examples. So is that of an
  iterator that is saved as ``Replicated``.
- Shard states, by the number of the shard; see ``shard_states``.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from storesvc_client._values.shard_states import SHARDS, UnfitStateError
from storesvc_client._values.state_values import from_json, to_json, type_name

_ELASTIC_KEYS: Final = {"global_next_index"}
"""Keys of the state of Grain's ``ElasticIterator`` of a ``MapDataset``."""


@dataclass(frozen=True, slots=True)
class State:
    """The state of an object."""

    value: Any
    """A text, bytes, or a value of JSON."""
    is_shared: bool
    """True if it is equal in all processes of a job."""


@dataclass(frozen=True, slots=True)
class _Methods:
    """Methods of an object that has a state."""

    get: Callable[[], Any]
    set: Callable[[Any], object]
    is_dict: bool = False
    """True if the state is a dict in any case; else ``get`` shows its type."""


def has_state(owner: object) -> bool:
    """Returns whether an object has a state."""
    return _shard_methods(owner) is not None or _methods(owner) is not None


def take_state(owner: Any) -> State | None:
    """Returns the present state of an object; None if it has no state.

    Raises:
        ValueError: The state cannot be kept; the message says where in it.
    """
    shards = _shard_states(owner)
    methods = _methods(owner) if shards is None else None
    if shards is None and methods is None:
        return None
    state = shards if methods is None else methods.get()
    if type(state) in (str, bytes):
        return State(state, is_shared=False)
    try:
        if methods is None:
            return State({SHARDS: _by_text(state)}, is_shared=False)
        return State(to_json(state), is_shared=_is_elastic(owner, state))
    except ValueError as e:
        raise ValueError(f"state of {type_name(type(owner))}: {e}") from e


def give_state(owner: Any, value: Any) -> None:
    """Gives an object a state that was saved for this process, or for all.

    Args:
        owner: Object that has a state.
        value: Value of the item.

    Raises:
        UnfitStateError: It is the state of an object of another class.
    """
    name = type_name(type(owner))
    methods = _methods(owner)
    if methods is None:
        raise UnfitStateError(f"expected shard states, as {name} has, got others")
    state = value if type(value) in (str, bytes) else _decoded(value)
    own = dict if methods.is_dict else type(methods.get())
    if own is not type(state) and type(None) not in (own, type(state)):
        raise UnfitStateError(
            f"expected a state of type {own.__name__}, as {name} has, got "
            f"{type(state).__name__}; restore it into an object of the class that was "
            "saved"
        )
    _set(owner, methods.set, state)


def shard_part(owner: Any) -> tuple[int, int]:
    """Returns which shards an object takes: index and count of its ``shard_options``.

    Raises:
        UnfitStateError: The object takes no shards.
    """
    if _shard_methods(owner) is None:
        raise UnfitStateError(
            "expected an object with set_shard_states, because shard states were "
            f"saved, got {type_name(type(owner))}"
        )
    options = owner.shard_options
    return options.shard_index, options.shard_count


def give_shards(owner: Any, shards: Mapping[int, Any]) -> None:
    """Gives an object the states of its shards.

    Args:
        owner: Object that takes shards.
        shards: Stored states of the shards that it takes, by their numbers.

    Raises:
        UnfitStateError: The object rejects them.
    """
    states = {number: _decoded(state) for number, state in shards.items()}
    _set(owner, owner.set_shard_states, states)


def _methods(owner: Any) -> _Methods | None:
    """Returns the methods for the whole state of an object."""
    if isinstance(owner, type):
        return None
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(owner, numpy.random.Generator):
        bits = owner.bit_generator
        return _Methods(
            lambda: bits.state,
            lambda state: setattr(bits, "state", state),
            is_dict=True,
        )
    return _pair(owner, "get_state", "set_state") or _pair(
        owner, "state_dict", "load_state_dict"
    )


def _shard_methods(owner: Any) -> _Methods | None:
    """Returns the methods for the shard states of an object."""
    # Without shard_options, as in interleaved iterators of Grain, they have no numbers.
    if not hasattr(owner, "shard_options") or isinstance(owner, type):
        return None
    return _pair(owner, "get_shard_states", "set_shard_states")


def _pair(owner: Any, getter: str, setter: str) -> _Methods | None:
    get, set_ = getattr(owner, getter, None), getattr(owner, setter, None)
    if callable(get) and callable(set_):
        return _Methods(get, set_, is_dict=getter != "get_state")
    return None


def _shard_states(owner: Any) -> Any:
    """Returns the shard states of an object; None if it has none."""
    methods = _shard_methods(owner)
    try:
        return None if methods is None else methods.get()
    except NotImplementedError:  # Grain's ElasticIterator of a MapDataset
        return None


def _by_text(shards: Any) -> dict[str, Any]:
    """Returns shard states with texts as keys."""
    if type(shards) is not dict or any(type(each) is not int for each in shards):
        raise ValueError(
            "expected shard states as a dict by the number of the shard, got "
            f"{type_name(type(shards))}"
        )
    return {str(shard): to_json(state, f"[{shard}]") for shard, state in shards.items()}


def _is_elastic(owner: Any, state: Any) -> bool:
    """Returns whether a state is that of Grain's ElasticIterator of a MapDataset, or
    of an iterator around it."""
    is_of_grain = type(owner).__module__.partition(".")[0] == "grain"
    return is_of_grain and type(state) is dict and state.keys() == _ELASTIC_KEYS


def _decoded(value: Any) -> Any:
    try:
        return from_json(value)
    except ValueError as e:
        raise UnfitStateError(str(e)) from e


def _set(owner: Any, setter: Callable[[Any], object], state: Any) -> None:
    """Gives an object its state, and begins to prefetch."""
    try:
        setter(state)
        # Grain reads the first batch while the arrays are restored.
        getattr(owner, "start_prefetch", int)()
    except Exception as e:  # code of any library
        raise UnfitStateError(
            f"{type_name(type(owner))} rejects the state: {type(e).__name__}: {e}"
        ) from e
