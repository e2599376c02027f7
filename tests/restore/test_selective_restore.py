"""Restoring a part of a checkpoint, in another dtype, and never another leaf."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import storesvc_client as store
from tests.support.stable_ids import stable_id


def the_tree() -> dict[str, Any]:
    return {
        "params": {"layers": [{"kernel": jnp.linspace(0, 1, 6)} for _ in range(3)]},
        "moments": {"mu": jnp.ones((4, 2)), "count": jnp.asarray(7, jnp.int32)},
        "rng": jax.random.key(3),
        "loss": 0.125,
    }


def test_a_glob_restores_only_the_selected_leaves(run: store.Run) -> None:
    run.save(0, the_tree()).result()

    back = run.restore(0, select=["params/**", "loss"])

    assert {"params", "loss"} == set(back)
    assert 0.125 == back["loss"]
    np.testing.assert_array_equal(
        np.linspace(0, 1, 6, dtype=np.float32), back["params"]["layers"][2]["kernel"]
    )


def test_a_target_has_exactly_the_selected_leaves(run: store.Run) -> None:
    run.save(0, the_tree()).result()
    like = {"moments": the_tree()["moments"]}

    back = run.restore(0, like=like, select="moments/**")

    assert 7 == int(back["moments"]["count"])
    with pytest.raises(store.MismatchError, match="'moments/mu': left out by select="):
        run.restore(0, like=like, select="moments/count")
    with pytest.raises(store.MismatchError, match=r"'loss': in .* not in the target"):
        run.restore(0, like=like, select=["moments/**", "loss"])


def test_a_regular_expression_matches_anywhere_in_a_key(run: store.Run) -> None:
    run.save(0, the_tree()).result()

    back = run.restore(0, select=re.compile(r"/[12]/ker"))

    assert {"params"} == set(back)
    assert [False, True, True] == [
        "kernel" in (x or ()) for x in back["params"]["layers"]
    ]


def test_globs_and_regular_expressions_may_be_mixed(run: store.Run) -> None:
    run.save(0, the_tree()).result()

    back = run.restore(0, select=["params/layers/0/*", re.compile("^(loss|rng)$")])

    assert {"params", "loss", "rng"} == set(back)


def test_an_unmatched_regular_expression_suggests_near_keys(run: store.Run) -> None:
    run.save(0, the_tree()).result()

    with pytest.raises(
        store.NotFoundError, match=r"re.compile\('moments/nu\$'\); nearest: moments/mu"
    ):
        run.restore(0, select=["loss", re.compile("moments/nu$")])


@pytest.mark.parametrize(
    "select", [5.5, b"params/**", ["loss", 3], [["loss"]], re.compile(b"loss")]
)
def test_an_invalid_glob_is_rejected(run: store.Run, select: Any) -> None:
    run.save(0, the_tree()).result()

    with pytest.raises(
        store.InvalidRequestError,
        match=r"select=: expected globs or compiled regular expressions, got",
    ):
        run.restore(0, select=select)
    with pytest.raises(store.InvalidRequestError, match="keys: expected texts, got"):
        list(run.open(0).read(select))
    ((leaf, array),) = run.open(0).read("loss")
    assert ("loss", 0.125) == (leaf.key, float(array))


def test_an_unmatched_glob_suggests_near_keys(run: store.Run) -> None:
    run.save(0, the_tree()).result()

    with pytest.raises(store.NotFoundError, match=r"'moments/nu'.*nearest: moments/mu"):
        run.restore(0, select="moments/nu")
    with pytest.raises(store.NotFoundError, match="'zzz'; list its leaves to see all"):
        run.restore(0, select="zzz")


def test_floating_leaves_are_cast_and_others_are_not(run: store.Run) -> None:
    run.save(0, the_tree()).result()

    back = run.restore(0, cast="bfloat16")

    kernel = back["params"]["layers"][0]["kernel"]
    assert jnp.bfloat16 == kernel.dtype
    expected = jnp.linspace(0, 1, 6).astype(jnp.bfloat16)
    assert np.asarray(expected).tobytes() == np.asarray(kernel).tobytes()
    assert jnp.int32 == back["moments"]["count"].dtype
    assert 0.125 == back["loss"]
    assert (
        jax.random.key_data(jax.random.key(3)) == jax.random.key_data(back["rng"])
    ).all()


@pytest.mark.parametrize(
    "cast", ["int32", "float31", np.int8, object(), "O"], ids=stable_id
)
def test_a_cast_to_a_non_floating_dtype_is_rejected(run: store.Run, cast: Any) -> None:
    run.save(0, {"a": jnp.ones(3)}).result()

    with pytest.raises(store.InvalidRequestError, match="floating-point dtype"):
        run.restore(0, cast=cast)


def test_a_number_and_its_text_are_different_keys(run: store.Run) -> None:
    run.save(0, {"layers": {i: jnp.full(1, i) for i in range(12)}}).result()
    like = {"layers": {str(i): jnp.zeros(1, jnp.int32) for i in range(12)}}

    with pytest.raises(store.MismatchError) as caught:
        run.restore(0, like=like)

    assert (
        "leaf 'layers/10': in the checkpoint the path ['layers'][10], in the target "
        "['layers']['10']; a number and its text are different keys"
    ) in str(caught.value)


def test_the_container_type_is_not_part_of_a_key(run: store.Run) -> None:
    run.save(0, {"layers": [jnp.zeros(1), jnp.ones(1)]}).result()

    back = run.restore(0, like={"layers": {0: jnp.zeros(1), 1: jnp.zeros(1)}})

    assert {"layers": {0: [0.0], 1: [1.0]}} == jax.tree.map(lambda x: x.tolist(), back)


def test_an_open_checkpoint_does_not_follow_newer_ones(run: store.Run) -> None:
    run.save(0, the_tree(), document=b"a document").result()
    opened = run.open()
    run.save(1, {"x": jnp.ones(1)}).result()

    assert 0 == opened.info.step
    assert f"{run.name}@0" == opened.name
    assert b"a document" == opened.document
    assert "loss" in opened.leaves
    assert {"loss": 0.125} == opened.restore(select="loss")
    assert [0.125] == [float(array) for _, array in opened.read(["loss"])]
    assert b"" == run.open().document


def test_a_step_may_be_any_integer(run: store.Run) -> None:
    run.save(np.int64(7), {"x": jnp.ones(1)}).result()

    assert 7 == run.checkpoint(np.int64(7)).step  # type: ignore[arg-type]  # as jax counts
    with pytest.raises(store.InvalidRequestError, match="expected a step"):
        run.checkpoint(7.0)  # type: ignore[arg-type]  # no step
    with pytest.raises(store.InvalidRequestError, match="expected a step"):
        run.checkpoint(True)
