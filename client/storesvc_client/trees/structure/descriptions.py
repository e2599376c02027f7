"""Describes values that a document cannot hold: closures, instances, meshes.

Descriptions are for comparisons and messages, and are never decoded. A description is
equal for two builds of one model in another process, on another mesh, with another seed
or without arrays: it has names of classes and functions, the variables that a function
closes over, and the fields of an object. It has no addresses and nothing about the
mesh.

All lambdas in one function have the same name. Their code distinguishes them: its
names, constants and operators, in order. Bytecode would depend on the release of
Python.

Without its content, an object would equal any other object of its class. Cached
attributes are not settings and are excluded.
"""

import collections
import copy
import dataclasses
import decimal
import dis
import fractions
import functools
import hashlib
import inspect
import json
import operator
import os
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any, Final, TypeAlias

import jax
import numpy as np
from flax import nnx

from storesvc.format.dtypes import DTYPES
from storesvc_client.trees.structure.names import JSON
from storesvc_client.trees.structure.plain import NOT_PLAIN, encode_plain

_VALUE: Final = "(value)"
"""Key that cannot be an attribute name."""

_MAX_TEXT: Final = 1000
"""Maximum characters of one text; a longer one is replaced by a digest."""

_FAILURES: Final = (TypeError, ValueError, LookupError, AttributeError, RuntimeError)
"""Errors of methods of the caller's objects."""

_MAX_PLAIN: Final = 100_000
"""Maximum values that go into a digest."""


def _dict_items(value: dict[Any, Any]) -> Any:
    """Returns a dict subclass as a dict, and a dict that is too large as pairs."""
    pairs = dict.items(value)
    return list(pairs) if type(value) is dict else dict(pairs)


_BY_BASE: Final[tuple[tuple[Any, Callable[[Any], Any]], ...]] = (
    (types.ModuleType, lambda value: value.__name__),
    (re.Pattern, lambda value: (value.pattern, value.flags)),
    (slice, lambda value: (value.start, value.stop, value.step)),
    ((range, complex, decimal.Decimal, fractions.Fraction), repr),
    (os.PathLike, os.fspath),
    (
        (operator.itemgetter, operator.attrgetter, operator.methodcaller),
        lambda value: value.__reduce__()[1],
    ),
    ((bytearray, memoryview), bytes),
    (collections.deque, lambda value: (list(value), value.maxlen)),
    (
        collections.defaultdict,
        lambda value: (dict(dict.items(value)), value.default_factory),
    ),
    (types.MappingProxyType, dict),
    (dict, _dict_items),
    (list, lambda value: list(list.__iter__(value))),
    (tuple, lambda value: list(tuple.__iter__(value))),
    ((set, frozenset), lambda value: sorted(value, key=repr)),
    (str, str.__str__),
    (bytes, lambda value: bytes.__getitem__(value, slice(None))),
    (int, lambda value: bound_text(hex(int.__index__(value)))),
    (float, float.__float__),
)
"""Functions that return the content of objects, by base class."""


def list_fields(value: Any) -> Mapping[str, Any]:
    """Returns the content of an object by name; empty if it exposes none."""
    found = _settings(value)
    if found is not None:
        return found
    if isinstance(value, (types.ModuleType, os.PathLike)):  # the rest is a cache
        return _content(value)
    fields = {**_content(value), **_attributes(value)}
    return fields or _words(value)


def is_cached(cls: type[Any], name: str) -> bool:
    """Returns whether an attribute of a class is a cached property."""
    return isinstance(
        inspect.getattr_static(cls, name, None), functools.cached_property
    )


def list_slots(cls: type[Any], value: Any = None) -> list[str]:
    """Returns the names of a class's slots; with an object, only the slots that are
    set."""
    return [
        name
        for base in cls.__mro__
        for name, descriptor in vars(base).items()
        if isinstance(descriptor, types.MemberDescriptorType)
        and "__slots__" in vars(base)
        and (value is None or hasattr(value, name))
    ]


def bound_text(text: str) -> str:
    """Returns a text, or its length and digest if it is long."""
    if len(text) <= _MAX_TEXT:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{len(text)} characters of digest {digest}"


def digest_value(value: Any) -> str | None:
    """Returns a digest of plain data, or None for other or very large values."""
    left = _MAX_PLAIN

    def encode(part: Any) -> JSON:
        nonlocal left
        left -= 1
        encoded = NOT_PLAIN if left < 0 else encode_plain(part, encode)
        if encoded is NOT_PLAIN:
            raise ValueError("not plain data")
        return encoded

    try:
        text = json.dumps(encode(value), sort_keys=True)
    except (ValueError, RecursionError):
        return None
    return hashlib.sha256(text.encode()).hexdigest()


def _content(value: Any) -> dict[str, Any]:
    for base, content in _BY_BASE:
        if isinstance(value, base):
            return {_VALUE: content(value)}
    return {}


def _attributes(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    found: dict[str, Any] = {}
    cls = type(value)
    found |= {name: getattr(value, name) for name in list_slots(cls, value)}
    own = getattr(value, "__dict__", None)
    if isinstance(own, Mapping):
        # A cached property is set only after its first use, so it is no setting.
        found |= {str(name): own[name] for name in own if not is_cached(cls, str(name))}
    return found


def _words(value: Any) -> dict[str, Any]:
    """Returns the repr of an object without attributes, unless it has an address."""
    if hasattr(value, "__dict__"):
        return {}
    try:
        text = repr(value)
    except _FAILURES:
        return {}
    return {} if "0x" in text else {_VALUE: bound_text(text)}


def _settings(value: Any) -> Mapping[str, Any] | None:
    """Returns the settings of a configuration's ``to_dict``, if it has one."""
    to_dict = getattr(value, "to_dict", None)
    if not isinstance(to_dict, types.MethodType):
        return None
    try:
        found = to_dict()
    except _FAILURES:
        found = _settings_of_part(value)
    return found if isinstance(found, Mapping) else None


def _settings_of_part(value: Any) -> Mapping[str, Any] | None:
    """Returns the settings of a configuration of which some attributes cannot be
    copied, such as an open file: ``to_dict`` copies them in many configurations."""
    left: dict[str, Any] = {}
    try:
        part = copy.copy(value)
        for name, attribute in vars(value).items():
            if not isinstance(attribute, PLACES) and not _is_copyable(attribute):
                left[name] = attribute
                del part.__dict__[name]
        return {**part.to_dict(), **left} if left else None
    except _FAILURES:
        return None  # it needs arguments, or attributes that are missing


def _is_copyable(value: Any) -> bool:
    try:
        copy.deepcopy(value)
    except _FAILURES:
        return False
    return True


TOPOLOGY: Final = frozenset(
    {
        *("mesh", "_mesh", "stored_mesh", "_stored_mesh", "auto_expert_mesh"),
        *("expert_mesh", "expert_abstract_mesh", "explicit_mesh", "manual_mesh"),
        *("sharding_axis_dims", "sharding_axis_names", "sharding_dcn_axis_dims"),
    }
)
"""Attributes and settings that select where a model runs."""

VOLATILE: Final = frozenset(
    {
        *("transformers_version", "easydel_version", "_name_or_path"),
        *("name_or_path", "_commit_hash", "_esurge_cache_scope_key"),
    }
)
"""Settings that record the software and path that wrote them."""

IGNORED: Final = TOPOLOGY | VOLATILE

EXECUTION: Final = frozenset(
    {
        *("backend", "platform", "easy_method", "hardware_abstraction"),
        *("attn_mechanism", "decode_attn_mechanism", "mla_attn_mechanism"),
        *("blocksize_q", "blocksize_k", "blocksize_b", "lmhead_chunksize"),
        *("gradient_checkpointing", "gradient_checkpointing_targets"),
        *("scan_ring_attention", "scan_attention_layers", "precompute_masks"),
        *("use_scan_mlp", "scan_mlp_chunk_size", "use_sharding_constraint"),
        *("use_sharded_kv_caching", "flash_attention_backward_pass_impl"),
        *("sequence_axis_name", "kv_cache_sharding_sequence_axis_name"),
        *("partition_axis", "operation_configs", "moe_method", "moe_force_xla_gmm"),
        *("moe_tiling_size_batch", "moe_tiling_size_seqlen", "moe_tiling_size_dim"),
        *("pallas_m_block_size", "pallas_k_block_size", "pallas_n_block_size"),
        *("use_expert_tensor_mode", "use_ring_of_experts", "fsdp_is_ep_bound"),
        *("sp_is_ep_bound", "use_qmm_best_config", "qmm_platform_override"),
        *("qmm_tpu_path_override", "generation_config", "use_cache"),
        *("output_attentions", "output_hidden_states"),
        *("return_dict", "use_return_dict", "torchscript"),
        *("_gradient_checkpointing_feature", "module_moe_method"),
    }
)
"""Settings that select how a model is computed (kernels, order), not what is
computed."""

MAX_DESCRIBED: Final = 6
"""Maximum nesting of descriptions."""

MAX_PARTS: Final = 10_000
"""Maximum values of one description; a closure may contain anything."""

Describe: TypeAlias = Callable[[Any], JSON]
"""Describes a value inside a described value."""

_LIBRARIES: Final = frozenset({"flax", "jax", "numpy", "optax"})
"""Libraries whose releases change the code of a function but not its behaviour."""

_HAS_DOCSTRING: Final = 0x4000000
"""Flag of code objects since Python 3.13; earlier, the first constant is the
docstring."""

_OPERATIONS: Final = frozenset({"BINARY_OP", "COMPARE_OP", "CONTAINS_OP", "IS_OP"})

PLACES: Final = (
    jax.sharding.Mesh,
    jax.sharding.AbstractMesh,
    jax.sharding.Sharding,
    jax.Device,
)
"""Types that select where a model runs; a restore has its own."""


def reported_name(value: Any) -> str:
    """Returns the name that a class or function reports; it need not exist."""
    module = getattr(value, "__module__", None) or "?"
    qualname = getattr(value, "__qualname__", None) or type(value).__qualname__
    return f"{module}:{qualname}"


def describe(value: Any, inner: Describe) -> dict[str, JSON]:
    """Returns a description, its parts by ``inner``."""
    if isinstance(value, types.FunctionType):
        return _function(value, inner)
    if isinstance(value, types.MethodType):
        of = inner(value.__self__)
        return {"function": reported_name(value.__func__), "fields": [["self", of]]}
    if isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
        of = inner(value.__self__)
        return {"function": f"builtins:{value.__qualname__}", "fields": [["self", of]]}
    if isinstance(value, functools.partial):
        fields = {"function": value.func, "args": value.args, **value.keywords}
        return {"function": "functools:partial", "fields": _pairs(fields, inner)}
    if isinstance(value, type):
        return {"class": reported_name(value)}
    name = reported_name(type(value))
    # A thread of another process has another name and another state.
    if isinstance(value, (nnx.Variable, threading.Thread, *PLACES)):
        return {"class": name}
    if isinstance(value, nnx.Pytree):
        # For example, a module that its own closure refers to. It is described where it
        # is placed in the tree, and its content here may differ between builds.
        return {"class": name, "reference": True}
    if is_array(value):
        return _array(value, inner)
    if callable(value) and hasattr(value, "__wrapped__"):  # of jit, custom_jvp, ...
        return {
            "function": reported_name(value),
            "fields": [["of", inner(value.__wrapped__)]],
        }
    return {"class": name, "fields": _pairs(list_fields(value), inner)}


def named_dtype(document: JSON) -> JSON:
    """Returns the name of a dtype of another library that a document describes; other
    documents as they are.

    >>> torch = {"class": "torch:dtype", "fields": [["(value)", "torch.float32"]]}
    >>> named_dtype({"opaque": torch})
    'float32'
    """
    match document:
        case {"opaque": {"class": str(cls), "fields": [["(value)", str(text)]]}}:
            name = text.rpartition(".")[2]
            is_dtype = cls.rpartition(":")[2].lower() == "dtype" and name in DTYPES
            return name if is_dtype else document
        case _:
            return document


def truncated_description(value: Any) -> dict[str, JSON]:
    """Returns the description of a value beyond the depth or size limit."""
    cut = {"class": reported_name(type(value)), "cut": True}
    digest = digest_value(value)
    return cut if digest is None else {**cut, "digest": digest}


def is_array(value: Any) -> bool:
    """Returns whether a value is an array, abstract or not."""
    return hasattr(value, "dtype") and isinstance(getattr(value, "shape", None), tuple)


def _array(value: Any, inner: Describe) -> dict[str, JSON]:
    described = {"array": str(value.dtype), "shape": list(map(str, value.shape))}
    if not isinstance(value, (np.ndarray, np.generic)):  # seeded or abstract
        return described
    if value.dtype.hasobject:
        return {**described, "fields": [["items", inner(value.tolist())]]}
    content = np.ascontiguousarray(value).tobytes()
    return {**described, "digest": hashlib.sha256(content).hexdigest()}


def _function(value: types.FunctionType, inner: Describe) -> dict[str, JSON]:
    cells = {
        name: cell.cell_contents
        for name, cell in zip(
            value.__code__.co_freevars, value.__closure__ or (), strict=True
        )
        if cell != types.CellType()  # an unset variable
    }
    fields = {**cells, **(value.__kwdefaults__ or {})}
    if value.__defaults__:
        fields["defaults"] = value.__defaults__
    facts = _code_facts(value)
    if facts is not None:
        fields["(code)"] = facts  # no variable has this key
    return {"function": _code_name(value), "fields": _pairs(fields, inner)}


def _pairs(fields: Mapping[str, Any], inner: Describe) -> list[JSON]:
    named = {str(key): value for key, value in fields.items()}
    return [[key, inner(named[key])] for key in sorted(named) if key not in IGNORED]


def _code_name(function: FunctionType) -> str:
    """Returns the module and name of the definition, ignoring wrappers."""
    module = function.__globals__.get("__name__") or "?"
    return f"{module}:{function.__code__.co_qualname}"


def _code_facts(function: FunctionType) -> list[list[Any]] | None:
    """Returns names, constants and operators, or None for functions of libraries."""
    if _code_name(function).partition(":")[0].split(".")[0] in _LIBRARIES:
        return None
    names: dict[str, None] = {}
    constants: dict[tuple[str, str], Any] = {}
    operators: list[str] = []
    for code in _codes(function.__code__):
        names.update(dict.fromkeys(code.co_names))
        for constant in _constants(code):
            constants[type(constant).__name__, repr(constant)] = constant
        operators += [
            step.argrepr or step.opname
            for step in dis.get_instructions(code)
            if step.opname in _OPERATIONS or step.opname.startswith("UNARY_")
        ]
    return [list(names), list(constants.values()), operators]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _constants(code: CodeType) -> list[Any]:
    if sys.version_info >= (3, 13):
        has_docstring = bool(code.co_flags & _HAS_DOCSTRING)
    else:
        has_docstring = not code.co_name.startswith("<")  # for example, <lambda>
    constants = code.co_consts
    if constants and isinstance(constants[0], str) and has_docstring:
        constants = constants[1:]
    return [c for c in constants if c is not None and not isinstance(c, CodeType)]
