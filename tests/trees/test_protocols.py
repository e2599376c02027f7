"""A custom module can do for a store everything that an EasyDeL model can."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import storesvc_client as store
from storesvc_client._pytree.partition_rules import Rules, shardings_by_rules
from storesvc_client.trees.easydel import EasyDeLState
from storesvc_client.trees.nnx.graphs import mesh_of, partition_rules_of, split_module
from storesvc_client.trees.protocols import (
    BaseModuleProtocol,
    Casts,
    HasGraph,
    HasLora,
    InitsLazily,
    Pretrained,
    Shards,
    SplitsParams,
    ToState,
    get_module_repr,
    prettify_nnx,
    printify_nnx,
)
from storesvc_client.trees.traversals import GraphState, graph_leaves

RULES = (("kernel", P("a", "b")), ("", P()))


def mesh(*sizes: int) -> Mesh:
    return jax.make_mesh(sizes, ("a", "b"), axis_types=(AxisType.Auto,) * 2)


@dataclass(frozen=True)
class ToyConfig:
    mesh: Mesh | None = None

    def get_partition_rules(self) -> Rules:
        return RULES


@contextmanager
def checkpoint_of(
    name: str | os.PathLike[str], client: store.Client | None
) -> Iterator[tuple[store.Run, str]]:
    """Returns a run and the text of a step for a name in the form of ``Pretrained``."""
    if client is not None:
        run, _, step = str(name).partition("@")
        yield client.run(run), step
        return
    with store.connect(Path(name).absolute().as_uri()) as embedded:
        yield embedded.run("pretrained/model"), ""


class ToyModel(nnx.Module):
    """The state part of the protocol, implemented with this library."""

    def __init__(self, config: ToyConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.linear = nnx.Linear(8, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y: jax.Array = self.dropout(self.linear(x))
        return y

    @property
    def graphdef(self) -> "nnx.GraphDef[Any]":
        return nnx.split(self, nnx.Param, ...)[0]

    @property
    def graphstate(self) -> GraphState:
        return nnx.state(self, nnx.Param)

    @property
    def graphother(self) -> GraphState:
        return nnx.state(self, nnx.Not(nnx.Param))

    def split_params(self) -> GraphState:
        return self.graphstate

    def merge_params(self, tree: Any) -> Self:
        merged: Self = EasyDeLState.create(model=self).merge(tree)
        return merged

    def split_params_dict(self, params_dict: dict[Any, Any]) -> dict[Any, Any]:
        given = graph_leaves(params_dict)
        return {
            name: {path: given[path] for path in graph_leaves(part) if path in given}
            for name, part in (
                ("graphstate", self.graphstate),
                ("graphother", self.graphother),
            )
        }

    def merge_params_dict(self, params_dict: dict[Any, Any]) -> Self:
        given = graph_leaves(params_dict)
        held = graph_leaves(self.graphstate).items()
        return self.merge_params({path: leaf.copy(given[path]) for path, leaf in held})

    def shard_model(
        self, partition_rules: Rules | None = None, mesh: Mesh | None = None
    ) -> Self:
        rules = partition_rules or partition_rules_of(self)
        devices = mesh or mesh_of(self)
        assert rules is not None
        assert devices is not None
        tree = self.graphstate
        shardings = shardings_by_rules(tree, devices, rules)
        return self.merge_params(jax.device_put(tree, shardings))

    def gather_model(
        self, partition_rules: Rules | None = None, mesh: Mesh | None = None
    ) -> Self:
        return self.shard_model([("", P())], mesh)

    @property
    def params_sharding(self) -> dict[Any, Any]:
        arrays = nnx.to_pure_dict(self.graphstate)
        return dict(jax.tree.map(lambda x: getattr(x, "sharding", None), arrays))

    def to_dtype(self, dtype: Any) -> Self:
        return self.merge_params(
            jax.tree.map(lambda x: x.astype(dtype), self.graphstate)
        )

    def half(self, change_runtime_dtype: bool = True) -> Self:
        return self.to_dtype(jnp.float16)

    def float(self, change_runtime_dtype: bool = True) -> Self:
        return self.to_dtype(jnp.float32)

    def to_state(self) -> EasyDeLState:
        return EasyDeLState.create(model=self)

    @classmethod
    def lazy_init(cls, *args: Any, **kwargs: Any) -> Self:
        rngs = kwargs.pop("rngs")
        model: Self = nnx.eval_shape(lambda rngs: cls(*args, rngs=rngs, **kwargs), rngs)
        return model

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        push_to_hub: bool = False,
        token: str | bool | None = None,
        gather_fns: dict[Any, Any] | None = None,
        float_dtype: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> Any:
        model = self if float_dtype is None else self.to_dtype(float_dtype)
        with checkpoint_of(save_directory, kwargs.get("client")) as (run, which):
            at = int(which or 0) if step is None else step
            run.save(at, model.graphstate).result()

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, **kwargs: Any
    ) -> Self:
        assert pretrained_model_name_or_path is not None
        model = cls(kwargs["config"], rngs=nnx.Rngs(1))
        client = kwargs.get("client")
        with checkpoint_of(pretrained_model_name_or_path, client) as (run, which):
            step: Any = int(which) if which.isdecimal() else "latest"
            like = cls.lazy_init(kwargs["config"], rngs=nnx.Rngs(1)).graphstate
            return model.merge_params(
                run.restore(step, like=like, mesh=mesh_of(model), rules=RULES)
            )


def toy(*sizes: int, seed: int = 0) -> ToyModel:
    config = ToyConfig(mesh(*sizes)) if sizes else ToyConfig(mesh(4, 2))
    return ToyModel(config, rngs=nnx.Rngs(seed))


def raws(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_a_model_of_ones_own_is_a_base_module() -> None:
    model: BaseModuleProtocol = toy()  # mypy checks the signatures

    assert isinstance(model, BaseModuleProtocol)
    assert not isinstance(model, HasLora)


PARTS = [HasGraph, SplitsParams, Shards, Casts, ToState, InitsLazily, Pretrained]


@pytest.mark.parametrize("part", [*PARTS, BaseModuleProtocol], ids=lambda p: p.__name__)
def test_a_plain_module_implements_none_of_the_protocols(part: type) -> None:
    assert not isinstance(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), part)
    assert isinstance(toy(), part)


def test_a_state_has_the_graph_of_its_model_and_no_more() -> None:
    state = toy().to_state()

    assert isinstance(state, HasGraph)
    assert not isinstance(state, BaseModuleProtocol)


def test_an_abstract_module_is_a_base_module_too() -> None:
    abstract = ToyModel.lazy_init(ToyConfig(), rngs=nnx.Rngs(0))

    assert isinstance(abstract, BaseModuleProtocol)
    assert isinstance(abstract.linear.kernel.get_value(), jax.ShapeDtypeStruct)


def test_a_directory_holds_a_pretrained_model(tmp_path: Path) -> None:
    model = toy()

    model.save_pretrained(tmp_path / "model", step=3)
    back = ToyModel.from_pretrained(tmp_path / "model", config=ToyConfig(mesh(2, 4)))

    assert raws(model.graphstate) == raws(back.graphstate)
    expected = NamedSharding(mesh(2, 4), P("a", "b"))
    assert expected == back.params_sharding["linear"]["kernel"]


def test_a_client_holds_pretrained_models_by_run_and_step(client: store.Client) -> None:
    first, second = toy(seed=1), toy(seed=2)

    first.save_pretrained("tests/toys@5", client=client)
    second.save_pretrained("tests/toys", step=6, client=client)

    for name, model in (("@5", first), ("@6", second), ("@latest", second)):
        back = ToyModel.from_pretrained(
            f"tests/toys{name}", client=client, config=model.config
        )
        assert raws(model.graphstate) == raws(back.graphstate)


def test_a_model_is_sharded_gathered_and_cast_without_a_change_of_itself() -> None:
    model = toy()
    before = model.params_sharding

    sharded = model.shard_model()
    gathered = sharded.gather_model()

    spec = sharded.params_sharding["linear"]["kernel"].spec
    assert P("a", "b") == spec
    assert P() == gathered.params_sharding["linear"]["kernel"].spec
    assert raws(model.graphstate) == raws(sharded.graphstate)
    assert jnp.float16 == model.half().linear.kernel.dtype
    assert jnp.float32 == model.half().float().linear.kernel.dtype
    assert before == model.params_sharding


def test_parameters_go_out_as_a_dict_and_come_in_again() -> None:
    model, other = toy(seed=1), toy(seed=2)
    params = nnx.to_pure_dict(model.split_params())

    back = other.merge_params_dict(params)
    parts = other.split_params_dict(params)

    assert raws(model.graphstate) == raws(back.graphstate)
    assert [2, 0] == [len(parts["graphstate"]), len(parts["graphother"])]


def test_a_plain_module_splits_into_parameters_and_the_rest() -> None:
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), dropout)

    graphdef, graphstate, graphother = split_module(model)

    assert {nnx.Param} == {type(x) for x in graph_leaves(graphstate).values()}
    assert {nnx.RngCount, nnx.RngKey} == {
        type(x) for x in graph_leaves(graphother).values()
    }
    merged: Any = nnx.merge(graphdef, graphstate, graphother)
    assert printify_nnx(model) == printify_nnx(merged)


def test_a_module_shares_the_variables_of_its_parts() -> None:
    model = toy()

    _, graphstate, graphother = split_module(model)
    model(jnp.ones((1, 8)))

    assert model.linear.kernel is graph_leaves(graphstate)["linear", "kernel"]
    count = graph_leaves(graphother)["dropout", "rngs", "count"]
    assert 1 == int(count.get_value())


class AdapterModel(ToyModel):
    """A model with adapters as in EasyDeL: the parameters are only some of the
    Params."""

    @property
    def graphstate(self) -> GraphState:
        return nnx.state(self, nnx.PathContains("bias"))


def test_a_model_is_split_by_its_own_parts() -> None:
    model = AdapterModel(ToyConfig(), rngs=nnx.Rngs(0))

    _, graphstate, _ = split_module(model)

    assert {("linear", "bias")} == set(graph_leaves(graphstate))


def test_a_state_splits_into_its_own_parts() -> None:
    state = EasyDeLState.create(model=toy(), tx=optax.sgd(0.1), init_opt_state=True)

    graphdef, graphstate, graphother = split_module(state)

    assert state.graphdef is graphdef
    assert state.graphstate is graphstate
    assert state.graphother is graphother


@pytest.mark.parametrize(
    ("thing", "got"),
    [
        ({"params": 1}, "got dict"),
        (ToyModel, "got the class ToyModel; create a module first"),
        (nnx.Linear, "got the class Linear"),
        (None, "got NoneType"),
    ],
)
def test_objects_that_are_not_modules_are_not_split(thing: Any, got: str) -> None:
    with pytest.raises(TypeError, match=r"expected an nnx\.Module, or") as caught:
        split_module(thing)

    assert got in str(caught.value)


class Bare:
    """A model with the mesh and rules that a test gives it."""

    def __init__(self, **said: Any) -> None:
        vars(self).update(said)


class Ruled(Bare):
    """A model with the methods of EasyDeL models."""

    rules: Any

    def _get_partition_rules(self, rules: Any) -> Any:
        return self.rules if rules is None else rules


def test_attributes_of_an_object_are_not_called_for_rules() -> None:
    held = Bare(_get_partition_rules=lambda _: [("", P())])

    assert partition_rules_of(held) is None


def test_a_model_provides_rules_and_a_mesh_or_none() -> None:
    devices = mesh(8, 1)
    like_easydel = Ruled(rules=[("asked", P("a"))], config=ToyConfig(devices))

    assert (("asked", P("a")),) == partition_rules_of(like_easydel)
    assert devices == mesh_of(like_easydel)
    assert RULES == partition_rules_of(toy())
    assert mesh(4, 2) == mesh_of(toy())
    assert devices == mesh_of(Bare(mesh=devices))
    for model in (nnx.Linear(2, 3, rngs=nnx.Rngs(0)), Bare(config=Bare())):
        assert partition_rules_of(model) is None
        assert mesh_of(model) is None
    assert mesh_of(Bare(config=ToyConfig())) is None


@pytest.mark.parametrize("rule", [("kernel", ("a", "b")), "kernel", (None, P())])
def test_rules_of_another_kind_are_rejected(rule: Any) -> None:
    model = Ruled(rules=[rule])

    with pytest.raises(TypeError, match="rules of Ruled: expected pairs of a regular"):
        partition_rules_of(model)


class Tree(nnx.Module):
    """Modules in lists and dicts, one in two places, and one inside itself."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(10, 4, rngs=rngs)
        self.head = nnx.Linear(4, 10, use_bias=False, rngs=rngs)
        self.head.kernel = self.embed.embedding  # tied
        self.layers = nnx.List([nnx.LayerNorm(4, rngs=rngs) for _ in range(11)][:2])
        self.named = nnx.Dict(head=self.head, drop=nnx.Dropout(0.1, rngs=rngs))
        self.plain = nnx.data({"x": (nnx.BatchNorm(4, rngs=rngs), 1), "none": ()})
        self.whole = self


TREE_TEXT = """\
Tree(
  (embed): Embedding(10, 4)
  (head): Linear(in_features=4, out_features=10, bias=False)
  (layers): List(
    (0): LayerNorm((4,), eps=1e-06)
    (1): LayerNorm((4,), eps=1e-06)
  )
  (named): Dict(
    (drop): Dropout(p=0.1)
    (head): Linear(in_features=4, out_features=10, bias=False), the one at head
  )
  (plain): ModuleDict(
    (x): ModuleList(
      (0): BatchNorm((4,), eps=1e-05)
    )
  )
  (whole): Tree, the one at the top
)"""


def test_a_module_is_a_text_with_all_modules_in_it() -> None:
    model = Tree(nnx.Rngs(0))
    abstract = nnx.eval_shape(lambda: Tree(nnx.Rngs(0)))

    assert TREE_TEXT == prettify_nnx(model)
    assert TREE_TEXT == prettify_nnx(abstract)
    assert "EasyDeL-" + TREE_TEXT == printify_nnx(model)


def test_a_text_ends_at_a_depth() -> None:
    model = Tree(nnx.Rngs(0))
    del model.embed, model.head, model.plain

    assert "Tree(...)" == prettify_nnx(model, max_depth=0)
    assert (
        "> Tree(\n>   (layers): List(...)\n>   (named): Dict(...)\n"
        ">   (whole): Tree, the one at the top\n> )"
    ) == prettify_nnx(model, "> ", max_depth=1)


def test_many_layers_are_written_in_their_order() -> None:
    layers = nnx.List([nnx.Dropout(i / 100) for i in range(12)])

    rates = [line.split("p=")[1] for line in prettify_nnx(layers).splitlines()[1:-1]]

    assert [f"{i / 100})" for i in range(12)] == rates


def test_a_module_without_dimensions_is_shown_by_its_type() -> None:
    assert "ToyModel" == get_module_repr(toy())
