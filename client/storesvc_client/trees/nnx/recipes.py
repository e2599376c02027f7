"""Recipes: descriptions of a model that a checkpoint stores with its leaves.

A model is rebuilt by the caller's code, never from code in the checkpoint. The recipe
shows whether that code is the same: it has the model's config and dtypes, its structure
as data, the type of each Variable, and the containers of the optimizer's state. It is
zlib-compressed JSON in ``LeafTable.structure``::

    {"format": "storesvc.recipe/2",
     "versions": {"flax": "0.12.8", "jax": "0.10.2", "optax": "0.2.8"},
     "model": "LlamaForCausalLM",     for people; nothing is looked up by it
     "config": {...} or null,         an object (``structure.encode_settings``)
     "arguments": {...},              plain data: dtype, param_dtype, precision
     "graphdef": {...} or null,       the structure (``structure.encode_graphdef``)
     "variables": {"graphstate/fc1/kernel": "Param", ...},
     "opt_state": {"opt_state/0": "ScaleByAdamState", ...} or null,
     "fields": {"scale": "DynamicScale"}}     if the class of the state adds fields

In ``storesvc.recipe/1``, which can still be read, the config is the result of its
``to_dict``.

The content is not trusted; it is compared as data. All differences go into one error,
or into the log if the caller asked for that. Only if a caller requests a module
and gives no code is the structure decoded, with an exact allow-list.

A saved config is rebuilt as an object of the model's config class. This is found in one
of these places, in order: ``config_class`` or ``_config_class``; EasyDeL's registry, if
EasyDeL is already imported; the annotation of ``config`` in the constructor. The saved
config may be of a subclass. Nothing here imports EasyDeL, and a stored name can refer
only to these classes.
"""

import inspect
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from storesvc.format.keys import escape_part, join_key
from storesvc_client._chunks.memory import collector_paused
from storesvc_client._items.values import pack_document, unpack_document
from storesvc_client._pytree.leaves import list_problems
from storesvc_client._values.options import OnMismatch
from storesvc_client.errors import (
    InvalidRequestError,
    MismatchError,
    StoreError,
    StructureError,
)
from storesvc_client.trees.nnx.graphs import (
    GraphState,
    Identity,
    fill_graph,
    fresh_leaf,
    graph_leaves,
    graph_paths,
    has_setting,
    read_setting,
)
from storesvc_client.trees.structure import (
    ABSENT,
    Difference,
    Opaque,
    common_differences,
    decode_data,
    differences,
    encode_data,
    encode_graphdef,
    encode_settings,
    is_execution,
    merge_configs,
    merge_layers,
    plain_settings,
)
from storesvc_client.trees.structure.descriptions import IGNORED
from storesvc_client.trees.structure.names import iterate_objects
from storesvc_client.trees.structure.settings import (
    class_name,
    class_path,
    derived_classes,
    enumerations,
    named_classes,
    rebuild_settings,
    setting_classes,
)

FORMAT: Final = "storesvc.recipe/2"
_READ: Final = (FORMAT, "storesvc.recipe/1")

_ARGUMENTS: Final = ("dtype", "param_dtype", "precision")
"""Arguments of EasyDeL models in addition to their config."""

_PARAM_DTYPE: Final = "param_dtype"
"""Setting that initial values have. It is not compared: the dtypes of leaves are."""

_FAILURES: Final = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)

_UNSAVED: Final = "the model's structure is not saved with the checkpoint: %s"

_log = logging.getLogger("storesvc_client")

Json: TypeAlias = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Description of a model, as data."""

    versions: Mapping[str, str]
    model: str
    """Name of the class, for information only."""
    config: Json
    """Result of ``encode_settings``; None for a model without a config."""
    arguments: Mapping[str, Json]
    """Encoded plain data, by name."""
    graphdef: Json
    """See ``structure.encode_graphdef``; None if no document can hold it."""
    variables: Mapping[str, str]
    """Type name of each Variable, by key."""
    opt_state: Mapping[str, str] | None
    """See ``container_types``; None if there was no optimizer."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """``container_types`` of the fields that the class of the state adds."""

    @classmethod
    @collector_paused()
    def from_graph(
        cls,
        graphdef: "nnx.GraphDef[Any]",
        graphstate: GraphState,
        graphother: GraphState,
        opt_state: Any = None,
        added: Mapping[str, Any] = MappingProxyType({}),
    ) -> "Recipe":
        """Returns the recipe of a state, concrete or abstract."""
        facts = _find_facts(graphdef, graphstate, graphother)
        parts = ("graphstate", graphstate), ("graphother", graphother)
        return cls(
            versions={name: version(name) for name in ("flax", "jax", "optax")},
            model=facts.model,
            config=facts.config,
            arguments=facts.arguments,
            graphdef=facts.graphdef,
            variables={
                join_key((part, *map(str, path))): (
                    type(leaf).__name__ if isinstance(leaf, nnx.Variable) else "array"
                )
                for part, state in parts
                for path, leaf in graph_leaves(state).items()
            },
            opt_state=(
                None if opt_state is None else container_types(opt_state, "opt_state")
            ),
            fields={
                key: kind
                for name, value in added.items()
                # a leaf has no containers
                for key, kind in (
                    container_types(value, name) or {name: ABSENT}
                ).items()
            },
        )

    @classmethod
    def from_config(cls, config: Any) -> "Recipe":
        """Returns the recipe of a model of which only the config is known."""
        return cls(
            versions={},
            model="",
            config=encode_data(config),
            arguments={},
            graphdef=None,
            variables={},
            opt_state=None,
        )

    @property
    def rng_streams(self) -> Sequence[str]:
        """Names of the streams of an ``nnx.Rngs`` that create the model again.

        The graph names the streams that its modules keep. Unless it holds the whole
        ``nnx.Rngs``, others may have drawn initial values: "default" stands for them.
        """
        streams, has_all = set[str](), False
        for found in iterate_objects(self.graphdef):
            has_all = has_all or found.get("node") == "flax.nnx:Rngs"
            if found.get("node") == "flax.nnx:RngStream":
                streams.add(_stream_name(found))
        streams.discard("")
        return sorted(streams if has_all else streams | {"default"})

    def pack(self) -> bytes:
        found = {"format": FORMAT, **{f: getattr(self, f) for f in self.__slots__}}
        if not self.fields:  # earlier releases do not know it
            del found["fields"]
        try:
            return pack_document(found)
        except StructureError as e:
            _log.warning(_UNSAVED, e)
            return pack_document(found | {"graphdef": None})

    @classmethod
    @collector_paused()
    def unpack(cls, document: bytes) -> "Recipe":
        found = {"fields": {}, **unpack_document(document)}
        if found.pop("format", None) not in _READ or set(found) != set(cls.__slots__):
            raise StructureError(
                f"structure of the checkpoint: expected a {FORMAT}, got other fields; "
                "use a newer release of this library, or restore with "
                "run.restore(like=)"
            )
        for name, optional in _TEXTS.items():
            texts = {} if optional and found[name] is None else found[name]
            if not isinstance(texts, dict) or not all(
                isinstance(text, str) for text in texts.values()
            ):
                raise StructureError(
                    f"structure of the checkpoint: expected texts in {name}, got other "
                    "values; restore with run.restore(like=)"
                )
        if not isinstance(found["arguments"], dict):
            raise StructureError(
                "structure of the checkpoint: expected arguments by name, got other "
                "values; restore with run.restore(like=)"
            )
        return cls(**{**found, "model": str(found["model"])})

    def decode_config(self) -> Any:
        """Returns the config as plain data, or None if there is none."""
        return None if self.config is None else decode_data(plain_settings(self.config))

    def decode_arguments(self) -> dict[str, Any]:
        """Returns the dtypes and the precision that the model was built with."""
        found = {name: decode_data(self.arguments[name]) for name in self.arguments}
        if isinstance(name := found.get("precision"), str):
            found["precision"] = jax.lax.Precision.__members__.get(name)
        return {name: found[name] for name in _ARGUMENTS if name in found}

    def config_differences(self, target: "Recipe") -> list[Difference]:
        """Returns the differences of the target's config and dtypes."""
        is_either_plain = None in (class_name(self.config), class_name(target.config))
        found = _field_differences(
            self.decode_config(),
            target.decode_config(),
            # The result of a to_dict() may lack settings and have additional entries.
            common=is_either_plain and self.config is not None,
        )
        own, other = self.decode_arguments(), target.decode_arguments()
        own.pop(_PARAM_DTYPE, None)
        other.pop(_PARAM_DTYPE, None)
        return found + _field_differences(own, other, common=not self.arguments)

    def optimizer_differences(
        self, other: Mapping[str, str] | None
    ) -> list[Difference]:
        """Returns the differences in the containers of two optimizer states.

        Empty if either recipe has no optimizer state.
        """
        saved = self.opt_state
        return [] if saved is None or other is None else _type_differences(saved, other)

    def field_differences(self, other: "Recipe") -> list[Difference]:
        """Returns the differences in the containers of the fields that both have."""
        shared = {key.partition("/")[0] for key in self.fields} & {*other.fields}
        saved, given = (
            {k: v for k, v in types.items() if k.partition("/")[0] in shared}
            for types in (self.fields, other.fields)
        )
        return _type_differences(saved, given)

    def model_differences(self, target: "Recipe") -> list[Difference]:
        """Returns the differences of the target's Variables and structure."""
        found = [
            Difference(key, kind, target.variables[key])
            for key, kind in self.variables.items()
            if target.variables.get(key, kind) != kind
        ]
        if self.graphdef is None or target.graphdef is None:
            return found
        try:
            if self.graphdef == target.graphdef:  # the fast comparison
                return found
        except RecursionError:
            pass  # too deeply nested for it: the other one rejects the document
        # Releases of flax add and remove attributes of modules.
        same_release = self.versions.get("flax") == target.versions.get("flax")
        compare = differences if same_release else common_differences
        return found + compare(self.graphdef, target.graphdef, ignore=[_PARAM_DTYPE])


_TEXTS: Final = {
    "versions": False,
    "variables": False,
    "opt_state": True,
    "fields": False,
}
"""Fields that hold texts by name; True if a field may be None."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """The part of a recipe that depends on the GraphDef alone."""

    graphdef: Json
    model: str
    config: Json
    arguments: dict[str, Json]


_known: "OrderedDict[Identity, _Facts]" = OrderedDict()
"""Cache by GraphDef: a training loop saves states of one GraphDef many times. A
GraphDef is small, because it holds no values."""

_KNOWN: Final = 4

_NOTHING: Final = np.zeros(())
"""Stands for Variables that a state lacks, such as RNG streams that are not saved."""


def _stream_name(node: Mapping[str, Json]) -> str:
    """Returns the name of a stored RngStream; "" if no stream may have it."""
    for attribute in node.get("attributes", ()):
        match attribute:
            case ["tag", {"static": str(name)}] if name.isidentifier():
                # A name that begins so could replace a part of the nnx.Rngs itself.
                return "" if name.startswith("_") else name
    return ""


def _find_facts(
    graphdef: "nnx.GraphDef[Any]", graphstate: GraphState, graphother: GraphState
) -> _Facts:
    found = _known.get(Identity(graphdef))
    if found is None:
        # Settings are read from a module, because a property may read the module's
        # values.
        leaves = {**graph_leaves(graphstate), **graph_leaves(graphother)}
        held = {p: fresh_leaf(leaves.get(p, _NOTHING)) for p in graph_paths(graphdef)}
        model = fill_graph(graphdef, held)
        structure: Json = None
        try:
            structure = encode_graphdef(graphdef)
        except StoreError as e:  # for example, a module nested too deeply
            _log.warning(_UNSAVED, e)
        found = _known[Identity(graphdef)] = _Facts(
            graphdef=structure,
            model=type(model).__qualname__,
            config=_encode_setting(partial(_config, model), encode_settings),
            arguments={
                # None is a setting, too, if the class has another default.
                name: _encode_setting(partial(read_setting, model, name))
                for name in _ARGUMENTS
                if has_setting(model, name)
            },
        )
        while len(_known) > _KNOWN:
            _known.popitem(last=False)
    return found


def _encode_setting(
    read: Callable[[], Any], encode: Callable[[Any], Json] = encode_data
) -> Json:
    """Returns an encoded setting, or None: a save must not fail because of one."""
    try:
        found = read()
        if isinstance(found, jax.lax.Precision):
            found = found.name  # as decode_arguments reads it
        return None if found is None else encode(found)
    except _FAILURES as e:
        _log.warning("a setting of the model is not saved with the checkpoint: %r", e)
        return None


def _config(model: Any) -> Any:
    config = read_setting(model, "config")
    return dict(config) if isinstance(config, Mapping) else config


def container_types(tree: Any, name: str) -> dict[str, str]:
    """Returns the type names of a tree's containers by key, in the tree's order.

    Two optimizers may have leaves with the same names and different meanings; their
    NamedTuples differ. A container without leaves, such as ``optax.EmptyState`` or
    ``None``, appears only here. NNX states are listed but not entered: their leaves
    have names of their own.

    >>> container_types({"a": (1.0, None)}, "opt_state")
    {'opt_state': 'dict', 'opt_state/a': 'tuple', 'opt_state/a/1': 'None'}
    """
    return dict(_walk_containers(tree, name))


def _walk_containers(node: Any, key: str) -> Iterator[tuple[str, str]]:
    children = _container_parts(node)
    if children is None:
        return
    yield key, "None" if node is None else type(node).__name__
    for part, child in children:
        yield from _walk_containers(child, f"{key}/{escape_part(str(part))}")


def _type_differences(
    saved: Mapping[str, str], given: Mapping[str, str]
) -> list[Difference]:
    return [
        Difference(key, saved.get(key, ABSENT), given.get(key, ABSENT))
        for key in {**saved, **given}
        if saved.get(key) != given.get(key)
    ]


def _container_parts(node: Any) -> Iterable[tuple[Any, Any]] | None:
    """Returns the parts of a container by name, or None for a leaf."""
    if node is None or isinstance(node, (nnx.State, nnx.Variable)):
        return ()
    if isinstance(node, Mapping):
        return sorted(node.items(), key=lambda item: str(item[0]))
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return zip(node._fields, node, strict=True)
    if isinstance(node, (list, tuple)):
        return enumerate(node)
    if is_dataclass(node) and not hasattr(node, "shape"):
        return ((field.name, getattr(node, field.name)) for field in fields(node))
    return None


def _field_differences(
    saved: Any, target: Any, *, common: bool = False
) -> list[Difference]:
    """Returns the fields of the target that differ from the saved ones.

    Fields that select where a model runs (its mesh) or record which release wrote it
    are ignored. A list equals a tuple, because JSON turns tuples into lists.

    >>> saved, target = {"eps": 1e-06, "sizes": (1, 2)}, {"eps": 0.001, "sizes": [1, 2]}
    >>> [str(each) for each in _field_differences(saved, target)]
    ['eps: expected 1e-06 as saved, got 0.001']
    """
    before, after = dict(_field_texts(saved, "")), dict(_field_texts(target, ""))
    keys = [key for key in before if key in after or not common]
    keys += [key for key in after if key not in before and not common]
    return [
        Difference(key or "config", before.get(key, ABSENT), after.get(key, ABSENT))
        for key in keys
        if before.get(key, ABSENT) != after.get(key, ABSENT)
    ]


def _field_texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            if name not in IGNORED:
                yield from _field_texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)) and value:
        for index, item in enumerate(value):
            yield from _field_texts(item, f"{key}[{index}]")
    else:
        yield key, "[]" if isinstance(value, (list, tuple)) else _field_text(value)


def _field_text(value: Any) -> str:
    """Returns the text of a value; an attribute that is None counts as absent."""
    is_class = isinstance(value, type) and issubclass(value, np.generic)
    if is_class or isinstance(value, (np.dtype, type(jnp.float32))):
        return repr(np.dtype(value).name)  # a config that went through JSON has only it
    if isinstance(value, Opaque):
        return str(value)
    return ABSENT if value is None else repr(value)


_MAX_TEXT: Final = 300
"""Maximum characters of one difference in a message."""

_SHOWN: Final = 5
"""Maximum structure differences that one message lists next to config fields."""


def read_recipe(name: str, document: bytes, on_mismatch: OnMismatch) -> Recipe | None:
    if not document:
        return None
    try:
        return Recipe.unpack(document)
    except StructureError as e:
        if on_mismatch == "raise":
            raise
        _log.warning(
            "%s: its model is not compared, because the recipe cannot be read: %s",
            name,
            e,
        )
        return None


def compare_models(
    name: str, recipe: Recipe | None, target: Recipe, *, on_mismatch: OnMismatch
) -> None:
    """Rejects a model or an optimizer that differs from the saved one.

    Args:
        recipe: Recipe of the checkpoint; None: nothing is compared.
        on_mismatch: "raise" rejects differences, "log" logs them. Differences only in
            the config, which may not affect any computation, are logged.
    """
    if recipe is None:
        return
    settings = recipe.config_differences(target)
    places = recipe.optimizer_differences(target.opt_state)
    places += recipe.field_differences(target)
    places += recipe.model_differences(target)
    execution = [each for each in (*settings, *places) if is_execution(each)]
    if execution:
        _log.info(
            "%s: the model is computed in another way than when it was saved: %s",
            name,
            format_differences(execution),
        )
    config, found = _lines({*settings} - {*execution}), _lines({*places} - {*execution})
    if config and len(found) > _SHOWN:
        # The config shows in the caller's terms the differences that the structure
        # shows in every layer.
        found[_SHOWN:] = [f"and {len(found) - _SHOWN} more places of the structure"]
    if found and on_mismatch == "raise":
        reject_differences(name, [*config, *found])
    if config or found:
        _log.warning(
            "%s was saved from another model: %s",
            name,
            _join_problems([*config, *found]),
        )


def reject_differences(name: str, problems: list[str], *, advice: str = "") -> None:
    """Rejects differences, if there are any."""
    if problems:
        raise MismatchError(
            f"{name} was saved from another model or optimizer: "
            f"{_join_problems(problems)}{advice}",
            metadata={} if advice else {"hints": ""},
        )


def format_differences(differences: Iterable[Difference]) -> str:
    """Returns the differences as one text, each of many layers once."""
    return _join_problems(_lines(differences))


def _lines(differences: Iterable[Difference]) -> list[str]:
    """Returns one line for each difference, the shortest first."""
    merged = map(str, merge_layers(merge_configs(differences)))
    return sorted(merged, key=lambda line: (len(line), line))


def _join_problems(problems: list[str]) -> str:
    """Returns the problems as one text, escaped, as they quote stored text."""
    return list_problems(
        [
            (text if text.isprintable() else ascii(text)[1:-1])[:_MAX_TEXT]
            for text in problems
        ]
    )


def takes_config(model: type[Any], recipe: Recipe | None) -> bool:
    """Returns whether a class is constructed with the config of a recipe.

    A class without a default for it always is.
    """
    # Inspects __init__, because flax's metaclass shows only *args and **kwargs.
    config = inspect.signature(model.__init__).parameters.get("config")
    if config is None or not _config_classes(model):
        return False
    has_one = recipe is not None and recipe.config is not None
    return has_one or config.default is config.empty


def factory_text(model: type[Any]) -> str:
    """Returns the source text of a factory of a class, with its required arguments."""
    parameters = inspect.signature(model.__init__).parameters
    dtypes = [name for name in parameters if name in ("dtype", "param_dtype")]
    names = dict.fromkeys([*needed_arguments(model), *dtypes])
    arguments = [
        "rngs=nnx.Rngs(0)" if name == "rngs" else f"{name}={name}" for name in names
    ]
    return f"lambda: {model.__name__}({', '.join(arguments)})"


def needed_arguments(model: type[Any]) -> list[str]:
    """Returns the names of a class's required arguments."""
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = list(inspect.signature(model.__init__).parameters.values())
    return [
        each.name
        for each in parameters[1:]  # the first is self
        if each.default is each.empty and each.kind not in open_ended
    ]


def build_config(model: type[Any], recipe: Recipe | None) -> Any:
    """Returns the saved config as an object of the model's config class."""
    document = None if recipe is None else recipe.config
    if recipe is None or document is None:
        raise InvalidRequestError(
            f"expected a checkpoint with the config of a {model.__name__}, got none; "
            f"give a factory, model={factory_text(model)}"
        )
    classes = _config_classes(model)
    saved = class_name(document)
    # plain data: saved by an earlier release, or the config is a dict
    if saved is None:
        return _from_dict(model, classes, recipe.decode_config())
    known_classes = list(classes)
    for cls in known_classes:  # the list grows during the iteration
        known_classes += [c for c in derived_classes(cls) if c not in known_classes]
    found = [cls for cls in known_classes if class_path(cls) == saved]
    if not found:
        named = " or ".join(map(class_path, classes))
        raise MismatchError(
            f"expected a config of {model.__name__}, of class {named}, got one of "
            f"class {saved} as saved; give the class that was saved, or a factory, "
            f"model={factory_text(model)}"
        )
    known = {**enumerations(document, found[0]), **setting_classes(found[0])}
    for cls in classes:
        known.update(setting_classes(cls))
    try:
        config = rebuild_settings(document, known)
    except StructureError as e:
        raise MismatchError(
            f"the config of {model.__name__} cannot be rebuilt: {e}"
        ) from e
    _move_to_this_machine(config)
    return config


def _from_dict(model: type[Any], classes: list[type[Any]], fields: Any) -> Any:
    able = [cls for cls in classes if hasattr(cls, "from_dict")]
    if not able or not isinstance(fields, dict):
        raise InvalidRequestError(
            f"expected a config of a class that {model.__name__} names, got plain data "
            f"as saved; give a factory, model={factory_text(model)}"
        )
    plain = {
        name: value
        for name, value in fields.items()
        if isinstance(name, str) and not isinstance(value, Opaque)
    }
    try:
        return able[0].from_dict(plain)
    except (TypeError, ValueError, LookupError, AttributeError) as e:
        raise MismatchError(
            f"expected a config that {able[0].__name__} accepts, got one that it "
            f"rejects ({type(e).__name__}: {e}); give a factory, "
            f"model={factory_text(model)}"
        ) from e


_MACHINE: Final = ("backend", "platform")
"""Settings that EasyDeL takes from the machine that creates the config."""


def _move_to_this_machine(config: Any) -> None:
    """Updates an EasyDeL config, and nested configs, with the backend of this machine.

    A config that names a backend that is absent here could not create its mesh.
    """
    here = jax.default_backend()
    kernels = "triton" if here == "gpu" else "jax"
    seen: set[int] = set()
    left = [config]
    while left:
        value = left.pop()
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict) or id(value) in seen:
            continue
        seen.add(id(value))
        is_easydels = all(isinstance(attributes.get(name), str) for name in _MACHINE)
        if is_easydels and attributes["backend"] != here:
            attributes.update(backend=here, platform=kernels)
        left += attributes.values()


def _config_classes(model: type[Any]) -> list[type[Any]]:
    """Returns the possible classes of a model's config, the most likely one first."""
    named = [getattr(model, name, None) for name in ("config_class", "_config_class")]
    found = [cls for cls in named if isinstance(cls, type)]
    found += _registered_classes(model)
    for base in model.__mro__:
        init = base.__dict__.get("__init__")
        annotation = getattr(init, "__annotations__", {}).get("config")
        if annotation is not None:
            classes = named_classes(annotation, getattr(init, "__globals__", {}))
            found += [cls for cls in classes if cls.__module__ != "builtins"]
            break
    return list(dict.fromkeys(found))


def _registered_classes(model: type[Any]) -> Iterator[type[Any]]:
    """Yields the class that EasyDeL's registry has for a model."""
    factory = sys.modules.get("easydel.infra.factory")
    registry = getattr(factory, "registry", None)
    tasks = getattr(registry, "_task_registry", None)
    if not isinstance(tasks, Mapping):
        return
    for models in tasks.values():
        for registration in models.values():
            if getattr(registration, "module", None) is model:
                yield registration.config
