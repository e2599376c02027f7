"""What a model tells of itself: its three parts, its partition rules and its mesh.

A model of EasyDeL knows all of them, and a plain module only its parts, so each
question has an answer for both. Nothing here imports EasyDeL.

>>> graphdef, graphstate, graphother = split_module(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
>>> sorted(graphstate)
['bias', 'kernel']
"""

import inspect
from typing import Any, Final, Protocol, TypeGuard, runtime_checkable

from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from storesvc_client._pytree.partition_rules import Rules
from storesvc_client.trees.nnx.graphs import GraphState

__all__ = [
    "HasGraph",
    "has_setting",
    "is_module",
    "may_place_itself",
    "mesh_of",
    "partition_rules_of",
    "setting_of",
    "split_module",
]


@runtime_checkable
class HasGraph(Protocol):
    """A module, or the state of one, in three parts that ``nnx.merge`` joins.

    A module shares the Variables of its parts, so what changes one changes the other;
    a state, being a value, has its own.
    """

    @property
    def graphdef(self) -> "nnx.GraphDef[Any]":
        """The structure, without values."""

    @property
    def graphstate(self) -> GraphState:
        """The parameters."""

    @property
    def graphother(self) -> GraphState:
        """All other Variables."""


def is_module(model: Any) -> bool:
    """Returns whether it is an instance that ``split_module`` takes."""
    if isinstance(model, type):  # of a class, all parts are there too, as properties
        return False
    return _is_graph(model) or _has_parts(model)


def split_module(
    model: "HasGraph | nnx.Pytree | dict[str, Any] | list[Any]",
) -> tuple["nnx.GraphDef[Any]", GraphState, GraphState]:
    """Returns a model's structure, its parameters, and its other Variables.

    What has these parts gives its own: a model of EasyDeL, whose parameters are only
    the adapters while it has some, or an ``EasyDeLState``. Any other module is split
    by ``nnx.Param``. A module shares the Variables of its parts: a call that counts,
    or an update of a part, changes both. A module that has parts of its own makes
    them with ``nnx.split``; with this function it would ask itself.

    Raises:
        TypeError: It is no module and has no such parts.
    """
    parts: tuple[Any, Any, Any]
    if _has_parts(model):
        parts = model.graphdef, model.graphstate, model.graphother
    elif _is_graph(model):
        graphdef, *states = nnx.split(model, nnx.Param, ...)
        parts = graphdef, states[0], states[1]
    else:
        raise _no_module(model)
    return parts


def _is_graph(model: Any) -> bool:
    """Whether it is a module, such as nnx.Optimizer, or a dict or list of some."""
    if isinstance(model, (dict, list, tuple)):
        items = model.values() if isinstance(model, dict) else model
        return any(isinstance(item, nnx.Variable) or _is_graph(item) for item in items)
    return isinstance(model, nnx.Pytree)


def _has_parts(model: Any) -> TypeGuard[HasGraph]:
    """Of a class, all parts are there too, as properties; and ``nnx.Rngs`` have a
    stream by whatever name they are asked for."""
    return isinstance(model, HasGraph) and isinstance(model.graphdef, nnx.GraphDef)


def partition_rules_of(model: Any) -> Rules | None:
    """Returns the partition rules that a model brings; None without any.

    They are what EasyDeL would shard the model by. A model of one's own brings rules
    by a ``config.get_partition_rules()``.

    Raises:
        TypeError: What it brings are no rules.
    """
    # EasyDeL says the same of a public method, the configuration's; but that one has
    # None where modules tell their own specs, and patterns that end before the
    # "/value" of a Variable. This method is in its protocol, and has neither.
    ask = _method_of(model, "_get_partition_rules")
    if ask is not None:
        rules = ask(None)
    else:
        ask = _method_of(_config_of(model), "get_partition_rules")
        rules = None if ask is None else ask()
    if rules is None:
        return None
    return tuple(_checked(rule, model) for rule in rules)


def setting_of(model: Any, name: str) -> Any:
    """Returns an attribute of a model or of its class; None where neither has it.

    ``nnx.Rngs`` answer any other way of asking with a stream of random numbers.
    """
    return getattr(model, name) if has_setting(model, name) else None


def has_setting(model: Any, name: str) -> bool:
    """Returns whether a model or its class has an attribute, be it None."""
    return inspect.getattr_static(model, name, _ABSENT) is not _ABSENT


_ABSENT: Final = object()


def _method_of(owner: Any, name: str) -> Any:
    """A method of the class of an object; None where it has none.

    Never what an attribute of the object itself holds: that may be what somebody
    stored, and a method is called.
    """
    known = inspect.getattr_static(type(owner), name, None) is not None
    return (
        getattr(owner, name)
        if known and name not in getattr(owner, "__dict__", {})
        else None
    )


def _config_of(model: Any) -> Any:
    """The config of a model; None where it has none, or cannot tell it."""
    try:
        return setting_of(model, "config")
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None


def mesh_of(model: Any) -> Mesh | None:
    """Returns the mesh that a model is made for; None without one.

    EasyDeL makes it, of all devices, when it is first asked for.
    """
    for owner in (_config_of(model), model):
        # The model's own raises where its configuration has none.
        mesh = getattr(owner, "mesh", None)
        if mesh is not None or hasattr(owner, "mesh"):
            return mesh if isinstance(mesh, Mesh) else None
    return None


def may_place_itself(graphdef: "nnx.GraphDef[Any]") -> bool:
    """Returns whether ``mesh_of`` or ``partition_rules_of`` may find something in the
    module of a structure, without making the module."""
    cls = getattr(graphdef.nodes[0], "type", None)
    names = ("config", "mesh", "_get_partition_rules")
    return any(has_setting(cls, name) for name in names) or any(
        key in names for key, _ in graphdef.attributes
    )


def _checked(rule: Any, model: Any) -> tuple[str, PartitionSpec]:
    match rule:
        case (str() as pattern, PartitionSpec() as spec):
            return pattern, spec
        case _:
            raise TypeError(
                f"rules of {type(model).__name__}: expected pairs of a regular "
                f"expression and a PartitionSpec, got {rule!r}; give restore such "
                "rules instead"
            )


def _no_module(model: Any) -> TypeError:
    got = model.__name__ if isinstance(model, type) else type(model).__name__
    what = "the class " if isinstance(model, type) else ""
    return TypeError(
        "expected an nnx.Module, or an object with graphdef, graphstate and "
        f"graphother, got {what}{got}; make a module first"
    )
