"""A run keeps rules with which older checkpoints are restored into today's code."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import storesvc_client as store
from storesvc_client.easydel import restore_state, save_state
from storesvc_client.orbax import CheckpointManager
from storesvc_client.trees.easydel import EasyDeLState
from tests.support.old_server import old_server

Rules = dict[str, Any]

NEW_FIELD: Rules = {
    "version": 1,
    "otherwise": "keep",
    "rules": [
        {
            "default": {"shape": [3], "dtype": "float32", "value": 0.5},
            "to": "params/scale",
        }
    ],
}
RENAMED: Rules = {
    "version": 1,
    "otherwise": "keep",
    "rules": [{"from": "params/{name}", "to": "model/{name}"}],
}


def rename(old: str, new: str) -> Rules:
    return {"version": 1, "rules": [{"from": old, "to": new}]}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[store.Run]:
    """A run of a store in this process."""
    with store.connect(f"file://{tmp_path}/store") as client:
        yield client.run("prod/model")


def old_state() -> dict[str, Any]:
    return {"params": {"w": jnp.arange(6.0).reshape(2, 3)}, "step": jnp.int32(7)}


def same(wanted: Any, found: Any) -> None:
    assert str(jax.tree.structure(wanted)) == str(jax.tree.structure(found))
    for one, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_older_checkpoint_has_a_new_field_and_a_new_one_its_own(
    run: store.Run,
) -> None:
    old = old_state()
    run.save(1, old).result()
    run.migrations.add(NEW_FIELD)
    new = {**old, "params": {**old["params"], "scale": jnp.zeros(3)}}
    run.save(2, new).result()

    same(
        {**old, "params": {**old["params"], "scale": jnp.full(3, 0.5)}},
        run.restore(1, like=new),
    )
    same(new, run.restore(2, like=new))
    assert ["params/w", "step"] == [*run.open(1).leaves]
    same(old, run.open(1).restore())


def test_code_of_yesterday_that_still_saves_is_migrated(run: store.Run) -> None:
    run.save(1, old_state()).result()
    run.migrations.add(RENAMED)
    run.save(2, old_state()).result()

    assert {"model", "step"} == run.restore("latest").keys()


def test_a_mapping_of_a_call_is_applied_instead(run: store.Run) -> None:
    run.save(1, old_state()).result()
    run.migrations.add(RENAMED)
    keeps = {"version": 1, "otherwise": "keep", "rules": []}

    same(old_state(), run.restore(1, mapping=keeps))


def test_migrations_follow_one_another(run: store.Run) -> None:
    """The second is made for the tree that the first makes: of a checkpoint that was
    saved before both, and of one that was saved between them."""
    run.save(1, old_state()).result()
    first = run.migrations.add(NEW_FIELD)
    second = run.migrations.add(RENAMED)
    run.save(2, run.open(1).map(NEW_FIELD).restore()).result()
    run.save(3, run.restore(1)).result()

    assert [first, second] == run.migrations.list()
    for step in 1, 2, 3:
        found = run.restore(step)
        assert {"scale", "w"} == found["model"].keys()
        np.testing.assert_array_equal(old_state()["params"]["w"], found["model"]["w"])


def test_all_clients_have_them_until_they_are_removed(
    run: store.Run, tmp_path: Path
) -> None:
    run.save(1, old_state()).result()
    added = run.migrations.add(RENAMED)
    with pytest.raises(store.NotFoundError, match="expected one migration 'zz'"):
        run.migrations.remove("zz")

    with store.connect(f"file://{tmp_path}/store") as other:
        assert "model" in other.run(run.name).restore(1)
        other.run(run.name).migrations.remove(added.digest[:8])

    assert "params" in run.restore(1)
    assert [] == run.migrations.list()


def test_a_fork_has_them_too(run: store.Run, tmp_path: Path) -> None:
    run.save(1, old_state()).result()
    added = run.migrations.add(RENAMED)

    with store.connect(f"file://{tmp_path}/other") as client:
        fork = client.run("prod/fork")
        run.copy_to(fork)

        assert [added] == fork.migrations.list()
        assert "model" in fork.restore(1)


@pytest.mark.parametrize("ignores_migrations", [False, True])
def test_a_server_that_keeps_no_migrations_is_named(
    run: store.Run, tmp_path: Path, *, ignores_migrations: bool
) -> None:
    run.save(1, old_state()).result()
    with (
        old_server(f"file://{tmp_path}/old") as server,
        store.connect(server.address) as client,
    ):
        server.ignores_migrations = ignores_migrations
        target = client.run("prod/target")
        target.save(1, old_state()).result()
        wanted = rf"got a server at {server.address} that keeps none.* upgrade it"
        with pytest.raises(store.PreconditionError, match=f"prod/target.*{wanted}"):
            target.migrations.add(RENAMED)
        run.migrations.add(RENAMED)
        fork = client.run("prod/fork")
        with pytest.raises(store.PreconditionError, match=f"prod/fork.*{wanted}"):
            run.copy_to(fork)

        fork.configure(labels={})
        run.copy_to(fork)
        assert "params" in fork.restore(1)


def test_what_the_tree_cannot_decide_is_rejected(run: store.Run) -> None:
    square = {"version": 1, "rules": [{"from": "w", "to": "w"}]}
    square["rules"][0]["operations"] = [{"transpose": [1, 0]}]  # type: ignore[index]
    run.save(1, {"w": jnp.ones((2, 2))}).result()
    with pytest.raises(store.InvalidRequestError, match="got the same leaves"):
        run.migrations.add(square)
    run.migrations.add({"version": 1, "rules": [{"from": "w", "to": "v"}]})
    with pytest.raises(store.InvalidRequestError, match="that the migration mapping"):
        run.migrations.add({"version": 1, "rules": [{"from": "v", "to": "w"}]})
    with pytest.raises(store.MismatchError, match=r"rule 1 .none."):
        run.migrations.add({"version": 1, "rules": [{"from": "none", "to": "w"}]})
    assert 1 == len(run.migrations.list())


def test_a_migration_is_inserted_before_others_as_the_error_says(
    run: store.Run,
) -> None:
    """The migrations after it are removed and added again. The key x, of a checkpoint
    from a branch, becomes b, c and d, as the key a does."""
    for step, key in enumerate("abx"):
        run.save(step, {key: jnp.full(2, step)}).result()
    for old, new in ("ab", "bc", "cd"):
        run.migrations.add(rename(old, new), which=0)
    wanted = [rename("x", "b")]

    while wanted:
        try:
            run.migrations.add(wanted[0], which=2)
        except store.InvalidRequestError as e:
            assert "add these, and then, with the same which=" in str(e)
            found = re.search(r"remove\('(\w+)'\)", str(e))
            assert found is not None
            (follows,) = (
                each
                for each in run.migrations.list()
                if each.digest.startswith(found[1])
            )
            run.migrations.remove(found[1])
            wanted.insert(1, dict(follows.rules))
        else:
            wanted.pop(0)

    for step in range(3):
        np.testing.assert_array_equal(np.full(2, step), run.restore(step)["d"])


def test_they_have_a_limit(run: store.Run) -> None:
    run.save(1, {"w": jnp.ones(2)}).result()
    rules = [
        {"from": f"{n}{'x' * 900}", "to": f"{n}", "optional": True} for n in range(300)
    ]
    document = {"version": 1, "rules": [{"from": "w", "to": "v"}, *rules]}

    with pytest.raises(store.LimitError, match="at most 262144 bytes") as refused:
        run.migrations.add(document)

    assert "prod/model: migration mapping, 28" in str(refused.value)


def test_they_are_64_at_most(run: store.Run) -> None:
    run.save(1, {"k0": jnp.ones(2)}).result()
    for n in range(64):
        one = run.migrations.add(rename(f"k{n}", f"k{n + 1}"))

    with pytest.raises(
        store.LimitError, match="migration mapping: expected at most 64"
    ):
        run.migrations.add(rename("k64", "k65"))

    run.migrations.remove(one.digest)
    assert run.restore(1).keys() == {"k63"}


def test_a_loop_resumes_what_it_saved_and_what_was_saved_before(run: store.Run) -> None:
    run.save(1, old_state()).result()
    added = run.migrations.add(RENAMED)
    name = f"migration mapping ({added.digest[:12]})"
    init = {"model": {"w": jnp.zeros((2, 3))}, "step": jnp.int32(0)}

    for start in 2, 4:
        with run.loop(every=store.Steps(1)) as loop:
            state, first = loop.restore_or(init)
            assert first == start
            np.testing.assert_array_equal(
                old_state()["params"]["w"], state["model"]["w"]
            )
            for step in loop.steps(first, first + 2):
                loop.after(step, state)
        assert loop.restored is not None
        assert loop.restored.report is not None
        mapped, stored = (name, "params") if start == 2 else ("", "model")
        assert mapped == loop.restored.report.mapping
        assert [f"{stored}/w", "step"] == [*loop.restored.leaves]
        assert {stored, "step"} == loop.restored.restore().keys()


def test_a_loop_maps_older_checkpoints_and_none_that_it_saved(run: store.Run) -> None:
    run.save(1, old_state()).result()
    run.migrations.add(NEW_FIELD)  # the rules of a call apply in its place
    init = {"model": {"w": jnp.zeros((2, 3))}, "step": jnp.int32(0)}

    for start in 2, 4:
        with run.loop(every=store.Steps(1)) as loop:
            state, first = loop.restore_or(init, mapping=RENAMED)
            assert first == start
            same(old_state()["params"], state["model"])
            for step in loop.steps(first, first + 2):
                loop.after(step, state)
        assert loop.restored is not None
        assert loop.restored.report is not None
        assert ("mapping" if start == 2 else "") == loop.restored.report.mapping
        same(
            loop.restored.restore(),
            old_state() if start == 2 else jax.device_get(state),
        )


def test_a_loop_rejects_rules_that_would_map_what_it_saves(run: store.Run) -> None:
    run.save(1, old_state()).result()
    again = {**RENAMED, "rules": [{**RENAMED["rules"][0], "optional": True}]}

    with (
        run.loop(every=store.Steps(1)) as loop,
        pytest.raises(store.InvalidRequestError, match="got rules that fit both"),
    ):
        loop.restore_or({"model": {"w": jnp.zeros((2, 3))}}, mapping=again)


def test_a_loop_whose_rules_fit_no_checkpoint_says_why(run: store.Run) -> None:
    run.save(1, {"other": 1}).result()

    with (
        run.loop(every=store.Steps(1)) as loop,
        pytest.raises(store.MismatchError, match="model/w") as caught,
    ):
        loop.restore_or({"model": {"w": jnp.zeros((2, 3))}}, mapping=RENAMED)

    (note,) = caught.value.__notes__
    assert "mapping= does not apply to it: " in note
    assert "params/{name}" in note


def test_code_that_was_rolled_back_learns_which_migration_it_lacks(
    run: store.Run,
) -> None:
    run.save(1, old_state()).result()
    added = run.migrations.add(NEW_FIELD)
    known = (
        rf"prod/model@1 mapped by migration mapping \({added.digest[:12]}\) does not"
    )

    with run.loop(every=store.Steps(1)) as loop:
        with pytest.raises(store.MismatchError, match=rf"{known}.*params/scale"):
            loop.restore_or(old_state())
        run.migrations.remove(added.digest[:12])
        state, _ = loop.restore_or(old_state())

    same(old_state(), state)


def test_the_managers_of_orbax_restore_what_is_stored(run: store.Run) -> None:
    run.save(1, old_state()).result()
    run.migrations.add(RENAMED)

    with CheckpointManager(run) as manager:
        same(old_state(), manager.restore(1))


def test_a_report_names_the_rules(run: store.Run, tmp_path: Path) -> None:
    run.save(1, old_state()).result()
    file = tmp_path / "renamed.toml"
    file.write_text(
        'version = 1\notherwise = "keep"\n'
        '[[rules]]\nfrom = "params/{name}"\nto = "model/{name}"\n'
    )
    run.migrations.add(NEW_FIELD)
    run.migrations.add(file)
    opened = run.open(1).map(NEW_FIELD)
    opened.restore()

    assert opened.report is not None
    assert "mapping" == opened.report.mapping
    assert ["mapping", "renamed.toml"] == [each.name for each in run.migrations.list()]


def test_a_changed_schedule_of_an_optimizer_is_migrated(run: store.Run) -> None:
    """The moments stay; the state of the schedule is another one."""
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    before, after = optax.adam(1e-3), optax.adam(optax.linear_schedule(1e-3, 0, 10))
    gradients = jax.tree.map(jnp.ones_like, params)
    _, trained = before.update(gradients, before.init(params), params)
    run.save(1, {"params": params, "opt": trained}).result()
    run.migrations.add(
        {
            "version": 1,
            "otherwise": "keep",
            "rules": [
                {
                    "default": {"shape": [], "dtype": "int32", "value": 1},
                    "to": "opt/1/count",
                },
            ],
        }
    )
    like = {"params": params, "opt": after.init(params)}

    found: Any = run.restore("latest", like=like)

    same(trained[0], found["opt"][0])
    assert 1 == found["opt"][1].count


def test_moments_follow_the_rule_of_their_parameter(run: store.Run) -> None:
    """A template that begins with {tree*} takes a parameter and its moments."""
    params = {"layers": {str(n): {"w": jnp.full((2, 3), n + 0.5)} for n in range(2)}}
    tx = optax.adamw(1e-3)
    gradients = jax.tree.map(jnp.ones_like, params)
    _, state = tx.update(gradients, tx.init(params), params)
    run.save(1, {"params": params, "opt": state}).result()
    rule = {
        "from": "{tree*}/layers/{n:int}/w",
        "to": "{tree*}/layers/w",
        "operations": [{"transpose": [1, 0]}, {"stack": {"axis": 0, "by": "n"}}],
    }
    run.migrations.add({"version": 1, "otherwise": "keep", "rules": [rule]})
    today = {"layers": {"w": jnp.zeros((2, 3, 2))}}

    found: Any = run.restore("latest", like={"params": today, "opt": tx.init(today)})

    for made, moment in (
        (found["params"], params),
        (found["opt"][0].mu, state[0].mu),
        (found["opt"][0].nu, state[0].nu),
    ):
        layers = [moment["layers"][str(n)]["w"].T for n in range(2)]
        np.testing.assert_array_equal(np.stack(layers), made["layers"]["w"])
    assert 1 == found["opt"][0].count


class Model(nnx.Module):
    """A model with one layer."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(3, 2, rngs=rngs)


def make_model() -> Model:
    return Model(rngs=nnx.Rngs(0))


def test_a_state_of_easydel_is_restored_with_another_optimizer(run: store.Run) -> None:
    """SGD with momentum takes the first moments of Adam as its trace."""
    state = EasyDeLState.create(
        model=make_model(), tx=optax.adam(1e-3), step=4, init_opt_state=True
    )
    moments = jax.tree.map(lambda leaf: leaf + 2, state.opt_state)
    save_state(run, state.replace(opt_state=moments)).result()
    rules = {
        "version": 1,
        "otherwise": "keep",
        "rules": [
            {"from": "opt_state/0/mu/{name*}", "to": "opt_state/0/trace/{name*}"},
            {"from": ["opt_state/0/nu/{name*}"], "drop": True},
            {"from": "opt_state/0/count", "drop": True},
        ],
    }
    tx = optax.sgd(1e-2, momentum=0.9)

    by_call: Any = restore_state(run, model=make_model, tx=tx, mapping=rules)
    run.migrations.add(rules)
    migrated: Any = restore_state(run, model=make_model, tx=tx)

    for found in by_call, migrated:
        same(state.graphstate, found.graphstate)
        same(moments[0].mu, found.opt_state[0].trace)
        assert 4 == found.step


def test_the_length_of_a_text_does_not_decide_which_migration_applies(
    run: store.Run,
) -> None:
    for step, note in enumerate(("short", "a longer one")):
        run.save(step, old_state() | {"note": note, "seed": 2 ** (70 + 30 * step)})
    run.save(2, old_state()).result()
    run.migrations.add(RENAMED, which=0)

    assert "a longer one" == run.restore(1)["note"]
    assert "model" in run.restore(1)
    assert "params" in run.restore(2)


@pytest.mark.parametrize("digest", ["", 5, None])
def test_a_migration_is_not_removed_without_its_digest(
    run: store.Run, digest: Any
) -> None:
    run.save(1, old_state()).result()
    run.migrations.add(RENAMED)

    with pytest.raises(store.InvalidRequestError, match="digest"):
        run.migrations.remove(digest)

    assert 1 == len(run.migrations.list())
