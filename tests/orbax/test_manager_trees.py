"""``CheckpointManager``: trees, targets and items come back as from Orbax's."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import args

from storesvc_client import orbax
from tests.orbax.conftest import NewManager, commit
from tests.support.stable_ids import stable_id


class Pair(NamedTuple):
    first: Any
    second: Any


STATE = {
    "array": np.arange(6, dtype=np.int32).reshape(2, 3),
    "device": jnp.arange(4.0),
    "half": jnp.ones(3, jnp.bfloat16),
    "scalar": jnp.int32(7),
    "int": 3,
    "float": 1.5,
    "none": None,
    "empty": {},
    "list": [],
    "pair": Pair(jnp.ones(1), jnp.zeros(2)),
    "tuple": (jnp.ones(2), 4),
}


def saved(manager: Any, tree: Any, **options: Any) -> Any:
    commit(manager, 1, args.StandardSave(tree, **options))
    return manager


def described(tree: Any) -> Any:
    """Returns types, dtypes and values of the leaves of a tree, and its structure."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [
        (
            isinstance(leaf, jax.Array),
            type(leaf) if isinstance(leaf, bool | int | float) else None,
            np.asarray(leaf).dtype.name,
            np.asarray(leaf).tolist(),
        )
        for leaf in leaves
    ]


def test_a_state_comes_back_in_the_structure_of_the_target(
    new_manager: NewManager,
) -> None:
    manager = saved(new_manager(), STATE)
    found = manager.restore(1, args=args.StandardRestore(STATE))
    assert described(found) == described(STATE)


def test_abstract_targets_restore_arrays(new_manager: NewManager) -> None:
    manager = saved(new_manager(), STATE)
    target = jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x
        ),
        STATE,
    )
    found = manager.restore(1, args=args.StandardRestore(target))
    assert described(found) == described(STATE)


def test_without_a_target_named_tuples_become_dicts(new_manager: NewManager) -> None:
    tree = {name: STATE[name] for name in STATE if name != "tuple"}
    manager = saved(new_manager(), tree)
    expected = {**tree, "pair": tree["pair"]._asdict()}
    assert described(manager.restore(1)) == described(expected)


@pytest.mark.parametrize(
    ("was", "target"),
    [
        (jnp.arange(4.0), jax.ShapeDtypeStruct((4,), jnp.bfloat16)),
        (jnp.arange(4.0), jax.ShapeDtypeStruct((4,), jnp.int32)),
        (jnp.arange(4.0), np.zeros(4, np.float64)),
        (jnp.arange(4.0), np.zeros(4, np.float32)),
        (3, jnp.int32(0)),
        (3, 0.0),
        (jnp.int32(5), 0),
        (jnp.float32(5), 0.0),
    ],
    ids=[
        "bfloat16",
        "int32",
        "host-float64",
        "host",
        "array-of-int",
        "float-of-int",
        "int-of-array",
        "float-of-array",
    ],
)
def test_a_leaf_becomes_what_the_target_is(
    new_manager: NewManager, was: Any, target: Any
) -> None:
    manager = saved(new_manager(), {"x": was, "y": jnp.ones(1)})
    target = {"x": target, "y": jnp.zeros(1)}
    found = manager.restore(1, args=args.StandardRestore(target))
    x = target["x"]
    expected = type(x) if isinstance(x, int | float) else np.dtype(x.dtype)
    got = found["x"]
    kind = type(got) if isinstance(got, int | float) else np.dtype(got.dtype)
    assert kind == expected
    is_host = isinstance(x, np.ndarray | int | float)
    assert isinstance(got, jax.Array) == (not is_host)
    assert np.asarray(got).tolist() == np.asarray(was).tolist()


@pytest.mark.parametrize(
    "target",
    [
        {"w": jnp.zeros(4)},
        {"w": jnp.zeros(4), "b": 0, "more": jnp.zeros(1)},
        {"w": jax.ShapeDtypeStruct((2,), jnp.float32), "b": 0},
    ],
    ids=["fewer", "more", "shape"],
)
def test_a_target_that_does_not_fit_is_rejected(
    new_manager: NewManager, target: Any
) -> None:
    manager = saved(new_manager(), {"w": jnp.ones(4), "b": 1})
    with pytest.raises(ValueError, match=r"match|shape|fit"):
        manager.restore(1, args=args.StandardRestore(target))


def test_none_in_a_target_is_not_read(new_manager: NewManager) -> None:
    manager = saved(new_manager(), {"w": jnp.ones(4), "b": jnp.zeros(1)})
    target = {"w": None, "b": jnp.ones(1)}
    found = manager.restore(1, args=args.StandardRestore(target))
    assert described(found) == described({"w": None, "b": jnp.zeros(1)})


def test_typed_keys_come_back(new_manager: NewManager) -> None:
    tree = {"key": jax.random.key(3), "w": jnp.ones(1)}
    manager = saved(new_manager(), tree)
    found = manager.restore(1, args=args.StandardRestore(tree))["key"]
    assert found.dtype == tree["key"].dtype
    expected = jax.random.key_data(tree["key"]).tolist()
    assert jax.random.key_data(found).tolist() == expected


def test_the_sharding_is_that_of_the_target(new_manager: NewManager) -> None:
    mesh = jax.make_mesh((8,), ("x",))
    whole, split = (
        NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("x"))
    )
    manager = saved(new_manager(), {"w": jax.device_put(jnp.arange(8.0), whole)})
    target = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=split)}
    found = manager.restore(1, args=args.StandardRestore(target))["w"]
    assert found.sharding.is_equivalent_to(split, 1)
    assert found.tolist() == [*range(8)]


def test_a_target_without_a_sharding_takes_the_saved_one(
    new_manager: NewManager,
) -> None:
    mesh = jax.make_mesh((8,), ("x",))
    split = NamedSharding(mesh, PartitionSpec("x"))
    manager = saved(new_manager(), {"w": jax.device_put(jnp.arange(8.0), split)})
    target = {"w": jax.ShapeDtypeStruct((8,), jnp.float32)}
    found = manager.restore(1, args=args.StandardRestore(target))["w"]
    assert found.sharding.is_equivalent_to(split, 1)


def test_states_of_optax_come_back(new_manager: NewManager) -> None:
    params = {"w": jnp.ones((2, 2)), "b": jnp.zeros(2)}
    tx = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    state = {"params": params, "opt": tx.init(params), "step": 3}
    manager = saved(new_manager(), state)
    target = jax.tree.map(jnp.zeros_like, {**state, "step": 0})
    target["step"] = 0
    found = manager.restore(1, args=args.StandardRestore(target))
    assert described(found) == described(state)


def test_states_of_nnx_come_back(new_manager: NewManager) -> None:
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    state = nnx.state(model)
    manager = saved(new_manager(), state)
    target = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(1)))
    found = manager.restore(1, args=args.StandardRestore(target))
    assert described(found) == described(state)


def pytree_manager(new_manager: NewManager, tree: Any) -> Any:
    """Returns a manager whose only item, a tree that it has saved as step 1, is read
    with ``PyTreeRestore``."""
    manager = new_manager(item_handlers=ocp.PyTreeCheckpointHandler())
    commit(manager, 1, args.PyTreeSave(tree))
    return manager


def test_a_part_of_a_tree_is_restored(new_manager: NewManager) -> None:
    tree = {"params": {"w": jnp.ones(4)}, "opt": {"m": jnp.zeros(4)}}
    manager = pytree_manager(new_manager, tree)
    target = {"params": {"w": jnp.zeros(4)}}
    found = manager.restore(
        1,
        args=args.PyTreeRestore(
            item=target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            partial_restore=True,
        ),
    )
    assert described(found) == described({"params": tree["params"]})


SAVED = {
    "w": jnp.ones(4),
    "opt": {"m": jnp.zeros(2), "v": np.ones(2)},
    "list": [jnp.ones(1), jnp.ones(1)],
}
ABSTRACT = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=jnp.ones(3).sharding)


def wide_args(tree: Any) -> Any:
    return ocp.checkpoint_utils.construct_restore_args(tree)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize(
    ("target", "restore_args", "expected"),
    [
        ({"w": 0, "aux": ABSTRACT}, None, {"w": SAVED["w"], "aux": ABSTRACT}),
        ({"w": 0, "aux": {"n": 7}}, None, {"w": SAVED["w"], "aux": {"n": 7}}),
        ({"aux": 1}, None, {"aux": 1}),
        ({"list": [0, 0]}, None, {"list": SAVED["list"]}),
        (
            {"w": 0, "opt": {"m": 0}},
            SAVED,
            {"w": SAVED["w"], "opt": {"m": jnp.zeros(2)}},
        ),
    ],
    ids=["struct", "number", "nothing", "list", "wide-args"],
)
def test_a_partial_restore_keeps_what_the_step_lacks(
    new_manager: NewManager,
    caplog: pytest.LogCaptureFixture,
    target: Any,
    restore_args: Any,
    expected: Any,
) -> None:
    manager = pytree_manager(new_manager, SAVED)
    found = manager.restore(
        1,
        args=args.PyTreeRestore(
            target,
            restore_args=restore_args and wide_args(restore_args),
            partial_restore=True,
        ),
    )
    assert described(found) == described(expected)
    if isinstance(manager, orbax.CheckpointManager):
        assert ("returned unchanged: aux" in caplog.text) == ("aux" in target)


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ({"w": 0, "opt": 0}, "opt"),
        ({"w": {"k": 0}}, "w"),
        ({"list": [0, 0, 0]}, "list"),
        ({"list": [0]}, "list"),
    ],
    ids=["leaf-for-dict", "dict-for-leaf", "longer", "shorter"],
)
def test_a_partial_restore_into_other_containers_is_rejected(
    new_manager: NewManager, target: Any, named: str
) -> None:
    manager = pytree_manager(new_manager, SAVED)
    wanted = args.PyTreeRestore(target, partial_restore=True)
    with pytest.raises((ValueError, TypeError), match=named):
        manager.restore(1, args=wanted)


def test_a_target_with_other_leaves_is_rejected_with_advice_that_works(
    our_manager: NewManager,
) -> None:
    manager = our_manager()
    commit(manager, 1, args.PyTreeSave({"w": jnp.ones(4), "b": jnp.ones(2)}))
    target = {"w": 0, "z": ABSTRACT}
    with pytest.raises(orbax.TreeMismatchError) as caught:
        manager.restore(1, args=args.PyTreeRestore(target))
    assert str(caught.value).split(": ", 1)[1] == (
        "leaf 'z': in the target (3,) float32, not saved; leaf 'b': saved as (2,) "
        "float32, not in the target; PyTreeRestore(partial_restore=True), in version 1 "
        "partial_load of a context, restores what both have"
    )
    found = manager.restore(1, args=args.PyTreeRestore(target, partial_restore=True))
    assert (found["w"].tolist(), found["z"]) == ([1.0] * 4, ABSTRACT)


def test_of_many_leaves_that_the_step_lacks_the_first_are_named(
    our_manager: NewManager,
) -> None:
    manager = our_manager()
    commit(manager, 1, args.PyTreeSave({"w": jnp.ones(4)}))
    target = {"w": 0, **{f"x{number:02}": 0 for number in range(25)}}
    with pytest.raises(orbax.TreeMismatchError) as caught:
        manager.restore(1, args=args.PyTreeRestore(target))
    text = str(caught.value)
    assert ("'x19'" in text, "'x20'" in text, "; 6 more; PyTreeRestore(" in text) == (
        *(True, False, True),
    )


def test_arguments_that_lack_a_leaf_are_rejected(new_manager: NewManager) -> None:
    manager = pytree_manager(new_manager, SAVED)
    wanted = args.PyTreeRestore(
        {"w": 0, "opt": {"m": 0}},
        restore_args={"w": ocp.RestoreArgs()},
        partial_restore=True,
    )
    with pytest.raises(ValueError, match="opt"):
        manager.restore(1, args=wanted)


def test_restore_args_decide_dtype_sharding_and_type(new_manager: NewManager) -> None:
    tree = {"w": jnp.arange(8.0), "n": jnp.int32(4), "h": jnp.ones(2)}
    manager = pytree_manager(new_manager, tree)
    split = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x"))
    found = manager.restore(
        1,
        args=args.PyTreeRestore(
            item=tree,
            restore_args={
                "w": ocp.ArrayRestoreArgs(sharding=split, dtype=jnp.bfloat16),
                "n": ocp.RestoreArgs(restore_type=int),
                "h": ocp.RestoreArgs(restore_type=np.ndarray),
            },
        ),
    )
    assert (found["w"].dtype, type(found["n"]), type(found["h"])) == (
        jnp.bfloat16,
        int,
        np.ndarray,
    )
    assert found["w"].sharding.is_equivalent_to(split, 1)


def test_save_args_decide_the_stored_dtype(new_manager: NewManager) -> None:
    tree = {"w": jnp.arange(4.0)}
    given = {"w": ocp.SaveArgs(dtype=np.dtype(jnp.bfloat16))}
    manager = saved(new_manager(), tree, save_args=given)
    found = manager.restore(1, args=args.StandardRestore())
    assert found["w"].dtype == jnp.bfloat16


def test_items_come_back_by_name(new_manager: NewManager) -> None:
    manager = new_manager(item_names=("state", "meta_data"))
    commit(
        manager,
        5,
        args.Composite(
            state=args.StandardSave({"w": jnp.ones(2)}),
            meta_data=args.JsonSave({"layers": [1, None, "x"]}),
        ),
    )
    found = manager.restore(5)
    assert sorted(found.keys()) == ["meta_data", "state"]
    assert found.meta_data == {"layers": [1, None, "x"]}
    assert found["state"]["w"].tolist() == [1.0, 1.0]
    one = manager.restore(5, args=args.Composite(meta_data=args.JsonRestore()))
    assert dict(one.items()) == {"meta_data": {"layers": [1, None, "x"]}}
    with pytest.raises(KeyError, match="other"):
        manager.restore(5, args=args.Composite(other=args.JsonRestore()))


def test_the_mode_of_items_is_settled_once(new_manager: NewManager) -> None:
    manager = saved(new_manager(), {"w": jnp.ones(1)})
    composite = args.Composite(state=args.StandardSave({"w": jnp.ones(1)}))
    with pytest.raises(ValueError, match="Composite"):
        manager.save(2, args=composite)
    named = new_manager(item_names=("state",))
    with pytest.raises(ValueError, match="Composite"):
        named.save(2, args=args.StandardSave({"w": jnp.ones(1)}))


@pytest.mark.parametrize("tree", [{}, jnp.ones(2)], ids=stable_id)
def test_what_is_no_tree_of_arrays_is_rejected(
    new_manager: NewManager, tree: Any
) -> None:
    manager = new_manager()
    with pytest.raises((ValueError, TypeError)):
        manager.save(1, args=args.StandardSave(tree))
    assert list(manager.all_steps()) == []


def test_an_object_that_is_no_array_is_rejected(our_manager: NewManager) -> None:
    manager = our_manager()  # Orbax rejects it, too, and leaves a thread that waits
    with pytest.raises(TypeError):
        manager.save(1, args=args.StandardSave({"x": object()}))
    assert list(manager.all_steps()) == []


def test_item_metadata_has_shapes_and_dtypes(new_manager: NewManager) -> None:
    manager = saved(new_manager(), {"w": jnp.ones((2, 3)), "b": [jnp.ones(1)]})
    found = manager.item_metadata(1)
    for tree in (found, found.tree):
        assert (tree["w"].shape, tree["b"][0].dtype) == ((2, 3), jnp.float32)
        assert (len(tree), sorted(tree.keys()), "c" in tree) == (2, ["b", "w"], False)
    assert (found.get("c", 3), found.custom_metadata) == (3, None)
    shapes = jax.tree.map(lambda x: x.shape, found)
    assert (shapes["w"], shapes.custom_metadata) == ((2, 3), None)
    paths = [path for path, _ in jax.tree.leaves_with_path(found)]
    assert {jax.tree_util.keystr(path) for path in paths} == {"['b'][0]", "['w']"}


def test_metadata_of_the_only_tree_is_kept(new_manager: NewManager) -> None:
    given = {"rope": [1, 2.5, None], "deep": {"a": "b"}}
    manager = saved(new_manager(), {"w": jnp.ones(1)}, custom_metadata=given)
    assert manager.item_metadata(1).custom_metadata == given
    assert manager.metadata(1).custom_metadata == {}
    assert manager.restore(1)["w"].tolist() == [1.0]


def test_metadata_of_each_tree_is_kept(new_manager: NewManager) -> None:
    manager = new_manager(item_names=("a", "b", "c"))
    tree = {"w": jnp.ones(1)}
    commit(
        manager,
        1,
        args.Composite(
            a=args.PyTreeSave(tree, custom_metadata={"of": "a"}),
            b=args.StandardSave(tree, custom_metadata={"of": ["b"]}),
            c=args.StandardSave(tree),
        ),
        custom_metadata={"of": "step"},
    )
    found = manager.item_metadata(1)
    expected = [{"of": "a"}, {"of": ["b"]}, None]
    assert [found[name].custom_metadata for name in "abc"] == expected
    assert manager.metadata(1).custom_metadata == {"of": "step"}


@pytest.mark.parametrize(
    "value", [{"a": object()}, {"a": (1, 2)}, {1: 2}], ids=stable_id
)
def test_metadata_of_a_tree_that_would_come_back_changed_is_rejected(
    our_manager: NewManager, value: Any
) -> None:
    manager = our_manager()  # Orbax fails later, or makes a list and texts of it
    with pytest.raises(ValueError, match=r"item 'default': custom_metadata="):
        manager.save(1, args=args.StandardSave(STATE, custom_metadata=value))
    assert manager.all_steps() == []


def test_item_metadata_is_a_target(our_manager: NewManager) -> None:
    tree: Any = {"w": jnp.arange(6.0).reshape(2, 3), "n": 3, "k": jax.random.key(0)}
    manager = saved(our_manager(), tree)  # Orbax rejects its own
    target = manager.item_metadata(1)
    found = manager.restore(1, args=args.StandardRestore(target))
    assert np.asarray(found["w"]).tolist() == tree["w"].tolist()
    assert type(found) is dict
    halves = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), target)
    again = manager.restore(1, args=args.PyTreeRestore(halves))
    assert (type(again), type(again["w"])) == (dict, type(tree["w"]))


def test_tuples_and_integer_keys_are_kept_without_a_target(
    our_manager: NewManager,
) -> None:
    tree = {"t": (jnp.ones(1), 2), "d": {1: 3}}  # a list, and "1", in Orbax
    assert described(saved(our_manager(), tree).restore(1)) == described(tree)


def test_a_wide_array_of_the_host_becomes_a_narrow_one_on_devices(
    our_manager: NewManager,
) -> None:
    manager = saved(our_manager(), {"n": np.arange(4)})
    target = {"n": jax.ShapeDtypeStruct((4,), jnp.int32)}
    found = manager.restore(1, args=args.StandardRestore(target))["n"]
    assert (found.dtype, found.tolist()) == (jnp.int32, [0, 1, 2, 3])


def test_a_run_that_was_saved_by_other_means_is_restored(runs: Any) -> None:
    run = runs()
    tree = {"params": {"w": jnp.ones(2)}, "opt": {"m": jnp.zeros(2)}}
    run.save(3, tree).result()
    manager = orbax.CheckpointManager(run)
    assert described(manager.restore(3)) == described(tree)
    named = orbax.CheckpointManager(run, item_names=("params",))
    wanted = args.Composite(params=args.StandardRestore(tree["params"]))
    found = named.restore(3, args=wanted)
    assert described(found.params) == described(tree["params"])
    manager.close()
    named.close()


def test_a_step_of_a_manager_is_restored_by_other_means(
    our_manager: NewManager,
) -> None:
    manager = our_manager()
    tree = {"w": jnp.ones(2)}
    commit(manager, 1, args.Composite(state=args.StandardSave(tree)))
    run = manager.directory.run
    assert described(run.restore(1)) == described({"state": tree})
