"""Leaves that a checkpoint lacks are rejected, or keep the values of ``like``."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import storesvc_client as store


@pytest.fixture
def trained(run: store.Run) -> store.Run:
    """A run with a checkpoint of two leaves."""
    run.save(0, {"params": {"kernel": jnp.ones((8, 4))}, "step": 3}).result()
    return run


def like(**more: Any) -> dict[str, Any]:
    return {"params": {"kernel": jnp.zeros((8, 4))}, "step": 0, **more}


@pytest.mark.parametrize(
    "value",
    [jnp.arange(3.0), np.arange(3), np.float32(2.5), 7, 0.5, True, 1j],
    ids=lambda value: type(value).__name__,
)
def test_a_leaf_that_is_missing_keeps_the_value_of_like(
    trained: store.Run, value: Any
) -> None:
    back = trained.restore(0, like=like(new=value), missing="keep")

    assert back["new"] is value
    assert 3 == back["step"]
    assert 32.0 == float(back["params"]["kernel"].sum())


def test_by_default_a_leaf_that_is_missing_is_rejected(trained: store.Run) -> None:
    with pytest.raises(store.MismatchError, match="leaf 'new': not in the checkpoint"):
        trained.restore(0, like=like(new=7))
    with pytest.raises(store.MismatchError, match="leaf 'new': not in the checkpoint"):
        trained.restore(0, like=like(new=7), missing="error")


def test_one_error_lists_missing_and_mismatched_leaves(trained: store.Run) -> None:
    deleted = jnp.ones(2)
    deleted.delete()
    target = {
        "params": {"kernel": jnp.zeros((4, 8))},
        "abstract": jax.ShapeDtypeStruct((2,), jnp.float32),
        "deleted": deleted,
        "real": jnp.ones(2),
        "other": object(),
    }

    with pytest.raises(store.MismatchError) as caught:
        trained.restore(0, like=target, missing="keep")

    message = str(caught.value)
    for part in (
        "leaf 'abstract': not in the checkpoint, in the target (2,) float32; like=",
        "leaf 'deleted': not in the checkpoint, in the target (2,) float32; its",
        "leaf 'other': not in the checkpoint, in the target object; like= has no value",
        "leaf 'params/kernel': in the checkpoint (8, 4) float32, in the target (4, 8) ",
        "leaf 'step': in the checkpoint a Python scalar (int64), not in the target",
    ):
        assert part in message
    assert "'real'" not in message


def test_a_leaf_of_another_dtype_is_not_missing(trained: store.Run) -> None:
    target = {**like(), "params": {"kernel": jnp.zeros((8, 4), jnp.bfloat16)}}

    with pytest.raises(store.MismatchError, match=r"in the target .* bfloat16"):
        trained.restore(0, like=target, missing="keep")


def test_rules_place_kept_values(trained: store.Run) -> None:
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    target = like(
        lora=jnp.arange(16.0), key=jax.random.key(5), host=np.ones(3), count=4
    )

    back = trained.restore(
        0,
        like=target,
        mesh=mesh,
        rules=[("lora|kernel", PartitionSpec("fsdp")), ("", PartitionSpec())],
        missing="keep",
    )

    assert NamedSharding(mesh, PartitionSpec("fsdp")) == back["lora"].sharding
    np.testing.assert_array_equal(np.arange(16.0), back["lora"])
    assert NamedSharding(mesh, PartitionSpec()) == back["key"].sharding
    assert jax.random.key_data(target["key"]).tolist() == (
        jax.random.key_data(back["key"]).tolist()
    )
    assert back["host"] is target["host"]
    assert 4 == back["count"]


def test_without_rules_kept_values_keep_their_sharding(trained: store.Run) -> None:
    there = SingleDeviceSharding(jax.devices()[2])

    back = trained.restore(
        0, like=like(lora=jax.device_put(jnp.ones(2), there)), missing="keep"
    )

    assert there == back["lora"].sharding


def test_a_kept_value_without_a_rule_is_rejected(trained: store.Run) -> None:
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))

    with pytest.raises(store.MismatchError, match="leaf 'lora': no rule matches"):
        trained.restore(
            0,
            like=like(lora=jnp.ones(8)),
            mesh=mesh,
            rules=[("kernel", PartitionSpec())],
            missing="keep",
        )


def test_one_log_line_lists_the_leaves_kept_from_like(
    trained: store.Run, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "storesvc_client"):
        trained.restore(0, like=like(), missing="keep")
        assert [] == caplog.messages
        trained.restore(0, like=like(new=list(range(7))), missing="keep")

    line = (
        f"{trained.name}@0: 7 leaves that it lacks or select= leaves out keep the "
        "values of like=: new/0, new/1, new/2, new/3, new/4, ..."
    )
    assert [line] == caplog.messages


def test_an_unselected_leaf_counts_as_missing(trained: store.Run) -> None:
    with pytest.raises(store.MismatchError, match="'step': left out by select="):
        trained.restore(0, like=like(), select="params/**")

    kept = trained.restore(0, like=like(step=9), select="params/**", missing="keep")
    assert (9, 32.0) == (kept["step"], float(kept["params"]["kernel"].sum()))

    target = {"params": like()["params"], "new": 1}
    back = trained.restore(0, like=target, select="params/**", missing="keep")

    assert (1, 32.0) == (back["new"], float(back["params"]["kernel"].sum()))


def test_values_to_keep_need_a_tree_that_has_them(trained: store.Run) -> None:
    with pytest.raises(store.InvalidRequestError, match="expected like= with missing="):
        trained.restore(0, missing="keep")
    with pytest.raises(store.InvalidRequestError, match="missing= 'error' or 'keep'"):
        trained.restore(0, like=like(), missing="zeros")  # type: ignore[arg-type]  # no such choice
