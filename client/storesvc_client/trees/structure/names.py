"""Table of the names that a stored structure may use, and of their objects.

A name such as ``flax.nnx:Linear`` is looked up in this dictionary and nowhere else. The
dictionary is built from modules that this file imports and from lists in this file;
callers add their own classes and functions. A document never causes an import or an
attribute access.

A function that a document puts into a module is called by that module later. Therefore
functions are listed one by one, and none of them reads or writes files, calls back into
Python, or builds functions from others.

The limits of a document are checked before any other code reads it. Stored data may be
hostile: nested a million levels deep, or a list of a billion items. ``check_json``
walks without recursion and stops at the first limit exceeded. Other code may therefore
recurse, and its cost is a bounded multiple of the bytes read.
"""

import builtins
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.nnx import bridge

from storesvc_client.errors import InvalidRequestError, StructureError

CORRUPT: Final = (
    "the document is corrupt or was not written by this library; use another checkpoint"
)
"""Advice for a document that no encoder of this library writes."""

Place: TypeAlias = object
"""Place in a document; its ``str`` is computed only for a message."""

GIVE_CODE: Final = "give the model's code in model=: its class, or a factory"
"""Advice for a value that no document can hold."""

MAX_WORDS: Final = 200
"""Maximum characters of a text that a document controls."""

_SHOWN: Final = 80


class Within:
    """A place inside another; its text is computed only for a message."""

    __slots__ = ("key", "outer")

    def __init__(self, outer: Place, key: object) -> None:
        self.outer = outer
        self.key = key

    def __str__(self) -> str:
        """Returns the keys from the outermost on, joined by "/"."""
        parts: list[str] = []
        place: Place = self
        while isinstance(place, Within):
            parts.append(str(place.key) if type(place.key) is int else shown(place.key))
            place = place.outer
        return "/".join([str(place), *reversed(parts)])


def structure_error(
    place: Place, expected: str, got: str, advice: str = CORRUPT
) -> StructureError:
    where, what, found = map(printable, (str(place), expected, got))
    return StructureError(f"{where}: expected {what}, got {found}; {advice}")


def printable(text: str) -> str:
    """Returns a document's text for a terminal: ASCII, one line, shortened."""
    half = MAX_WORDS // 2
    if len(text) > MAX_WORDS:
        text = f"{text[:half]}...{text[-half:]}"
    return escape_text(text)


def escape_text(text: str) -> str:
    """Returns a text with control and non-ASCII characters escaped."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c if c.isascii() and c.isprintable() else ascii(c)[1:-1] for c in text
    )


def shown(value: Any) -> str:
    """Returns a short summary of any JSON value; never the full contents."""
    match value:
        case dict():
            keys = ", ".join(shown(key) for key in list(value)[:3])
            return f"an object of {len(value)} entries ({keys})"
        case list():
            return f"a list of {len(value)}"
        case str():
            return ascii(value[:_SHOWN]) + ("..." if len(value) > _SHOWN else "")
        case int() if value.bit_length() > 64:
            return f"a number of {value.bit_length()} bits"
        case None | bool() | int() | float():
            return repr(value)
        case _:
            return f"a {type(value).__name__}"


JSON: TypeAlias = Any
"""None, bool, int, float, str, or a list or str-keyed dict of these."""

MAX_DEPTH: Final = 192
"""Maximum nesting of lists and objects. One level of modules takes three."""

MAX_LEVELS: Final = 40
"""Maximum nesting of modules and containers. With the maximum of a static attribute, it
stays below ``MAX_DEPTH``: every document that is written can be read."""

MAX_NESTED: Final = 12
"""Maximum nesting of values and descriptions in a static attribute."""

MAX_VALUES: Final = 20_000_000
"""Maximum values of one document. A module of 100,000 small layers needs a third."""

MAX_BITS: Final = 64
"""Maximum bits of one integer. Longer ones are slow to print, and as keys of a dict
they can be chosen to have one hash."""

MAX_COMPOUND_KEYS: Final = 100
"""Maximum keys of one dict, or items of one set, that are tuples or other compound
values; their hashes can be chosen to collide, too."""

MAX_KEY_PARTS: Final = 16
"""Maximum values in one compound key, which is hashed at each lookup."""

MAX_NAME: Final = 1000
"""Maximum characters of a key; messages and paths repeat it."""


def check_json(document: JSON, place: Place) -> None:
    """Returns if a document is JSON within the limits."""
    level: list[Any] = [document]
    count = 0
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        count += len(level)
        if count > MAX_VALUES:
            raise structure_error(place, f"at most {MAX_VALUES} values", "more")
        for value in level:
            if type(value) is list:
                deeper.extend(value)
            elif type(value) is dict:
                _check_keys(value, place)
                deeper.extend(value.values())
            else:
                _check_scalar(value, place)
            if len(deeper) > MAX_VALUES:
                raise structure_error(place, f"at most {MAX_VALUES} values", "more")
        if not deeper:
            return
        level = deeper
    raise structure_error(place, f"at most {MAX_DEPTH} levels of nesting", "more")


def _check_keys(value: dict[Any, Any], place: Place) -> None:
    for key in value:
        if type(key) is not str:
            raise structure_error(place, "strings as keys of JSON objects", shown(key))
        if len(key) > MAX_NAME:
            raise structure_error(
                place, f"keys of at most {MAX_NAME} characters", shown(key)
            )


def _check_scalar(value: Any, place: Place) -> None:
    if type(value) is int:
        if value.bit_length() > MAX_BITS:
            raise structure_error(
                place, f"numbers of at most {MAX_BITS} bits", shown(value)
            )
    elif value is not None and type(value) not in (str, float, bool):
        raise structure_error(place, "JSON", shown(value))


def iterate_objects(document: JSON) -> Iterator[dict[str, JSON]]:
    """Yields each object of a document, in no particular order."""
    left = [document]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
            left += value.values()
        elif isinstance(value, list):
            left += value


Allowed: TypeAlias = Iterable[Any] | Mapping[str, Any]
"""Classes and functions of the caller, or a mapping from document names to them."""

_ACTIVATIONS: Final = """
    celu dot_product_attention elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh
    identity leaky_relu log1mexp log_sigmoid log_softmax logmeanexp logsumexp mish
    one_hot relu relu6 selu sigmoid silu soft_sign softmax softplus sparse_plus
    sparse_sigmoid squareplus standardize swish tanh
"""
_INITIALIZERS: Final = "ones zeros"
_NUMPY: Final = """
    abs absolute add arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin
    average ceil clip concatenate conj cos cosh cumprod cumsum divide dot einsum equal
    exp exp2 expand_dims expm1 floor greater hypot less log log10 log1p log2 logaddexp
    matmul max maximum mean median min minimum mod moveaxis multiply nan_to_num negative
    outer positive power prod ravel reciprocal reshape roll round sign sin sinc sinh
    split sqrt square squeeze stack std subtract sum swapaxes take tan tanh tensordot
    transpose tril triu true_divide var vdot where
"""
_LAX: Final = """
    abs add all_gather all_to_all batch_matmul clamp concatenate conv
    conv_general_dilated conv_transpose conv_with_general_padding cos cumsum div dot
    dot_general erf exp exp2 expand_dims log log1p logistic max min mul neg pmax pmean
    pmin pow ppermute psum psum_scatter ragged_dot reciprocal reduce_max reduce_min
    reduce_sum reshape rsqrt select sin sqrt square stop_gradient sub tanh transpose
"""
_NNX: Final = """
    combine_masks dot_product_attention make_attention_mask make_causal_mask
"""
_LINEN: Final = """
    avg_pool combine_masks dot_product_attention dot_product_attention_weights
    make_attention_mask make_causal_mask max_pool min_pool
"""
_PLAIN_CLASSES: Final = """
    bool bytes complex dict float frozenset int list set str tuple
"""
_NNX_CLASSES: Final = "Carry State StateAxes"
_ENUMS: Final = """
    AccuracyMode ConvDimensionNumbers DotAlgorithm DotAlgorithmPreset FftType
    GatherScatterMode Precision RandomAlgorithm RoundingMethod
"""


def _list_names(prefix: str, module: types.ModuleType, listed: str) -> dict[str, Any]:
    """Returns the listed names that a module has, with their objects."""
    return {
        f"{prefix}:{name}": getattr(module, name)
        for name in listed.split()
        if hasattr(module, name)  # differs between releases
    }


def _subclasses(
    prefix: str, module: types.ModuleType, *bases: type
) -> dict[str, type[Any]]:
    """Returns the classes in a module's namespace that derive from one of the bases."""
    return {
        f"{prefix}:{name}": value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, bases)
    }


def _default(function: Callable[..., Any], parameter: str) -> Any:
    """Returns a function that flax exposes only as a parameter's default."""
    return (function.__kwdefaults__ or {}).get(parameter)


def _built_in() -> dict[str, Any]:
    tuples = _subclasses("optax", optax, tuple)
    table: dict[str, Any] = {
        **_list_names("jax.nn", jax.nn, _ACTIVATIONS),
        **_list_names("jax.nn.initializers", jax.nn.initializers, _INITIALIZERS),
        **_list_names("jax.numpy", jnp, _NUMPY),
        **_list_names("jax.lax", jax.lax, _LAX),
        **_list_names("jax.lax", jax.lax, _ENUMS),
        **_list_names("flax.nnx", nnx, _NNX),
        **_list_names("flax.linen", nn, _LINEN),
        **_list_names("flax.nnx", nnx, _NNX_CLASSES),
        **_list_names("builtins", builtins, _PLAIN_CLASSES),
        **_subclasses("flax.nnx", nnx, nnx.Pytree, nnx.Variable),
        **_subclasses("flax.nnx.metrics", nnx.metrics, nnx.Pytree, nnx.Variable),
        **_subclasses("flax.nnx.bridge", bridge, nnx.Pytree, nnx.Variable),
        **_subclasses("flax.linen", nn, nn.Module),
        **{name: cls for name, cls in tuples.items() if hasattr(cls, "_fields")},
        "builtins:NoneType": type(None),
        "jax.sharding:AxisType": jax.sharding.AxisType,
        "flax.nnx:promote_dtype": _default(nnx.Linear.__init__, "promote_dtype"),
        "flax.nnx:concatenate_last": _default(nnx.Bidirectional.__init__, "merge_fn"),
    }
    return {name: value for name, value in table.items() if value is not None}


BUILT_IN: Final[Mapping[str, Any]] = types.MappingProxyType(_built_in())
"""Objects that every document may name."""

_NAMES: Final[Mapping[int, str]] = types.MappingProxyType(
    {id(value): name for name, value in reversed(tuple(BUILT_IN.items()))}
)
"""First name of each object, by id; the table keeps the objects alive."""


def qualified_name(value: Any) -> str | None:
    """Returns the name of a class or function, or None if it has none.

    A function's ``__qualname__`` is not sufficient, because a wrapper often copies the
    name of the wrapped function: the name must resolve to the function itself.
    """
    if found := _NAMES.get(id(value)):
        return found
    name = _own_name(value)
    if name is None or isinstance(value, type):
        return name
    module, _, qualname = name.partition(":")
    home: Any = sys.modules.get(module)
    for part in qualname.split("."):
        home = getattr(home, "__dict__", {}).get(part)
    return name if home is value else None


class Table:
    """The names that one call may use."""

    def __init__(self, allow: Allowed) -> None:
        self._objects = {**BUILT_IN, **_name_allowed(allow)}

    def find_class(self, name: Any, place: Place, base: type, what: str) -> type[Any]:
        """Returns a class below `base`; the message of another one says `what` was
        expected."""
        found = self._object(name, place, what)
        if not isinstance(found, type) or not issubclass(found, base):
            raise structure_error(place, what, f"{shown(name)}, which is not one")
        return found

    def named_tuple(self, name: Any, place: Place) -> type[Any]:
        """Returns a NamedTuple class; raises like ``find_class``."""
        found = self.find_class(name, place, tuple, "a NamedTuple class")
        if not isinstance(getattr(found, "_fields", None), tuple):
            raise structure_error(place, "a NamedTuple class", shown(name))
        return found

    def function(self, name: Any, place: Place) -> Callable[..., Any]:
        """Returns a function; raises like ``find_class``."""
        found = self._object(name, place, "a function")
        if isinstance(found, type) or not callable(found):
            raise structure_error(
                place, "a function", f"{shown(name)}, which is not one"
            )
        return found  # type: ignore[no-any-return]  # callable() narrows Any to Any

    def _object(self, name: Any, place: Place, what: str) -> Any:
        if type(name) is not str:
            raise structure_error(place, f"the name of {what}", shown(name))
        if name not in self._objects:
            advice = f"if it is yours, pass it in allow=; or {GIVE_CODE}"
            raise structure_error(place, f"{what} that is allowed", shown(name), advice)
        return self._objects[name]


def _name_allowed(allow: Allowed) -> dict[str, Any]:
    if isinstance(allow, Mapping):  # its keys are the names in documents
        given = dict(allow)
    else:
        if isinstance(allow, (type, str)) or not isinstance(allow, Iterable):
            got = f"a {type(allow).__name__}"
            if isinstance(allow, type):
                got = allow.__name__
            raise InvalidRequestError(
                f"allow: expected a list of classes and functions, got {got}"
            )
        given = _by_own_name(allow)
    for name, value in given.items():
        if not callable(value) or not isinstance(name, str):
            raise _unnamed_error(value)
    return given


def _by_own_name(allow: Iterable[Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for value in allow:
        name = _own_name(value)
        if name is None:
            raise _unnamed_error(value)
        if given.setdefault(name, value) is not value:
            raise InvalidRequestError(
                f"allow: expected one object named {name}, got two; pass "
                f"{{{name!r}: the intended one}}"
            )
        if BUILT_IN.get(name, value) is not value:
            raise InvalidRequestError(
                f"allow: expected {name} to be the library's own, got another object "
                f"of that name; pass {{{name!r}: it}} to replace the library's"
            )
    return given


def _own_name(value: Any) -> str | None:
    module = getattr(value, "__module__", None)
    qualname = getattr(value, "__qualname__", None)
    named = isinstance(module, str) and isinstance(qualname, str)
    return f"{module}:{qualname}" if named else None


def _unnamed_error(value: Any) -> InvalidRequestError:
    return InvalidRequestError(
        f"allow: expected classes and functions that have a name, got {value!r}; "
        "pass it as {'module:name': it}"
    )
