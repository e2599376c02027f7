"""Rules whose axes do not divide a leaf are refused on each route, or asked for."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import jax
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import storesvc_client as store
from storesvc_client.easydel import restore_model, restore_state
from storesvc_client.nnx import restore_into, save
from storesvc_client.trees.easydel import EasyDeLState

TX: Final = optax.adam(0.1)
RULES: Final = [("kernel", P("a")), ("", P())]
MISFIT: Final = "dimension 0 of 6 is not divisible by axis 'a' of 4"


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("a", "b"))


def module() -> nnx.Linear:
    return nnx.Linear(6, 2, rngs=nnx.Rngs(0))


class WithMore(nnx.Module):
    """A module with a Variable that the checkpoint lacks."""

    def __init__(self) -> None:
        linear = module()
        self.kernel, self.bias, self.more = linear.kernel, linear.bias, module().kernel


class Ruled(nnx.Linear):
    """A module that provides its mesh and rules, as EasyDeL's do."""

    mesh = mesh()

    def __init__(self) -> None:
        super().__init__(6, 2, rngs=nnx.Rngs(0))

    def _get_partition_rules(self, rules: Any) -> Any:
        return RULES if rules is None else rules


def state() -> EasyDeLState:
    return EasyDeLState.create(model=module(), tx=TX, init_opt_state=True)


def into(run: store.Run, _: Path, **how: Any) -> Any:
    model = module()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    restore_into(run, model, optimizer, **how)
    return model


def mounted(run: store.Run, folder: Path, **how: Any) -> Any:
    if not (folder / "1").exists():
        run.export(1, f"orbax:{folder}")
    return store.open_foreign(f"orbax:{folder}").restore(**how)


def sharded(change: Callable[..., Any]) -> Callable[..., Any]:
    return lambda run, folder, *, mesh, rules, **how: change(rules, mesh=mesh, **how)


ROUTES: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "run": lambda run, _, **how: run.restore(**how),
        "open": lambda run, _, **how: run.open().restore(**how),
        "foreign": mounted,
        "into": into,
        "model": lambda run, _, **how: restore_model(run, **how),
        "state": lambda run, _, **how: restore_state(run, model=module, tx=TX, **how),
        "containers": lambda run, _, **how: restore_state(run, **how),
        "more": lambda run, _, **how: restore_model(
            run, model=WithMore, missing="init", on_mismatch="log", **how
        ),
        "shard_state": sharded(lambda *at, **how: state().shard_state(*at, **how)),
        "shard_model": sharded(lambda *at, **how: state().shard_model(*at, **how)),
        "shard_optimizer": sharded(
            lambda *at, **how: state().shard_optimizer_state(None, *at, **how)
        ),
        "init_tx": sharded(
            lambda rules, mesh, **how: (
                state().shard_state([("", P())], mesh).init_tx(TX, rules, **how)
            )
        ),
    }
)


@pytest.mark.parametrize("route", ROUTES)
def test_each_route_refuses_it_and_takes_it_if_asked(
    run: store.Run, tmp_path: Path, route: str
) -> None:
    model = module()
    save(run, 1, model, nnx.Optimizer(model, TX, wrt=nnx.Param)).result()
    how: dict[str, Any] = {"mesh": mesh(), "rules": RULES}
    if route == "more":
        how["rules"] = [("more", P("a")), ("", P())]

    with pytest.raises(store.MismatchError, match=MISFIT) as caught:
        ROUTES[route](run, tmp_path / "to", **how)
    back = ROUTES[route](run, tmp_path / "to", indivisible="replicate", **how)

    assert "indivisible='replicate'" in str(caught.value)
    assert "give the model" not in str(caught.value)
    leaves = [
        leaf
        for leaf in jax.tree.leaves(
            nnx.state(back) if route in ("into", "model", "more") else back
        )
        if getattr(leaf, "shape", ()) == (6, 2)
    ]
    assert leaves
    assert all(leaf.sharding.is_fully_replicated for leaf in leaves)


def test_rules_of_a_model_fit_as_far_as_they_do_as_in_easydel(
    run: store.Run, caplog: pytest.LogCaptureFixture
) -> None:
    made = EasyDeLState.create(model=Ruled(), tx=TX, init_opt_state=True)
    with caplog.at_level(logging.WARNING, "storesvc_client"):
        made = made.shard_state().init_tx(TX)
        made.save_state(run)

        back: Any = restore_state(run, model=Ruled, tx=TX)
        loaded = back.load_optimizer(run)

    for one in (made, back, loaded):
        opt_state: Any = one.opt_state
        kernel = opt_state[0].mu["kernel"][...]
        assert (Ruled.mesh, P(None)) == (kernel.sharding.mesh, kernel.sharding.spec)
    assert MISFIT in caplog.text
