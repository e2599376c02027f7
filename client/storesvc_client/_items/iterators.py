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
- Shard states, by the number of the shard: ``{"%shards": {"0": STATE, "4": STATE}}``.
  The process with ``shard_options`` p of n takes the shards p, p + n, p + 2n, ...

Usually the processes that saved had taken their shards alike: process q of m has the
shards q, q + m, ... Then a process reads only the values that have a shard of its own,
about m/n of them, instead of all m. It also checks each value that it reads. Every
value is read by some process, which also reads the next one if a shard might be missing
at the end, so that gaps are found by at least one process. If the values are divided
otherwise, all are read.

A state is stored as a value of JSON. The object that gave it gets an equal one back, of
the same types at every place: a tuple stays a tuple, a number a key, an array of NumPy
an array. What JSON lacks is a dict with one key, which begins with ``%``:

- ``{"%tuple": [...]}``
- ``{"%bytes": BASE64}``
- ``{"%array": [DTYPE, SHAPE, BASE64]}``, an array of NumPy; a number of NumPy has null
  as its shape
- ``{"%dict": [[KEY, VALUE], ...]}``, a dict with integers as keys, or with a text that
  begins with ``%``

>>> to_json({"next_index": 7, "slice": (1, 5)})
{'next_index': 7, 'slice': {'%tuple': [1, 5]}}
>>> from_json({"next_index": 7, "slice": {"%tuple": [1, 5]}})
{'next_index': 7, 'slice': (1, 5)}
"""

import math
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeAlias

SHARDS: Final = "%shards"
"""Only key of shard states."""

ReadValues: TypeAlias = Callable[[Sequence[int]], Sequence[Any]]
"""Returns the values of some processes, in their order."""


class UnfitStateError(ValueError):
    """A state does not fit the object that is to take it."""


def holds_shards(value: Any) -> bool:
    """Returns whether a stored value holds shard states."""
    if type(value) is not dict or value.keys() != {SHARDS}:
        return False
    shards = value[SHARDS]
    return type(shards) is dict and all(map(str.isdecimal, shards))


def read_shards(
    index: int, count: int, saved: int, read: ReadValues, known: Mapping[int, Any]
) -> dict[int, Any]:
    """Reads the states of the shards ``index``, ``index + count``, ...

    Args:
        index: Number of the process that takes them.
        count: Number of processes that take shards.
        saved: Number of processes that saved a value each.
        read: Reads the values of some of these processes, in their order.
        known: Values that were read already, by process.
    """
    values = _Values(saved, read, known)
    values.fetch([0])
    if values.are_striped():
        numbers = range(index, saved * values.stripes, count)
        values.fetch(sorted({number % saved for number in numbers}))
        values.fetch(values.list_unproved())
        if values.are_striped() and (mine := values.states(numbers)):
            return mine
    values.fetch(range(saved))
    every = _join_parts(values.found[process] for process in range(saved))
    mine = {number: every[number] for number in range(index, len(every), count)}
    if not mine:
        raise UnfitStateError(
            f"expected shard_options of at most {len(every)} shards, as many as were "
            f"saved, got {index} of {count}"
        )
    return mine


class _Values:
    """The values of some of the processes that saved."""

    def __init__(self, saved: int, read: ReadValues, known: Mapping[int, Any]) -> None:
        self._saved = saved
        self._read = read
        self.found = {process: _by_number(value) for process, value in known.items()}
        """States by process and shard."""

    @property
    def stripes(self) -> int:
        """Number of shards of process 0, which no other exceeds."""
        return len(self.found[0])

    def are_striped(self) -> bool:
        """Returns whether process q has the shards q, q + m, ..., as far as read."""
        lengths = [len(shards) for _, shards in sorted(self.found.items())]
        return (
            lengths == sorted(lengths, reverse=True)
            and lengths[0] - lengths[-1] <= 1
            and all(
                set(range(process, process + self._saved * len(shards), self._saved))
                == shards.keys()
                for process, shards in self.found.items()
            )
        )

    def fetch(self, processes: Iterable[int]) -> None:
        """Reads the values of the processes that were not read yet."""
        new = [process for process in processes if process not in self.found]
        values = self._read(new) if new else ()
        self.found |= dict(zip(new, map(_by_number, values), strict=True))

    def list_unproved(self) -> list[int]:
        """Returns the processes after those that have one shard less than process 0:
        they must have one less, too, or a shard is missing."""
        return [
            process + 1
            for process, shards in self.found.items()
            if len(shards) < self.stripes and process + 1 < self._saved
        ]

    def states(self, numbers: Iterable[int]) -> dict[int, Any]:
        """Returns the states of some shards, without absent ones."""
        found = ((each, self.found[each % self._saved]) for each in numbers)
        return {number: shards[number] for number, shards in found if number in shards}


def _by_number(value: Any) -> dict[int, Any]:
    if not holds_shards(value):
        raise UnfitStateError("expected shard states of all processes, got others")
    return {int(text): state for text, state in value[SHARDS].items()}


def _join_parts(parts: Iterable[Mapping[int, Any]]) -> list[Any]:
    """Returns the states of all shards, by their numbers."""
    found: dict[int, Any] = {}
    for number, state in chain.from_iterable(part.items() for part in parts):
        if found.setdefault(number, state) != state:
            raise UnfitStateError(
                f"expected one state of shard {number}, got different ones from two "
                "processes"
            )
    if found.keys() != set(range(len(found))):
        raise UnfitStateError(
            f"expected the states of the shards 0 to {max(found)}, got {len(found)}"
        )
    return [found[shard] for shard in range(len(found))]


_ARRAY_KINDS: Final = frozenset("biufc")
"""Kinds of dtypes whose bytes are their values: bool, integers and floats."""

MAX_STATE_DEPTH: Final = 50
"""Maximum number of lists, tuples and dicts within each other; in JSON they are four
times as many at most."""


def to_json(state: Any, where: str = "", depth: int = 0) -> Any:
    """Returns a state as a value of JSON.

    Args:
        state: None, a ``bool``, ``int``, finite ``float``, ``str``, ``bytes``, an array
            or a number of NumPy, or lists, tuples and dicts of these, with texts or
            integers as keys.
        where: Place of the value in the state, for messages.
        depth: Number of lists, tuples and dicts around it.
    """
    kind = type(state)
    if state is None or kind in (bool, int, str):
        return state
    if kind is float:
        if not math.isfinite(state):
            raise ValueError(f"{at(where)}expected a finite number, got {state}")
        return state
    if kind is bytes:
        return {"%bytes": b64encode(state).decode()}
    if kind not in (list, tuple, dict):
        return {"%array": _encode_array(state, where)}
    if depth == MAX_STATE_DEPTH:
        raise ValueError(
            f"expected at most {MAX_STATE_DEPTH} lists and dicts within each other, "
            f"got more at {where[:40]}..."
        )
    if kind is dict:
        return _encode_dict(state, where, depth + 1)
    values = [to_json(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(state)]
    return values if kind is list else {"%tuple": values}


def from_json(value: Any) -> Any:
    """Returns the state that ``to_json`` returned as this value."""
    if type(value) is list:
        return [from_json(each) for each in value]
    if type(value) is not dict:
        return value
    tag = next(iter(value), "")
    if not tag.startswith("%"):
        return {key: from_json(each) for key, each in value.items()}
    content = value[tag]
    try:
        match tag:
            case "%tuple":
                return tuple(from_json(each) for each in content)
            case "%bytes":
                return b64decode(content, validate=True)
            case "%dict":
                return {key: from_json(each) for key, each in content}
            case "%array":
                return _to_array(*content)
            case _:
                raise ValueError("the writer of the checkpoint is of a newer release")
    except (TypeError, ValueError) as e:
        raise ValueError(f"expected what {tag!r} holds in a state: {e}") from e


def at(where: str) -> str:
    """Returns the beginning of a message about a place in a value."""
    return f"at {where}: " if where else ""


def type_name(kind: type) -> str:
    name = kind.__qualname__
    return name if kind.__module__ == "builtins" else f"{kind.__module__}.{name}"


def _encode_dict(state: dict[Any, Any], where: str, depth: int) -> dict[str, Any]:
    is_plain = True
    for key in state:
        if type(key) is str:
            is_plain = is_plain and not key.startswith("%")
        elif type(key) is int:
            is_plain = False
        else:
            raise ValueError(
                f"{at(where)}expected texts or integers as keys, got {key!r}"
            )
    pairs = [[k, to_json(v, f"{where}[{k!r}]", depth)] for k, v in state.items()]
    return dict(pairs) if is_plain else {"%dict": pairs}


def _encode_array(state: Any, where: str) -> list[Any]:
    kind = type(state)
    is_number = any(base.__qualname__ == "generic" for base in kind.__mro__)
    if kind.__module__ == "numpy" and (kind.__qualname__ == "ndarray" or is_number):
        dtype = state.dtype
        if dtype.kind in _ARRAY_KINDS:
            text = b64encode(state.tobytes()).decode()
            return [dtype.str, None if is_number else list(state.shape), text]
        raise ValueError(f"{at(where)}expected an array of numbers, got {dtype}")
    raise ValueError(
        f"{at(where)}expected a value of JSON, a tuple, bytes or an array of NumPy, "
        f"got {type_name(kind)}"
    )


def _to_array(dtype: str, shape: list[int] | None, text: str) -> Any:
    import numpy as np

    found = np.frombuffer(b64decode(text, validate=True), np.dtype(dtype))
    return found[0] if shape is None else found.reshape(shape).copy()


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
    return _shard_methods(owner) is not None or _methods(owner) is not None


def take_state(owner: Any) -> State | None:
    """Returns the present state of an object; None if it has no state."""
    shards, shard_methods = None, _shard_methods(owner)
    if shard_methods is not None:
        with suppress(NotImplementedError):  # Grain's ElasticIterator of a MapDataset
            shards = shard_methods.get()
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
    """Gives an object a state that was saved for this process, or for all."""
    name = type_name(type(owner))
    methods = _methods(owner)
    if methods is None:
        raise UnfitStateError(f"expected shard states, as {name} has, got others")
    state = value if type(value) in (str, bytes) else _decode_value(value)
    own = dict if methods.is_dict else type(methods.get())
    if own is not type(state) and type(None) not in (own, type(state)):
        raise UnfitStateError(
            f"expected a state of type {own.__name__}, as {name} has, got "
            f"{type(state).__name__}; restore it into an object of the class that was "
            "saved"
        )
    _set(owner, methods.set, state)


def shard_part(owner: Any) -> tuple[int, int]:
    """Returns the shards that an object takes: index and count of ``shard_options``."""
    if _shard_methods(owner) is None:
        raise UnfitStateError(
            "expected an object with set_shard_states, because shard states were "
            f"saved, got {type_name(type(owner))}"
        )
    options = owner.shard_options
    return options.shard_index, options.shard_count


def give_shards(owner: Any, shards: Mapping[int, Any]) -> None:
    """Gives an object the stored states of the shards that it takes.

    Raises:
        UnfitStateError: The object rejects them.
    """
    states = {number: _decode_value(state) for number, state in shards.items()}
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


def _decode_value(value: Any) -> Any:
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
