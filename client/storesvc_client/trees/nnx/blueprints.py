"""Blueprints: abstract models that a restore fills with arrays.

A blueprint comes from the caller's code, run under ``nnx.eval_shape``: a factory, a
class, or an existing module or state. It may be cast to another floating-point dtype.

The optimizer itself is the caller's code, too, and is never stored. Its state is
described abstractly, or initialised on its devices, and placed with the parameters: a
moment like its parameter, a count on every device.

Two states of one model never have equal tree structures: graphdefs contain closures,
which compare by identity. Therefore shardings are matched with leaves by key, not by
structure.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from storesvc.format.dtypes import DTYPES
from storesvc_client._pytree.containers import nest
from storesvc_client._pytree.leaves import (
    GraphPath,
    list_problems,
    named_leaves,
    signature,
)
from storesvc_client._pytree.partition_rules import (
    Rules,
    check_mesh,
    shardings_by_rules,
)
from storesvc_client._pytree.restore_target import would_narrow
from storesvc_client._values.arguments import checked_cast
from storesvc_client._values.models import LeafInfo, PathPart
from storesvc_client._values.options import Indivisible
from storesvc_client.errors import InvalidRequestError, MismatchError, StoreError
from storesvc_client.trees.nnx.graphs import (
    GraphState,
    Parts,
    drop_caches,
    fill_graph,
    graph_leaves,
    graph_paths,
    is_module,
    refine_graphs,
    split_module,
)
from storesvc_client.trees.nnx.recipes import (
    Recipe,
    build_config,
    factory_text,
    needed_arguments,
    takes_config,
)


def cast_floating(tree: Any, dtype: Any, place: str = "cast=") -> Any:
    """Returns the tree with its floating-point arrays, concrete or abstract, cast.

    Host arrays stay on the host. Python numbers, integers, complex numbers and PRNG
    keys are unchanged.

    Args:
        place: The argument, for messages.
    """
    name = str(checked_cast(place, dtype))
    to = DTYPES[name]

    def cast(leaf: Any) -> Any:
        found = getattr(leaf, "dtype", None)
        if found is None or not jnp.issubdtype(found, jnp.floating):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, to, sharding=leaf.sharding)
        if isinstance(leaf, jax.Array) and would_narrow(name):
            raise InvalidRequestError(
                f"{place}: jax would narrow {name} on a device; set jax_enable_x64"
            )
        return leaf.astype(to)

    return jax.tree.map(cast, tree)


def shardings_by_key(tree: Any) -> dict[str, Sharding]:
    """Returns the shardings of a tree's leaves by key.

    A leaf is an array, concrete or abstract, or itself a sharding.
    """
    leaves, _ = named_leaves(tree)
    found = ((leaf.key, _sharding(leaf.value)) for leaf in leaves)
    return {key: sharding for key, sharding in found if sharding is not None}


def _sharding(leaf: Any) -> Sharding | None:
    """Returns the sharding of an array, or the leaf itself if it is a sharding."""
    found = leaf if isinstance(leaf, Sharding) else getattr(leaf, "sharding", None)
    return found if isinstance(found, Sharding) else None


def required_shardings(tree: Any) -> dict[str, Sharding]:
    """Returns the shardings of a tree that must contain some."""
    leaves, _ = named_leaves(tree)
    problems = [
        f"leaf {leaf.key!r}: expected a Sharding, or an array that has one, "
        f"got {leaf.value!r}"
        for leaf in leaves
        if not _may_have_sharding(leaf.value)
    ]
    if problems:
        raise InvalidRequestError(list_problems(problems))
    found = shardings_by_key(tree)
    if not found:
        raise InvalidRequestError(
            "expected shardings, or arrays that have them, got none in a "
            f"{type(tree).__name__}; pass a tree such as state.shardings"
        )
    return found


def _may_have_sharding(leaf: Any) -> bool:
    """Returns whether a leaf is a sharding, or an array or a number of a state."""
    is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    if type(leaf) in (str, bytes):  # a spec by mistake, rather than a text of a state
        return False
    return is_array or isinstance(leaf, Sharding) or signature(leaf) is not None


def follow_parameters(
    opt_state: Any, parameters: Any, mesh: Mesh | None = None
) -> dict[str, Sharding]:
    """Returns the shardings, by leaf key, of an optimizer state placed like its
    parameters.

    A moment is matched with its parameter by name: ``opt_state/0/mu/fc1/kernel/value``
    gets the sharding of ``fc1/kernel/value`` if the shapes are equal. If several names
    match, the longest one applies. Other leaves, such as counts, are replicated on the
    mesh.

    Args:
        opt_state: The optimizer state; its leaves may be abstract.
        parameters: The ``graphstate``, whose leaves have shardings.
        mesh: The mesh for other leaves. None: the mesh of the parameters, if they are
            all on one; otherwise the result omits these leaves.

    Raises:
        InvalidRequestError: ``mesh`` is not a mesh.
    """
    if mesh is not None:
        check_mesh(mesh)
    over = mesh or find_leaf_mesh(parameters)
    whole = None if over is None else NamedSharding(over, PartitionSpec())
    leaves = jax.tree.leaves(parameters)
    if whole is None and not any(map(_sharding, leaves)):
        return {}
    own_shardings: dict[str, Sharding] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for leaf in named_leaves(parameters)[0]:
        own = _sharding(leaf.value)
        if own is not None:
            own_shardings[leaf.key] = own
            shapes[leaf.key] = leaf_shape(leaf.value)
    found: dict[str, Sharding] = {}
    for leaf in named_leaves({"opt_state": opt_state})[0]:
        shape = leaf_shape(leaf.value)
        names = (name for name in _suffixes(leaf.key) if name in own_shardings)
        fits = (own_shardings[name] for name in names if shapes[name] == shape)
        sharding = next(fits, whole)
        if sharding is not None:
            found[leaf.key] = sharding
    return found


def _suffixes(key: str) -> Iterator[str]:
    """Yields a key without its first part, without its first two, and so on."""
    at = key.find("/")
    while at >= 0:
        yield key[at + 1 :]
        at = key.find("/", at + 1)


def leaf_shape(leaf: Any) -> tuple[int, ...]:
    """Returns the shape of a leaf; () for values without one."""
    return tuple(getattr(leaf, "shape", ()))


def reshard(tree: Any, shardings: Mapping[str, Sharding]) -> Any:
    """Returns the tree with its leaves moved to the given shardings.

    Also works inside ``jax.jit``, where it constrains shardings instead of moving.
    """
    leaves, treedef = named_leaves(tree)
    unknown = sorted(shardings.keys() - {leaf.key for leaf in leaves})
    problems = [f"leaf {key!r}: expected in the tree, got none" for key in unknown]
    moved = []
    for leaf in leaves:
        sharding = shardings.get(leaf.key)
        if sharding is None:
            moved.append(leaf.value)
            continue
        try:
            moved.append(_move(leaf.value, sharding))
        except ValueError as e:
            problems.append(f"leaf {leaf.key!r}: {e}")
    if problems:
        raise MismatchError(f"shardings do not fit the tree: {list_problems(problems)}")
    return jax.tree.unflatten(treedef, moved)


def gather(tree: Any) -> Any:
    """Returns the tree with each array complete on the host, as ``numpy.ndarray``.

    Typed PRNG keys, for which NumPy has no dtype, are complete on the first device.
    """

    def gather_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = jnp.asarray(np.asarray(jax.random.key_data(leaf)))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return np.asarray(leaf)

    return jax.tree.map(gather_leaf, tree)


def find_leaf_mesh(tree: Any) -> Mesh | None:
    """Returns the mesh of a tree's arrays, or None if they have none or several."""
    shardings = {_sharding(leaf) for leaf in jax.tree.leaves(tree)}
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    concrete = [mesh for mesh in meshes if isinstance(mesh, Mesh)]
    return concrete[0] if len(concrete) == 1 else None


def _move(leaf: Any, sharding: Sharding) -> Any:
    if not hasattr(leaf, "dtype"):  # a Python number has no device
        return leaf
    if isinstance(leaf, jax.core.Tracer):
        return jax.lax.with_sharding_constraint(leaf, sharding)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.device_put(leaf, sharding)


def check_tx(tx: Any) -> None:
    """Rejects anything that is not an optimizer."""
    if not callable(getattr(tx, "init", None)) or not hasattr(tx, "update"):
        advice = "; call it: optax.adam(1e-3)" if callable(tx) else ""
        raise InvalidRequestError(
            f"tx: expected an optax.GradientTransformation, got {tx!r}{advice}"
        )


def abstract_opt_state(
    tx: optax.GradientTransformation, graphstate: GraphState
) -> optax.OptState:
    """Returns the initial state of an optimizer, with abstract arrays."""
    check_tx(tx)
    return jax.eval_shape(tx.init, graphstate)


def init_opt_state(
    tx: optax.GradientTransformation,
    graphstate: GraphState,
    mesh: Mesh | None,
    rules: Rules | None,
    indivisible: Indivisible = "error",
) -> optax.OptState:
    """Returns the initial state of an optimizer, in its final placement.

    Args:
        mesh: The mesh, if there are rules.
        rules: Partition rules for the leaves. None: the placement that ``tx.init``
            gives them; moments then have their parameter's sharding.
        indivisible: As for ``Run.restore``.
    """
    if mesh is None or rules is None:
        check_tx(tx)
        return tx.init(graphstate)
    abstract = abstract_opt_state(tx, graphstate)
    shardings = shardings_by_rules({"opt_state": abstract}, mesh, rules, indivisible)
    # As lists, because two traces of one optimizer may have unequal tree structures.
    init = jax.jit(
        lambda parameters: jax.tree.leaves(tx.init(parameters)),
        out_shardings=jax.tree.leaves(shardings),
    )
    return jax.tree.unflatten(jax.tree.structure(abstract), init(graphstate))


def place_like_parameters(
    like: Mapping[str, Any], graphstate: GraphState, known: Any = None
) -> Any:
    """Returns an abstract optimizer state, and step, with the parameters' placement.

    Args:
        like: ``opt_state``, a result of ``abstract_opt_state``, and perhaps ``step``.
        graphstate: The parameters; without shardings, the result has none either.
        known: A placed optimizer state; its shardings take precedence.
    """
    shardings = follow_parameters(like["opt_state"], graphstate)
    keys = {leaf.key for leaf in named_leaves(like)[0]}
    own = shardings_by_key({"opt_state": known})
    shardings |= {key: own[key] for key in own if key in keys}
    mesh = find_leaf_mesh(graphstate)
    if "step" in like and mesh is not None:
        shardings["step"] = NamedSharding(mesh, PartitionSpec())
    return reshard(like, shardings)


PARTS: Final = ("graphstate", "graphother")
"""Parts of a state that hold Variables."""

VariablePath: TypeAlias = tuple[str, GraphPath]
"""Part of the state that holds a Variable, and its path in that part."""

ModelLike: TypeAlias = Any
"""A module class; a factory, which takes no arguments and returns a module; a module;
or a state, which is any object with graphdef, graphstate and graphother. Modules and
states may be abstract."""


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """A model in three parts, with arrays that are abstract or will be replaced."""

    graphdef: "nnx.GraphDef[Any]"
    graphstate: GraphState
    graphother: GraphState
    make: Callable[[], Any] | None
    """Creates the module with all its values; None if only an instance was given."""

    def recipe(self, opt_state: Any, added: Mapping[str, Any]) -> Recipe:
        """Returns the recipe that a checkpoint of it, with an optimizer's state and
        added fields, would have."""
        parts = self.graphdef, self.graphstate, self.graphother
        return Recipe.from_graph(*parts, opt_state, added)

    def cast(self, dtype: Any) -> "Blueprint":
        """Returns the blueprint with its floating-point parameters cast to a dtype."""
        return replace(self, graphstate=cast_floating(self.graphstate, dtype))


def draw_blueprint(
    model: ModelLike, recipe: Recipe | None, mesh: Mesh | None, dtype: Any = None
) -> Blueprint:
    """Returns the blueprint of a model.

    Args:
        model: The caller's model; see ``ModelLike``. A class with a config class is
            called with the config and dtypes of the recipe, any other class with
            ``rngs`` only, if it accepts that.
        mesh: The mesh to set in the config, if the config accepts one.
        dtype: The ``param_dtype`` for a class with a config; None: the saved one.
    """
    make: Callable[[], Any] | None = None
    if isinstance(model, type):
        make = _maker(model, recipe, mesh, dtype)
    elif not is_module(model) and callable(model):
        make = model
    if make is None:
        graphdef, graphstate, graphother = _parts(model)
    else:
        with _explain_errors(model):
            graphdef, graphstate, graphother = _abstract_parts(make, mesh)
    return Blueprint(
        graphdef=graphdef, graphstate=graphstate, graphother=graphother, make=make
    )


_NEEDS_VALUES: Final = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.UnexpectedTracerError,
)


@contextmanager
def _explain_errors(model: Any) -> Generator[None]:
    """Translates exceptions of a class or factory to errors that name the cause."""
    name = getattr(model, "__name__", type(model).__name__)
    try:
        yield
    except StoreError:
        raise
    except TraceContextError as e:
        raise InvalidRequestError(
            f"model={name}: expected a factory that creates everything it changes, got "
            f"one that changes objects created outside of it ({_first_line(e)}); "
            "create the rngs and the layers inside the factory"
        ) from e
    except _NEEDS_VALUES as e:
        raise InvalidRequestError(
            f"model={name}: expected code that runs abstractly, under nnx.eval_shape, "
            f"got code that needs concrete values ({_first_line(e)}); compute these "
            "values before the restore, or give a module instance"
        ) from e
    except Exception as e:
        if not isinstance(model, type):
            raise  # an error in the caller's factory
        raise MismatchError(
            f"model={name}: expected a class that accepts the saved config and dtypes, "
            f"got {type(e).__name__}: {_first_line(e)}; give a factory, "
            f"model={factory_text(model)}"
        ) from e


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _parts(module: Any) -> Parts:
    try:
        return drop_caches(split_module(module))
    except TypeError as e:
        raise InvalidRequestError(
            f"expected model= a module class, a factory, a module or a state: {e}"
        ) from e


def _abstract_parts(make: Callable[[], Any], mesh: Mesh | None) -> Parts:
    """Returns the parts of a factory's module without computing any array."""
    # nnx.eval_shape would return a module with abstract bare arrays, which some flax
    # releases do not treat as leaves.
    graphdefs = []

    def states() -> tuple[GraphState, GraphState]:
        module = make()
        # flax marks bare arrays as data, but not tracers.
        for _, node in nnx.iter_graph(module):
            if isinstance(node, nnx.Pytree):
                for name, value in list(vars(node).items()):
                    if isinstance(value, jax.core.Tracer):
                        setattr(node, name, nnx.data(value))
        graphdef, *states = _parts(module)
        graphdefs.append(graphdef)
        return states[0], states[1]

    # Variables that name mesh axes need a mesh in the context when they are created.
    with jax.set_mesh(mesh) if mesh is not None else nullcontext():
        graphstate, graphother = jax.eval_shape(states)
    if mesh is None:
        graphstate, graphother = map(_place_by_names, (graphstate, graphother))
    return graphdefs[0], graphstate, graphother


def _place_by_names(state: GraphState) -> GraphState:
    """Places abstract Variables that name axes of the mesh of ``jax.set_mesh``, as
    flax places concrete ones; jax does so for explicit axes only."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return state

    def place(leaf: Any, spec: PartitionSpec) -> Any:
        if leaf.sharding is not None or not any(spec):
            return leaf
        return leaf.update(sharding=NamedSharding(mesh, spec))

    placed: GraphState = jax.tree.map(place, state, nnx.get_partition_spec(state))
    return placed


def join_parts(leaves: Iterable[tuple[VariablePath, Any]]) -> dict[str, GraphState]:
    """Returns the parts of a state that hold these leaves at their places."""
    parts: dict[str, dict[GraphPath, Any]] = {part: {} for part in PARTS}
    for (part, path), leaf in leaves:
        parts[part][path] = leaf
    return {part: refine_graphs(found) for part, found in parts.items()}


def stored_blueprint(
    graphdef: "nnx.GraphDef[Any]", leaves: Mapping[str, LeafInfo]
) -> Blueprint:
    """Returns the blueprint of a stored structure with a checkpoint's leaves."""
    paths = graph_paths(graphdef)
    # the rest of the path of each leaf, its path kinds, its value
    below: dict[GraphPath, list[tuple[tuple[PathPart, ...], str, Any]]]
    below = defaultdict(list)
    part_of: dict[GraphPath, str] = {}
    for leaf in leaves.values():
        if leaf.path[:1] not in {(part,) for part in PARTS}:
            continue
        path = leaf.path[1:]
        ends = [n for n in range(len(path) + 1) if path[:n] in paths]
        end = ends[0] if ends else len(path)  # fill_graph rejects unknown paths
        part_of[path[:end]] = str(leaf.path[0])
        kinds = leaf.path_kinds[1 + end :]
        below[path[:end]].append((path[end:], kinds, stand_in(leaf)))
    values = {  # arrays, and nested values of Variables
        path: nest((rest[1:], kinds[1:], leaf) for rest, kinds, leaf in found)
        for path, found in below.items()
    }
    try:
        module = fill_graph(graphdef, values)
    except ValueError as e:
        raise MismatchError(f"the structure does not fit its leaves: {e}") from e
    # Some flax releases do not treat a bare abstract array in a module as a leaf.
    held = {**values, **graph_leaves(nnx.state(module))}
    parts = join_parts(((part_of[path], path), leaf) for path, leaf in held.items())
    return Blueprint(graphdef=graphdef, make=None, **parts)


def stand_in(leaf: LeafInfo) -> Any:
    """Returns an abstract value that a restore replaces with the saved leaf."""
    if leaf.kind == "python_scalar":
        return {"bool": False, "int64": 0, "float64": 0.0}.get(leaf.dtype, 0j)
    if leaf.prng_impl is not None:
        key = jax.eval_shape(lambda: jax.random.key(0, impl=leaf.prng_impl))
        return jax.ShapeDtypeStruct(leaf.shape[:-1], key.dtype)
    dtype = DTYPES[leaf.dtype]
    if leaf.kind == "array":
        return jax.ShapeDtypeStruct(leaf.shape, dtype)
    zero = np.zeros((), dtype)
    if leaf.kind == "host_scalar":
        return zero[()]
    return np.broadcast_to(zero, leaf.shape)  # a view that takes no memory


def _maker(
    model: type, recipe: Recipe | None, mesh: Mesh | None, dtype: Any
) -> Callable[[], Any]:
    # Inspects __init__, because flax's metaclass shows only *args and **kwargs.
    accepted = inspect.signature(model.__init__).parameters  # type: ignore[misc]
    streams = ["default"] if recipe is None else recipe.rng_streams

    def rngs() -> dict[str, nnx.Rngs]:
        # The seeds do not matter: a restore replaces keys and counts.
        if "rngs" not in accepted:
            return {}
        return {"rngs": nnx.Rngs(dict.fromkeys(streams, 0))}

    if not takes_config(model, recipe):
        needed = [name for name in needed_arguments(model) if name != "rngs"]
        if needed:
            raise InvalidRequestError(
                "expected a class that needs no arguments but rngs, got "
                f"{model.__name__}, which needs {', '.join(needed)}; give a factory, "
                f"model={factory_text(model)}"
            )
        return lambda: model(**rngs())
    config = build_config(model, recipe)
    if mesh is not None and hasattr(config, "set_model_mesh"):
        config.set_model_mesh(mesh)  # EasyDeL models compute on their config's mesh
    arguments = {} if recipe is None else recipe.decode_arguments()
    if dtype is not None:
        arguments["param_dtype"] = DTYPES[str(checked_cast("cast=", dtype))]
    taken = {name: arguments[name] for name in arguments if name in accepted}
    return lambda: model(config=config, **taken, **rngs())
