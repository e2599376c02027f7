"""What the client refuses, and how it says so."""

import socket
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import storesvc_client as store
from storesvc_client import _retrying
from tests.server_process import ServerProcess


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))


def test_a_save_returns_before_it_is_committed(run: store.Run) -> None:
    save = run.save(3, {"x": np.zeros(2**24, np.uint8)})

    assert not save.done()
    assert 3 == save.result().step
    assert save.done()


def test_an_array_may_be_overwritten_as_soon_as_save_returns(run: store.Run) -> None:
    array = np.arange(2**20)
    save = run.save(0, {"x": array})
    array[:] = 0
    save.result()

    ((_, back),) = run.read(0, ["x"])
    assert np.array_equal(np.arange(2**20), back)


def test_metrics_and_labels_come_with_the_checkpoint(run: store.Run) -> None:
    run.save(1, {"x": 1}, metrics={"loss": np.float32(2.5)}, labels={"by": "me"})
    run.wait()

    assert {"loss": 2.5} == run.latest().metrics
    assert {"by": "me"} == run.latest().labels


def test_a_second_save_of_a_step_already_exists(run: store.Run) -> None:
    run.save(1, {"x": 1}).result()

    with pytest.raises(store.AlreadyExistsError, match="@1 exists already"):
        run.save(1, {"x": 1}).result()


def test_the_error_of_a_save_surfaces_at_the_next_call_that_waits(
    run: store.Run,
) -> None:
    run.save(1, {"x": 1}).result()
    run.save(1, {"x": 1})

    with pytest.raises(store.AlreadyExistsError):
        run.save(2, {"x": 1})
    run.save(2, {"x": 1}).result()


def test_the_error_of_a_save_surfaces_when_the_client_closes(
    server_address: str,
) -> None:
    client = store.connect(server_address)
    run = client.run("tests/close")
    run.save(1, {"x": 1}).result()
    run.save(1, {"x": 1})

    with pytest.raises(store.AlreadyExistsError):
        client.close()


def test_an_error_that_was_seen_does_not_come_again(run: store.Run) -> None:
    run.save(1, {"x": 1}).result()
    save = run.save(1, {"x": 1})
    with pytest.raises(store.AlreadyExistsError):
        save.result()

    run.wait()
    assert 2 == run.save(2, {"x": 1}).result().step


@pytest.mark.parametrize(
    ("leaf", "match"),
    [
        ("text", "got str"),
        (np.array(["a"]), "array of <U1"),
        (np.array([None]), "array of object"),
        (np.array(["2020-01-01"], "datetime64[D]"), "datetime64"),
        (2**63, "64 bits"),
        (object(), "got object"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), "ShapeDtypeStruct"),
        (np.zeros((1,) * 33), "32 dimensions, got 33"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_leaf_that_cannot_be_stored_is_named_and_nothing_is_sent(
    run: store.Run, leaf: Any, match: str
) -> None:
    with pytest.raises(store.UnsupportedLeafError, match=match) as caught:
        run.save(0, {"ok": 1, "a": {"bad": leaf}})
    assert "leaf 'a/bad'" in str(caught.value)
    run.save(0, {"ok": 1}).result()


def test_a_donated_leaf_is_named(run: store.Run) -> None:
    array = jnp.ones(3)
    array.delete()

    with pytest.raises(store.UnsupportedLeafError, match="'x': its array was deleted"):
        run.save(0, {"x": array})


def test_all_leaves_that_cannot_be_stored_are_named(run: store.Run) -> None:
    with pytest.raises(store.UnsupportedLeafError) as caught:
        run.save(0, {"a": "x", "b": "y", "c": 1})
    assert "leaf 'a'" in str(caught.value)
    assert "leaf 'b'" in str(caught.value)


def test_a_restore_lists_every_difference_at_once(run: store.Run) -> None:
    saved = {
        "same": np.zeros(2),
        "shape": np.zeros((2, 3)),
        "dtype": np.zeros(2, np.float32),
        "key": jax.random.key(0),
        "python": 1,
        "unexpected": 1,
    }
    run.save(0, saved).result()
    like = {
        "same": np.zeros(2),
        "shape": np.zeros((3, 2)),
        "dtype": jax.ShapeDtypeStruct((2,), jnp.bfloat16),
        "key": np.zeros(2, np.uint32),
        "python": np.int64(1),
        "missing": np.zeros((), bool),
    }

    with pytest.raises(store.MismatchError) as caught:
        run.restore(0, like=like)

    message = str(caught.value)
    for part in (
        f"{run.name}@0 does not fit the target",
        "leaf 'missing' is missing from it: expected () bool",
        "leaf 'unexpected' is not expected: got a Python scalar (int64)",
        "leaf 'shape': expected (3, 2) float64, got (2, 3) float64",
        "leaf 'dtype': expected (2,) bfloat16, got (2,) float32",
        "leaf 'key': expected (2,) uint32, got PRNG keys () threefry2x32",
        "leaf 'python': expected () int64, got a Python scalar (int64)",
    ):
        assert part in message
    assert "'same'" not in message


def test_rules_place_the_leaves_whose_keys_they_are_found_in(
    run: store.Run, mesh: Mesh
) -> None:
    tree = {"k": {"kernel": jnp.ones((8, 4))}, "bias": jnp.ones(4), "n": jnp.ones(())}
    run.save(0, tree).result()

    back = run.restore(0, mesh=mesh, rules=[("kernel$", P("a", "b")), ("", P())])

    assert P("a", "b") == back["k"]["kernel"].sharding.spec
    assert P() == back["bias"].sharding.spec
    assert P() == back["n"].sharding.spec
    assert mesh == back["bias"].sharding.mesh


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        ([("bias", P())], "leaf 'kernel': no rule matches"),
        ([("", P("a"))], "leaf 'odd'.*"),
        ([("", P(None, None, "a"))], r"leaf 'bias': rule '' splits 3 dimensions"),
        ([("", P("z"))], "leaf 'bias'.*z"),
    ],
)
def test_rules_that_do_not_fit_name_the_leaves(
    run: store.Run, mesh: Mesh, rules: list[tuple[str, P]], match: str
) -> None:
    tree = {"kernel": jnp.ones((8, 4)), "bias": jnp.ones(4), "odd": jnp.ones(7)}
    run.save(0, tree).result()

    with pytest.raises(store.MismatchError, match=match):
        run.restore(0, mesh=mesh, rules=rules)


def test_a_mesh_without_rules_is_refused(run: store.Run, mesh: Mesh) -> None:
    run.save(0, {"x": jnp.ones(3)}).result()

    with pytest.raises(store.InvalidRequestError, match="both mesh= and rules="):
        run.restore(0, mesh=mesh)


def test_what_jax_would_narrow_is_refused(run: store.Run) -> None:
    run.save(0, {"x": np.zeros(3, np.int64)}).result()
    like = {"x": jax.ShapeDtypeStruct((3,), np.int64)}

    with pytest.raises(store.MismatchError, match=r"'x': .*jax_enable_x64"):
        run.restore(0, like=like)


def test_a_leaf_that_is_not_there_is_named(run: store.Run) -> None:
    run.save(0, {"x": 1}).result()

    with pytest.raises(store.NotFoundError, match="no leaf 'y'"):
        list(run.read(0, ["x", "y"]))


def test_no_server_is_one_sentence_with_the_address() -> None:
    began = time.monotonic()

    with pytest.raises(ConnectionError) as caught:
        store.connect("127.0.0.1:1", timeout=5)

    assert time.monotonic() - began < 5
    assert (
        "store 127.0.0.1:1 cannot be reached (Connection refused); "
        "is its server running?"
    ) == str(caught.value)


def test_a_server_that_never_answers_is_told_within_the_deadline() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        host, port = silent.getsockname()
        began = time.monotonic()
        with pytest.raises(store.UnavailableError, match=f"{host}:{port}"):
            store.connect(f"{host}:{port}", timeout=1)
        assert time.monotonic() - began < 10


def test_a_save_whose_server_is_gone_says_so(
    start_server: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_retrying, "PATIENCE_SECONDS", 1.0)
    server = start_server()
    client = store.connect(server.address)
    server.kill()

    with pytest.raises(store.UnavailableError, match=server.address):
        client.run("tests/gone").save(0, {"x": 1}).result()
    client.close()


@pytest.mark.parametrize(
    "target",
    [
        "",
        "localhost",
        "localhost:x",
        "host:1/path",
        "ftp://x",
        "file://host/x",
        "a:b:1",
    ],
)
def test_a_target_that_cannot_be_is_refused(target: str) -> None:
    with pytest.raises(store.InvalidRequestError, match="expected"):
        store.connect(target)


@pytest.mark.parametrize("name", ["", "run", "a/b/c", "A/b", "../b"])
def test_a_run_name_that_cannot_be_is_refused(client: store.Client, name: str) -> None:
    with pytest.raises(store.InvalidRequestError):
        client.run(name)
