"""Saves and restores by the client, and the errors of calls that it rejects."""

import math
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import storesvc_client as store
from storesvc.format.trees import Leaf
from storesvc_client._api.run import get_parts
from storesvc_client._rpc import retry
from storesvc_client._save.saver import PendingSave
from storesvc_client._values.models import Event, LeafInfo, UploadInfo
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1 import upload_service_pb2 as upload_api
from tests.support.programs import run_python
from tests.support.server_process import ServerProcess

NEWER: Any = 99
"""Enum number that no release defines."""


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))


def test_a_save_returns_a_handle_that_waits(run: store.Run) -> None:
    save = run.save(np.int64(3), {"x": np.zeros(2**20, np.uint8)})

    assert 3 == save.step
    assert 3 == save.result().step
    assert save.done()


def test_an_array_may_be_overwritten_as_soon_as_save_returns(run: store.Run) -> None:
    array = np.arange(2**20)
    save = run.save(0, {"x": array})
    array[:] = 0
    save.result()

    ((_, back),) = run.open(0).read(["x"])
    assert np.array_equal(np.arange(2**20), back)


def test_metrics_and_labels_are_stored_with_the_checkpoint(run: store.Run) -> None:
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


def test_an_interrupted_wait_leaves_the_error_unseen(run: store.Run) -> None:
    run.save(1, {"x": 1}).result()
    save = run.save(1, {"x": 1})
    with pytest.raises((TimeoutError, store.AlreadyExistsError)) as caught:
        save.result(timeout=0)
    if caught.type is TimeoutError:
        with pytest.raises(store.AlreadyExistsError):
            run.wait()


def test_a_failed_save_does_not_affect_other_runs(server_address: str) -> None:
    client = store.connect(server_address)
    bad, good = client.run("tests/bad"), client.run("tests/good")
    bad.save(1, {"x": 1}).result()
    bad.save(1, {"x": 1})
    good.save(1, {"x": np.zeros(2**26, np.uint8)})

    with pytest.raises(store.AlreadyExistsError):
        client.close()
    with store.connect(server_address) as again:
        assert 1 == again.run("tests/good").latest().step


LEAVING = """
import sys, numpy as np, storesvc_client as store
client = store.connect(sys.argv[1])
client.run("tests/leave").save(1, {"x": np.zeros(2**24, np.uint8)})
"""


@pytest.mark.slow
def test_a_process_waits_for_its_saves_before_it_exits(tmp_path: Path) -> None:
    target = tmp_path.as_uri()
    ran = run_python(LEAVING, target)
    assert "" == ran.stderr
    with store.connect(target) as client:
        assert 1 == client.run("tests/leave").latest().step

    ran = run_python(LEAVING, target, check=False)
    assert 1 == ran.returncode
    assert "tests/leave@1 exists already" in ran.stderr
    assert 1 == ran.stderr.count("\n")


def test_a_closed_client_rejects_calls(server_address: str) -> None:
    client = store.connect(server_address)
    run = client.run("tests/closed")
    client.close()
    client.close()

    for call in (
        run.latest,
        run.restore,
        lambda: run.save(1, {"x": 1}),
        lambda: list(client.runs()),
    ):
        with pytest.raises(store.InvalidRequestError, match="is closed; connect again"):
            call()


@pytest.mark.parametrize(
    "arguments",
    [
        {"step": "latest"},
        {"step": True},
        {"step": 1.0},
        {"step": -1},
        {"step": 2**63},
        {"labels": {"a": 3}},
        {"labels": {3: "a"}},
        {"labels": ["a"]},
        {"labels": []},
        {"labels": {"a": "\ud800"}},
        {"labels": {"\ud800": "a"}},
        {"labels": {"": "a"}},
        {"labels": {"a": "é" * 129}},
        {"labels": {"é" * 129: "a"}},
        {"labels": {str(n): "" for n in range(65)}},
        {"metrics": {"a": "x"}},
        {"metrics": {"a": "1"}},
        {"metrics": {"a": None}},
        {"metrics": {"a": 10**400}},
        {"metrics": {1: 1.0}},
        {"metrics": {"\ud800": 1.0}},
        {"metrics": {"a" * 257: 1.0}},
        {"metrics": {str(n): 1.0 for n in range(65)}},
        {"metrics": [1.0]},
        {"document": "text"},
    ],
    ids=ascii,
)
def test_a_bad_argument_of_save_is_rejected_at_once(
    run: store.Run, arguments: dict[str, Any]
) -> None:
    save: Any = run.save

    with pytest.raises(store.InvalidRequestError, match=f"save to {run.name}"):
        save(**({"step": 1, "tree": {"x": 1}} | arguments))
    run.wait()
    assert [] == list(run.uploads.list())


def test_a_step_out_of_range_is_rejected_with_its_bound(run: store.Run) -> None:
    with pytest.raises(store.InvalidRequestError, match=r"\[0, 2\^63 - 1\], got 9223"):
        run.save(2**63, {"x": 1})


def test_metrics_and_labels_may_reach_their_limits(run: store.Run) -> None:
    labels = {f"{n:03d}" + "é" * 126: "é" * 128 for n in range(64)}
    metrics = {f"{n:03d}" + "é" * 126: n / 7 for n in range(64)}

    saved = run.save(1, {"x": 1}, labels=labels, metrics=metrics).result()

    assert (labels, metrics) == (saved.labels, saved.metrics)


def test_a_client_closes_after_any_failure_of_a_save(server_address: str) -> None:
    client = store.connect(server_address)
    broken = client.run("tests/close-broken")
    failed = Future[Any]()
    failed.set_exception(MemoryError("no more of it"))
    get_parts(broken).saver._under_way.append(
        PendingSave("tests/close-broken@1", 1, failed)
    )
    other = client.run("tests/close-other").save(1, {"x": 1})

    with pytest.raises(MemoryError, match="no more of it"):
        client.close()

    assert other.done()
    with pytest.raises(store.InvalidRequestError, match="is closed"):
        client.info()


WRONG: dict[str, Callable[[Any], object]] = {
    "run": lambda client: client.run(5),
    "no run": lambda client: client.run(None),
    "runs": lambda client: list(client.runs(5)),
    "collect": lambda client: list(client.collect(5)),
    "grace": lambda client: list(client.collect(grace="5")),
    "grace of a preview": lambda client: list(client.collect(grace="3d", dry_run=True)),
    "namespace": lambda client: client.watch(5),
    "since": lambda client: client.watch("prod", since=5),
    "since of a run": lambda client: client.run("a/b").watch(since=5),
    "half a character": lambda client: client.run("a/b").watch(since="\ud800"),
    "diff": lambda client: client.run("a/b").diff(1, of="a/b"),
    "purge delay": lambda client: client.run("a/b").configure(purge_delay="5"),
    "labels": lambda client: client.run("a/b").configure(labels={"a": "\ud800"}),
    "upload": lambda client: client.run("a/b").uploads.get(5),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_an_argument_of_another_type_is_rejected(
    client: store.Client, call: Callable[[Any], object]
) -> None:
    with pytest.raises(store.InvalidRequestError, match=r"expected .*, got "):
        call(client)


@pytest.mark.parametrize("exists", [False, True])
def test_an_upload_that_is_not_there_is_not_found(run: store.Run, exists: bool) -> None:
    if exists:
        run.save(1, {"x": 1}).result()

    with pytest.raises(store.NotFoundError, match=f"{run.name} has no upload") as found:
        run.uploads.get("0" * 32)

    assert "UPLOAD_NOT_FOUND" == found.value.reason


def test_enum_values_of_a_newer_server_are_unknown() -> None:
    upload = upload_api.Upload(name=f"namespaces/a/runs/b/uploads/{'0' * 32}")
    upload.state = NEWER
    found = api.Checkpoint(name="namespaces/a/runs/b/checkpoints/1")
    event = api.CheckpointEvent(kind=NEWER, checkpoint=found)
    leaf = Leaf(
        key="x", path_kinds="k", kind=NEWER, dtype="int8", shape=(3,), chunk_shape=(3,)
    )

    assert "unknown" == UploadInfo.from_message(upload).state
    assert "unknown" == Event.from_message(event, "").kind
    assert "unknown" == LeafInfo.from_row(leaf, leaf.grid).kind


def test_a_restore_with_x64_enabled_keeps_wide_types(run: store.Run) -> None:
    values = 2**40 + np.arange(4)
    run.save(0, {"x": values}).result()
    like = {"x": jax.ShapeDtypeStruct((4,), np.int64)}

    with jax.enable_x64(True):
        back = run.restore(0, like=like)["x"]

    assert np.int64 == back.dtype
    assert values.tobytes() == np.asarray(back).tobytes()


def test_a_restore_keeps_the_kind_of_memory(run: store.Run) -> None:
    device = jax.devices()[0]
    for kind in [memory.kind for memory in device.addressable_memories()]:
        sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
        run.save(len(kind), {"x": jax.device_put(np.arange(3.0), sharding)}).result()
        like = {"x": jax.ShapeDtypeStruct((3,), np.float32, sharding=sharding)}

        assert kind == run.restore(like=like)["x"].sharding.memory_kind


@pytest.mark.slow
def test_a_restore_continues_at_a_restarted_server(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    with store.connect(server.address) as client:
        run = client.run("tests/restart")
        run.save(0, {"x": np.arange(5)}).result()
        server.kill()
        later = threading.Timer(0.2, server.start)
        later.start()
        try:
            assert np.array_equal(np.arange(5), run.restore(0)["x"])
        finally:
            later.join()


def test_an_error_is_raised_once(run: store.Run) -> None:
    run.save(1, {"x": 1}).result()
    save = run.save(1, {"x": 1})
    with pytest.raises(store.AlreadyExistsError):
        save.result()

    run.wait()
    assert 2 == run.save(2, {"x": 1}).result().step


def test_arrays_without_elements_have_sizes_of_any_magnitude(
    run: store.Run, tmp_path: Path
) -> None:
    shapes = [(2**57 - 1, 0), (2**29, 0, 2**29), (0, 2**58)]
    tree = {str(shape): np.zeros(shape, np.int8) for shape in shapes}
    run.save(1, tree).result()

    for back in (run.restore(1), run.restore(1, cast="float32")):
        assert shapes == [back[key].shape for key in tree]
    opened = run.open(1)
    assert 0 == sum(opened.statistics(key).count for key in tree)
    assert opened.pictures.chunks(str(shapes[1])).svg
    assert not run.verify(1).damages
    for form in ("safetensors", "npz", "orbax"):
        assert 3 == run.export(1, f"{form}:{tmp_path}/{form}.npz").leaf_count


@pytest.mark.parametrize(
    ("leaf", "match"),
    [
        ("\ud800", "expected Unicode, got a text with the lone surrogate"),
        (np.str_("text"), "an array of <U4"),
        (np.array(["a"]), "array of <U1"),
        (np.array([None]), "array of object"),
        (np.array(["2020-01-01"], "datetime64[D]"), "datetime64"),
        (object(), "got object"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), "ShapeDtypeStruct"),
        (np.zeros((1,) * 33), "32 dimensions, got 33"),
        (np.zeros((2**61, 0, 1), np.int8), "each size of 0 counted as 1, got the sh"),
        (np.zeros((2**63 - 1, 0), np.int8), "each size of 0 counted as 1, got the s"),
        (np.zeros((2**31, 0, 2**31), np.int8), "each size of 0 counted as 1, got th"),
        (np.ma.masked_array([1, 2], [True, False]), "array of int64"),
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

    with pytest.raises(
        store.UnsupportedLeafError, match="'x': expected a live array, got a deleted"
    ):
        run.save(0, {"x": array})


def test_all_leaves_that_cannot_be_stored_are_named(run: store.Run) -> None:
    with pytest.raises(store.UnsupportedLeafError) as caught:
        run.save(0, {"a": object(), "b": {1, 2}, "c": 1})
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
        "leaf 'missing': not in the checkpoint, in the target () bool",
        "leaf 'unexpected': in the checkpoint a Python scalar (int64), not in the tar",
        "leaf 'shape': in the checkpoint (2, 3) float64, in the target (3, 2) float64",
        "leaf 'dtype': in the checkpoint (2,) float32, in the target (2,) bfloat16",
        "leaf 'key': in the checkpoint PRNG keys () threefry2x32, in the target (2,) ",
        "leaf 'python': in the checkpoint a Python scalar (int64), in the target () ",
    ):
        assert part in message
    assert "leaf 'same'" not in message


def test_a_dtype_that_jax_would_narrow_is_rejected(run: store.Run) -> None:
    run.save(0, {"x": np.zeros(3, np.int64)}).result()
    like = {"x": jax.ShapeDtypeStruct((3,), np.int64)}

    with pytest.raises(store.MismatchError, match=r"'x': .*jax_enable_x64"):
        run.restore(0, like=like)


def test_a_missing_leaf_is_named(run: store.Run) -> None:
    run.save(0, {"x": 1}).result()

    with pytest.raises(store.NotFoundError, match="no leaf 'y'"):
        list(run.open(0).read(["x", "y"]))


@pytest.mark.slow
def test_a_missing_server_is_reported_in_one_sentence_with_the_address() -> None:
    began = time.monotonic()

    with pytest.raises(ConnectionError) as caught:
        store.connect("127.0.0.1:1", timeout=5)

    assert time.monotonic() - began < 5
    assert (
        "store 127.0.0.1:1 cannot be reached (Connection refused); "
        "start its server, or correct the address"
    ) == str(caught.value)


@pytest.mark.slow
def test_a_server_that_never_answers_is_reported_within_the_deadline() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        host, port = silent.getsockname()
        began = time.monotonic()
        with pytest.raises(store.UnavailableError, match=f"{host}:{port}"):
            store.connect(f"{host}:{port}", timeout=1)
        assert time.monotonic() - began < 10


@pytest.mark.slow
def test_a_save_without_a_server_is_unavailable(
    start_server: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "PATIENCE_SECONDS", 1.0)
    server = start_server()
    client = store.connect(server.address)
    server.kill()

    named = (
        "save of tests/gone@0, which resumes from the stored chunks when the step is"
    )
    with pytest.raises(
        store.UnavailableError, match=f"{named} saved again: store {server.address} "
    ):
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
        "file:///a#b",
        "gs://bucket/a?concurrency=3&concurrency=4",
    ],
)
def test_an_invalid_target_is_rejected(target: str) -> None:
    with pytest.raises(store.InvalidRequestError, match="expected"):
        store.connect(target)


@pytest.mark.parametrize(
    "url", ["http://localhost:7070/", "grpc://localhost:7070", "https://localhost"]
)
def test_the_url_of_a_server_gets_its_address_as_a_hint(url: str) -> None:
    with pytest.raises(
        store.InvalidRequestError, match=r"; did you mean localhost:7070\?$"
    ):
        store.connect(url)


@pytest.mark.parametrize("place", [None, 7, Path("gs://bucket/a"), Path("file:///c")])
def test_what_is_no_place_is_rejected(place: Any) -> None:
    with pytest.raises(store.InvalidRequestError, match=r"^connect: store: expected"):
        store.connect(place)


@pytest.mark.parametrize(
    "place",
    [
        str,
        lambda folder: folder,
        lambda folder: f"{folder}/x/../",
        lambda folder: f"file://{folder}/x/../",
        lambda folder: f"file://{folder.parent}/x/../{folder.name}",
    ],
    ids=["text", "Path", "text with ..", "URI with ..", "URI with .. inside"],
)
def test_a_directory_is_a_place_in_each_form_that_programs_have(
    place: Callable[[Path], Any], tmp_path: Path
) -> None:
    with store.connect(tmp_path) as client:
        client.run("prod/Llama_3.1").save(1, {"x": np.ones(3)}).result()

    with store.connect(place(tmp_path)) as client:
        assert [1] == client.run("prod/Llama_3.1").steps()


@pytest.mark.parametrize(
    "below",
    ["file/ckpts", "a" * 300 + "/ckpts", "/proc/ckpts"],
    ids=["below a file", "long", "not made by mkdir"],
)
def test_a_path_that_no_directory_can_have_is_an_invalid_request(
    below: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(store.InvalidRequestError, match=r"; correct the path$"):
        store.connect(tmp_path / below)


@pytest.mark.parametrize("timeout", [0, -1, math.nan, math.inf, True, "5", None])
def test_an_invalid_timeout_is_rejected(server_address: str, timeout: Any) -> None:
    wrong = r"^connect: timeout=: expected a timedelta or seconds "
    got = f"got {re.escape(repr(timeout))}$"
    with pytest.raises(store.InvalidRequestError, match=f"{wrong}.*{got}"):
        store.connect(server_address, timeout=timeout)


@pytest.mark.parametrize(
    "given", [{"ca": "a"}, {"cert": "a", "key": "b"}, {"insecure": True}]
)
@pytest.mark.parametrize(
    "target", ["gs://bucket/a", "s3://bucket/a", "file:///a", "memory://"]
)
def test_tls_options_are_rejected_with_an_embedded_store(
    target: str, given: dict[str, Any]
) -> None:
    names = ", ".join(f"{name}=" for name in given)
    with pytest.raises(
        store.InvalidRequestError, match=f"store {target}: .* got {names};"
    ):
        store.connect(target, **given)


@pytest.mark.parametrize("name", ["", "run", "a/b/c", "a/b c", "../b"])
def test_an_invalid_run_name_is_rejected(client: store.Client, name: str) -> None:
    with pytest.raises(store.InvalidRequestError):
        client.run(name)


def test_a_save_inside_jit_is_rejected_with_the_leaf_and_the_remedy(
    run: store.Run,
) -> None:
    def step(x: jax.Array, key: jax.Array) -> jax.Array:
        run.save(0, {"x": x, "key": key})
        return x

    with pytest.raises(store.UnsupportedLeafError) as caught:
        jax.jit(step)(jnp.zeros((8, 8)), jax.random.key(0))

    assert (
        "leaf 'x': expected values, got a tracer of float32[8,8]: call save outside jit"
    ) in str(caught.value)
    assert "leaf 'key': expected values, got a tracer of key<fry>[]" in str(
        caught.value
    )


def test_a_restore_like_tracers_is_rejected_with_the_remedy(run: store.Run) -> None:
    run.save(0, {"x": jnp.zeros(3)}).result()

    with pytest.raises(
        store.MismatchError, match=r"'x': expected an array, got a tracer .* outside"
    ):
        jax.jit(lambda x: run.restore(0, like={"x": x}))(jnp.zeros(3))
