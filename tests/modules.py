"""Catalog of NNX modules: every layer and idiom that a checkpoint should preserve.

``CASES`` has factories of modules and functions that call the modules; ``modules`` is a
Hypothesis strategy for random small ones. The modules compute the same on every flax
release that the client supports.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.nnx import bridge
from hypothesis import strategies as st
from jax.sharding import AxisType

Module: TypeAlias = Any
"""An nnx.Module, or a list or dict of modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One module of the catalogue."""

    make: Callable[[], Module]
    call: Callable[[Module], Any]
    """Returns arrays that depend on the module's parameters and settings."""
    allow: tuple[Any, ...] = field(default=())
    """Classes and functions of this file that the module's structure names."""
    needs_template: bool = False
    """True if the module has values that no document can hold."""


def rngs(seed: int = 0) -> nnx.Rngs:
    """Creates streams of random numbers."""
    return nnx.Rngs(seed)


def inputs(*shape: int) -> jax.Array:
    """Returns an input without equal numbers."""
    size = 1
    for length in shape:
        size *= length
    return jnp.linspace(-1.0, 1.0, size).reshape(shape)


class MovingAverage(nnx.Variable[Any]):
    """A custom Variable type."""


class Residual(nnx.Module):
    """Adds the output of a layer to its input, and counts calls."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.average = MovingAverage(jnp.full((4,), 0.5))
        self.offset = nnx.data(jnp.arange(4.0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.linear(x) * self.average[...] + self.offset


class Perceptron(nnx.Module):
    """BatchNorm and dropout between two layers."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


class Tied(nnx.Module):
    """One module under two names, and one Variable in two modules."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.encoder = nnx.Linear(4, 4, rngs=rngs)
        self.decoder = nnx.Linear(4, 4, rngs=rngs)
        self.decoder.kernel = self.encoder.kernel
        self.again = self.encoder

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.decoder(self.again(self.encoder(x)))


class Child(nnx.Module):
    """A module with a reference to its parent."""

    def __init__(self, parent: "Parent", *, rngs: nnx.Rngs) -> None:
        self.parent = parent
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) * self.parent.scale[...]


class Parent(nnx.Module):
    """A cycle: the child refers to this module."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(jnp.full((4,), 2.0))
        self.child = Child(self, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.child(x)


class Settings(nnx.Module):
    """Static fields of all kinds, and initializers."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        init = nnx.initializers
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.names = ("a", None, 2.5, True, 7)
        self.table = nnx.static({"eps": 1e-6, "shape": (1, 2)})
        self.missing = float("nan")
        self.code = b"\x00\xff"
        self.dtype = jnp.bfloat16
        self.precision = jax.lax.Precision.HIGH
        self.act = nnx.gelu
        self.reduce = partial(jnp.sum, axis=-1)
        self.inits = (
            init.normal(0.1),
            init.truncated_normal(0.02),
            init.uniform(0.1),
            init.constant(3.0),
            init.xavier_uniform(dtype=jnp.bfloat16),
            init.he_normal(),
            init.orthogonal(),
            init.zeros,
            nnx.with_partitioning(init.lecun_normal(), ("fsdp", None)),
        )

    def __call__(self, x: jax.Array) -> Any:
        made = [init(jax.random.key(0), (4, 4), jnp.float32) for init in self.inits[:2]]
        return self.reduce(self.act(self.linear(x))), made


class Nested(nnx.Module):
    """Lists of more than ten items, dicts, and a Variable that holds a tree."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(12)])
        self.named = nnx.Dict(
            a=nnx.Linear(4, 4, rngs=rngs), b=nnx.List([nnx.Linear(4, 4, rngs=rngs)])
        )
        self.tree = nnx.Param({"w": jnp.ones((4,)), "l": [jnp.zeros((4,))]})

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        named: Any = self.named
        tree: Any = self.tree.get_value()
        return jnp.asarray(named["b"][0](named["a"](x)) * tree["w"])


class Closure(nnx.Module):
    """An activation that no document can hold."""

    def __init__(self, *, rngs: nnx.Rngs, power: int = 3) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.act: Any = lambda x: x**power

    def __call__(self, x: jax.Array) -> Any:
        return self.act(self.linear(x))


class Partitioned(nnx.Module):
    """A module whose kernel names mesh axes."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal()
        self.linear = nnx.Linear(
            4, 4, kernel_init=nnx.with_partitioning(init, ("fsdp", "tp")), rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


class Block(nnx.Module):
    """One layer of a transformer."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=width, decode=False, rngs=rngs
        )
        self.widen = nnx.Linear(width, 2 * width, rngs=rngs)
        self.narrow = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.narrow(nnx.gelu(self.widen(x)))


class Transformer(nnx.Module):
    """Twelve layers, so that layer 10 sorts before layer 2 by name."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(16, 4, rngs=rngs)
        self.layers = nnx.List([Block(4, rngs=rngs) for _ in range(12)])
        self.norm = nnx.RMSNorm(4, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(self.norm(x))


class Convolutional(nnx.Module):
    """Convolutions with BatchNorm."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.convs = nnx.List(
            [nnx.Conv(1, 4, (3, 3), rngs=rngs), nnx.Conv(4, 4, (3, 3), rngs=rngs)]
        )
        self.norms = nnx.List([nnx.BatchNorm(4, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(norm(conv(x)))
        return self.head(nnx.avg_pool(x, (2, 2), (2, 2)).mean(axis=(1, 2)))


class LinenNet(nn.Module):
    """A Linen module, for the bridge."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        x = nn.Dense(self.features)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(4)(nn.relu(x))


def _bridged() -> Module:
    module = bridge.ToNNX(LinenNet(8), rngs=rngs())
    bridge.lazy_init(module, inputs(2, 4))
    return module


def _partitioned() -> Module:
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        return Partitioned(rngs=rngs())


def _optimizer() -> Module:
    model = Perceptron(rngs=rngs())
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return nnx.List([model, nnx.Optimizer(model, tx, wrt=nnx.Param)])


def _trained(pair: Module) -> Any:
    """Runs one step of the optimizer, then returns the output."""
    model, optimizer = pair
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    optimizer.update(model, grads)
    return model(inputs(2, 4))


def _draw(streams: nnx.Rngs) -> Any:
    return [jax.random.key_data(streams.params()), jax.random.uniform(streams())]


def _last(model: Module) -> Any:
    return model(inputs(1, 3, 4))


def _recurrent(cell: Callable[..., Any]) -> Module:
    return nnx.RNN(cell(4, 8, rngs=rngs()))


def _step(cell: Module) -> Any:
    return cell(cell.initialize_carry((2, 4), rngs()), inputs(2, 4))


def _on(*shape: int) -> Callable[[Module], Any]:
    return lambda module: module(inputs(*shape))


def _case(make: Callable[[], Module], *allow: Any) -> Case:
    return Case(make=make, call=_on(2, 4), allow=allow)


CASES: dict[str, Case] = {
    "linear": _case(lambda: nnx.Linear(4, 3, rngs=rngs())),
    "linear in bfloat16": _case(
        lambda: nnx.Linear(
            4, 3, dtype=jnp.bfloat16, precision=jax.lax.Precision.HIGHEST, rngs=rngs()
        )
    ),
    "conv": Case(make=lambda: nnx.Conv(4, 3, (3,), rngs=rngs()), call=_on(1, 5, 4)),
    "sequential": _case(
        lambda: nnx.Sequential(
            nnx.Linear(4, 4, rngs=rngs()), nnx.relu, nnx.LayerNorm(4, rngs=rngs())
        )
    ),
    "batch norm": _case(lambda: nnx.BatchNorm(4, rngs=rngs())),
    "layer norm": _case(lambda: nnx.LayerNorm(4, epsilon=1e-5, rngs=rngs())),
    "group norm": _case(lambda: nnx.GroupNorm(4, num_groups=2, rngs=rngs())),
    "embed": Case(
        make=lambda: nnx.Embed(8, 4, rngs=rngs()),
        call=lambda module: module(jnp.arange(5)),
    ),
    "dropout": _case(lambda: nnx.Dropout(0.5, rngs=rngs())),
    "perceptron": _case(lambda: Perceptron(rngs=rngs()), Perceptron),
    "attention": Case(
        make=lambda: nnx.MultiHeadAttention(2, 4, 8, decode=False, rngs=rngs()),
        call=_last,
    ),
    "lstm cell": Case(make=lambda: nnx.LSTMCell(4, 8, rngs=rngs()), call=_step),
    "gru cell": Case(make=lambda: nnx.GRUCell(4, 8, rngs=rngs()), call=_step),
    "rnn": Case(make=lambda: _recurrent(nnx.LSTMCell), call=_last),
    "bidirectional": Case(
        make=lambda: nnx.Bidirectional(
            _recurrent(nnx.GRUCell), _recurrent(nnx.GRUCell), rngs=rngs()
        ),
        call=_last,
    ),
    "tied": _case(lambda: Tied(rngs=rngs()), Tied),
    "cycle": _case(lambda: Parent(rngs=rngs()), Parent, Child),
    "settings": _case(lambda: Settings(rngs=rngs()), Settings),
    "nested": _case(lambda: Nested(rngs=rngs()), Nested),
    "dict of modules": Case(
        make=lambda: {
            "a": nnx.Linear(4, 4, rngs=rngs()),
            "b": [nnx.Linear(4, 4, rngs=rngs(1))],
        },
        call=lambda root: root["b"][0](root["a"](inputs(2, 4))),
    ),
    "list of modules": Case(
        make=lambda: [nnx.Linear(4, 4, rngs=rngs(seed)) for seed in range(2)],
        call=lambda root: root[1](root[0](inputs(2, 4))),
    ),
    "partitioned": _case(_partitioned, Partitioned),
    "custom variable": _case(lambda: Residual(rngs=rngs()), Residual, MovingAverage),
    "lora": _case(
        lambda: nnx.LoRA(
            4, 2, 4, base_module=nnx.Linear(4, 4, rngs=rngs()), rngs=rngs()
        )
    ),
    "bridge": _case(_bridged, LinenNet),
    "optimizer": Case(
        make=_optimizer, call=_trained, allow=(Perceptron,), needs_template=True
    ),
    "closure": Case(
        make=lambda: Closure(rngs=rngs()),
        call=_on(2, 4),
        allow=(Closure,),
        needs_template=True,
    ),
    "rngs": Case(make=lambda: nnx.Rngs(0, params=1), call=_draw),
    "transformer": Case(
        make=lambda: Transformer(rngs=rngs()),
        call=lambda module: module(jnp.arange(6).reshape(1, 6)),
        allow=(Transformer, Block),
    ),
    "convolutional": Case(
        make=lambda: Convolutional(rngs=rngs()),
        call=_on(1, 6, 6, 1),
        allow=(Convolutional,),
    ),
}


class Holder(nnx.Module):
    """Random modules of ``modules``: children and settings by name."""

    def __init__(self, parts: dict[str, Any]) -> None:
        for name, part in parts.items():
            setattr(self, name, part)


ALLOW = (Holder, MovingAverage)
"""Names that the structures of ``modules`` contain."""

_leaves = st.one_of(
    st.builds(
        lambda n, seed: nnx.Linear(n, 2, rngs=rngs(seed)),
        st.integers(1, 3),
        st.integers(0, 3),
    ),
    st.builds(lambda n: nnx.BatchNorm(n, rngs=rngs()), st.integers(1, 3)),
    st.builds(lambda rate: nnx.Dropout(rate, rngs=rngs()), st.sampled_from((0.0, 0.5))),
    st.builds(lambda n: MovingAverage(jnp.arange(n)), st.integers(0, 3)),
    st.builds(lambda n: nnx.Param(jnp.full((n,), 2.0)), st.integers(0, 3)),
)
_names = st.text("abcxyz_", min_size=1, max_size=4).filter(
    lambda name: not name.startswith("_")
)
_settings = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.tuples(st.integers(0, 9), st.text(max_size=2)),
    st.sampled_from((jnp.float32, jnp.bfloat16, nnx.gelu, jax.lax.Precision.HIGH)),
)


def _holders(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    parts = st.dictionaries(_names, st.one_of(children, _settings), max_size=4)
    return st.one_of(
        st.builds(Holder, parts),
        st.builds(nnx.List, st.lists(children, max_size=12)),
        st.builds(nnx.Dict, st.dictionaries(_names, children, max_size=3)),
        st.builds(lambda part: Holder({"one": part, "same": part}), children),
    )


_parts: st.SearchStrategy[Any] = st.deferred(
    lambda: st.one_of(_leaves, _leaves, _leaves, _holders(_parts))
)


def modules() -> st.SearchStrategy[Module]:
    """Draws random modules of layers, custom Variables, lists, dicts, ties and
    settings."""
    return _holders(_parts)
