"""Finds the class of a model's config, and rebuilds a saved config as its object.

The config class of a model is found in one of these places, in order: ``config_class``
or ``_config_class``; EasyDeL's registry, if EasyDeL is already imported; the annotation
of ``config`` in the constructor. The saved config may be of a subclass.

Nothing here imports EasyDeL, and a stored name can refer only to these classes.
"""

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax

from storesvc_client.errors import InvalidRequestError, MismatchError, StructureError
from storesvc_client.trees.nnx.recipes import Recipe
from storesvc_client.trees.structure import Opaque
from storesvc_client.trees.structure.setting_classes import (
    derived_classes,
    enumerations,
    name_of_class,
    named_classes,
    setting_classes,
)
from storesvc_client.trees.structure.settings import class_name, rebuild_settings

__all__ = ["built_config", "factory_of", "needed_arguments", "takes_config"]

_REGISTRY: Final = "easydel.infra.factory"
"""Module of EasyDeL's registry."""


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


def factory_of(model: type[Any]) -> str:
    """Returns the source text of a factory of a class, with its required arguments."""
    parameters = inspect.signature(model.__init__).parameters
    dtypes = [name for name in parameters if name in _DTYPES]
    names = dict.fromkeys([*needed_arguments(model), *dtypes])
    arguments = [
        "rngs=nnx.Rngs(0)" if name == "rngs" else f"{name}={name}" for name in names
    ]
    return f"lambda: {model.__name__}({', '.join(arguments)})"


_DTYPES: Final = ("dtype", "param_dtype")


def needed_arguments(model: type[Any]) -> list[str]:
    """Returns the names of a class's required arguments."""
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = list(inspect.signature(model.__init__).parameters.values())
    return [
        each.name
        for each in parameters[1:]  # the first is self
        if each.default is each.empty and each.kind not in open_ended
    ]


def built_config(model: type[Any], recipe: Recipe | None) -> Any:
    """Returns the saved config as an object of the model's config class.

    Args:
        model: The class of the model.
        recipe: Recipe of the checkpoint, if it has one.

    Raises:
        InvalidRequestError: The checkpoint has no config.
        MismatchError: The config is of a class that the model does not name, or its
            class does not accept it.
    """
    document = None if recipe is None else recipe.config
    if recipe is None or document is None:
        raise InvalidRequestError(
            f"expected a checkpoint with the config of a {model.__name__}, got none; "
            f"give a factory, model={factory_of(model)}"
        )
    classes = _config_classes(model)
    saved = class_name(document)
    # plain data: saved by an earlier release, or the config is a dict
    if saved is None:
        return _from_dict(model, classes, recipe.decoded_config())
    found = [cls for cls in _with_derived(classes) if name_of_class(cls) == saved]
    if not found:
        named = " or ".join(map(name_of_class, classes))
        raise MismatchError(
            f"expected a config of {model.__name__}, of class {named}, got one of "
            f"class {saved} as saved; give the class that was saved, or a factory, "
            f"model={factory_of(model)}"
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
    _of_this_machine(config)
    return config


def _from_dict(model: type[Any], classes: list[type[Any]], fields: Any) -> Any:
    able = [cls for cls in classes if hasattr(cls, "from_dict")]
    if not able or not isinstance(fields, dict):
        raise InvalidRequestError(
            f"expected a config of a class that {model.__name__} names, got plain data "
            f"as saved; give a factory, model={factory_of(model)}"
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
            f"model={factory_of(model)}"
        ) from e


_MACHINE: Final = ("backend", "platform")
"""Settings that EasyDeL takes from the machine that creates the config."""


def _of_this_machine(config: Any) -> None:
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
    return list(dict.fromkeys(_found_classes(model)))


def _found_classes(model: type[Any]) -> Iterator[type[Any]]:
    for name in ("config_class", "_config_class"):
        named = getattr(model, name, None)
        if isinstance(named, type):
            yield named
    yield from _registered(model)
    for base in model.__mro__:
        init = base.__dict__.get("__init__")
        annotation = getattr(init, "__annotations__", {}).get("config")
        if annotation is not None:
            scope: Mapping[str, Any] = getattr(init, "__globals__", {})
            for cls in named_classes(annotation, scope):
                if cls.__module__ != "builtins":
                    yield cls
            return


def _registered(model: type[Any]) -> Iterator[type[Any]]:
    """Yields the class that EasyDeL's registry has for a model."""
    registry = getattr(sys.modules.get(_REGISTRY), "registry", None)
    tasks = getattr(registry, "_task_registry", None)
    if not isinstance(tasks, Mapping):
        return
    for models in tasks.values():
        for registration in models.values():
            if getattr(registration, "module", None) is model:
                yield registration.config


def _with_derived(classes: list[type[Any]]) -> list[type[Any]]:
    found = list(classes)
    for cls in found:  # the list grows during the iteration
        found += [each for each in derived_classes(cls) if each not in found]
    return found
