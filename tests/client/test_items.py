"""Items next to a tree, and texts, bytes and integers in it, over every path to a
store."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import PartitionSpec

import storesvc_client as store
from storesvc.format.layout import RunPaths
from storesvc.format.manifests import Manifest
from storesvc.format.names import RunName
from storesvc_client._restore.open_tree import get_reader
from tests.conftest import gcs_root
from tests.support.programs import run_python
from tests.support.saved_checkpoint import flip
from tests.support.sessions import send_through_server

MIB = 1 << 20
RUN = "tests/items"

TREE = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "name": "héllo\n",
    "raw": b"\x00\xff",
    "large": 2**70,
    "small": -(2**63) - 1,
    "none": {"text": "", "bytes": b""},
    "step": 3,
}

ITEMS = {
    "config": {"layers": 32, "rates": [0.1, -0.0], "name": None, "on": True},
    "notes": "a text\nof two lines",
    "tokenizer": bytes(range(256)),
    "seed": 10**40,
    "nothing": None,
    "no-text": "",
    "no-bytes": b"",
    "no-json": {},
    "large": np.random.default_rng(0).bytes(5 * MIB),
    "long": "x" * (17 * MIB),  # of more than one chunk
    "one": b"\x07",
    "data": store.PerProcess({"epoch": 1, "at": 2**40}),
}


def values(items: dict[str, Any]) -> dict[str, Any]:
    """Returns items as a process that saved alone reads them."""
    return {
        name: value.value if isinstance(value, store.PerProcess) else value
        for name, value in items.items()
    }


@pytest.fixture(
    params=[
        "embedded",
        "streamed",
        pytest.param("served", marks=pytest.mark.slow),
        pytest.param("direct", marks=pytest.mark.slow),
        pytest.param("bucket", marks=pytest.mark.slow),
    ]
)
def anywhere(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[], store.Client]]:
    """Connects to one store, each time again."""
    target, options = (tmp_path / "store").as_uri(), dict[str, Any]()
    if request.param in ("served", "direct"):
        server = request.getfixturevalue("serve")(tmp_path / "store")
        options = {"direct": target} if request.param == "direct" else {}
        target = server.address
    elif request.param == "bucket":
        request.getfixturevalue("bucket_storage")
        target = gcs_root()

    def connect() -> store.Client:
        client = store.connect(target, **options)
        if request.param == "streamed":
            send_through_server(client)
        return client

    yield connect
    shutil.rmtree(tmp_path / "store", ignore_errors=True)


def test_items_and_values_of_a_tree_come_back_as_they_were(
    anywhere: Callable[[], store.Client],
) -> None:
    with anywhere() as client:
        saved = client.run(RUN).save(1, TREE, items=ITEMS).result()
    with anywhere() as client:
        run = client.run(RUN)
        found = run.items(1)
        back = run.restore(1)
        damages = run.verify(1).damages

        assert values(ITEMS) == dict(found)
    assert (len(TREE) + 1, len(ITEMS)) == (saved.leaf_count, saved.item_count)
    assert TREE["w"].tobytes() == back.pop("w").tobytes()  # type: ignore[attr-defined]
    assert {key: TREE[key] for key in back} == back
    assert () == damages


@pytest.mark.slow
def test_what_did_not_change_is_stored_once(
    anywhere: Callable[[], store.Client],
) -> None:
    with anywhere() as client:
        run = client.run(RUN)
        run.save(1, TREE, items=ITEMS).result()
        again = run.save(2, TREE, items=ITEMS)
        other = run.save(3, TREE, items={**ITEMS, "one": b"\x08", "a": "first"})

        assert 0 == again.report().sent_bytes
        assert 1 + 4 + 5 + 4 == other.report().sent_bytes
        assert b"\x08" == run.items(3)["one"]
        assert values(ITEMS) == dict(run.items(2))
    with anywhere() as client:  # another process, which knows no checksums
        run = client.run(RUN)
        last = run.save(4, TREE, items=ITEMS)

        assert 1 + 4 == last.report().sent_bytes
        assert values(ITEMS) == dict(run.items(4))


def test_items_that_change_in_size_do_not_make_the_tree_be_copied_again(
    run: store.Run,
) -> None:
    tree = {"w": np.ones(3 * MIB, np.uint8)}
    run.save(1, tree, items={"data": {"at": 9}, "z": "a"}).result()
    save = run.save(2, tree, items={"data": {"at": 10}, "b": "x" * 9})

    assert len('{"at":10}') + 9 + 2 * 4 == save.report().sent_bytes
    assert "await others" not in save.report().timings
    assert {"data": {"at": 10}, "b": "x" * 9} == dict(run.items(2))
    assert tree["w"].tobytes() == run.restore(2)["w"].tobytes()


@pytest.mark.parametrize("mode", ["host", "device", "none"])
def test_items_are_as_they_were_when_save_was_called(run: store.Run, mode: Any) -> None:
    config = {"layers": [1, 2]}
    save = run.save(
        1, {"w": jax.numpy.ones(8)}, items={"config": config}, snapshot=mode
    )
    config["layers"].append(3)
    save.result()

    assert {"layers": [1, 2]} == run.items(1)["config"]


def test_trees_do_not_see_items(run: store.Run) -> None:
    tree = {"w": np.arange(4), "item": {"config": np.arange(3)}, "%item": np.ones(2)}
    run.save(1, tree, items={"config": "text", "data": store.PerProcess(1)}).result()
    opened = run.open(1)

    assert ["%25item", "item/config", "w"] == sorted(opened.leaves)
    assert tree.keys() == run.restore(1).keys()
    assert tree.keys() == run.restore(1, like=tree).keys()
    assert tree.keys() == run.restore(1, select="**").keys()
    assert tree.keys() == run.restore(1, select=re.compile("")).keys()
    with pytest.raises(store.NotFoundError, match=r"no leaf .* matches '%item/config'"):
        run.restore(1, select="%item/config")
    with pytest.raises(store.NotFoundError, match="has no leaf '%item/config'"):
        list(opened.read(["%item/config"]))
    mesh = jax.make_mesh((8,), ("x",))
    with pytest.raises(store.MismatchError, match="'config': not in the checkpoint"):
        run.restore(1, like={**tree, "config": "text"})
    on_mesh = run.restore(1, mesh=mesh, rules=[("", PartitionSpec())])
    assert tree.keys() == on_mesh.keys()


def test_a_tree_that_is_one_leaf_has_items(run: store.Run) -> None:
    run.save(1, "a text", items={"config": [1]}).result()
    run.save(2, np.arange(3), items={"config": [2]}).result()

    assert ("a text", [1]) == (run.restore(1), run.items(1)["config"])
    assert ([0, 1, 2], [2]) == (run.restore(2).tolist(), run.items(2)["config"])
    assert () == run.verify(1).damages


def test_a_tree_without_leaves_has_items(run: store.Run) -> None:
    run.save(1, {}, items={"config": [1]}).result()

    assert ({}, {"config": [1]}) == (run.restore(1), dict(run.items(1)))


def test_a_checkpoint_without_items_has_none(run: store.Run) -> None:
    run.save(1, {"x": 1}, items={}).result()
    items = run.items(1)

    assert (0, {}, 0) == (len(items), dict(items), run.checkpoint(1).item_count)
    assert items.get("config") is None
    with pytest.raises(store.NotFoundError, match=r"@1 has no items$"):
        items["config"]


def test_an_unknown_item_is_not_found_and_the_nearest_are_named(run: store.Run) -> None:
    run.save(1, {"x": 1}, items={"config": 1, "notes": "", "data": 2}).result()
    items = run.items(1)

    assert "config" in items
    assert "confg" not in items
    assert (1, 7) == (items.get("config", 7), items.get("confg", 7))
    for read in (items.__getitem__, items.info, items.per_process, items.encoded):
        with pytest.raises(
            store.NotFoundError, match="@1 has no item 'confg'; nearest: config"
        ):
            read("confg")
    with pytest.raises(
        store.NotFoundError, match="no item 'qqq'; it has: config, data, notes"
    ):
        items["qqq"]


def test_an_item_of_processes_is_read_by_as_many(run: store.Run) -> None:
    run.save(1, {"x": 1}, items={"data": store.PerProcess([7]), "config": "c"}).result()
    items = run.items(1)

    assert [7] == items["data"]
    assert [[7]] == items.per_process("data")
    assert b"[7]" == items.encoded("data", 0)
    assert 1 == items.info("data").process_count
    with pytest.raises(
        store.InvalidRequestError, match="the number of a process, below 1"
    ):
        items.encoded("data")
    with pytest.raises(store.NotFoundError, match="no value of process 1"):
        items.encoded("data", 1)
    with pytest.raises(store.NotFoundError, match="of process 0, but one value for"):
        items.encoded("config", 0)
    with pytest.raises(store.InvalidRequestError, match="expected a value of each"):
        items.per_process("config")


def test_the_details_of_items_are_known_without_a_read(run: store.Run) -> None:
    run.save(1, {"x": 1}, items=ITEMS).result()
    items = run.items(1)

    assert sorted(ITEMS) == list(items)
    assert (
        store.ItemInfo(name="notes", kind="text", size_bytes=19, process_count=None)
    ) == items.info("notes")
    assert {"config": "json", "seed": "json", "tokenizer": "bytes"} == {
        name: items.info(name).kind for name in ("config", "seed", "tokenizer")
    }
    assert repr(items).startswith(f"<Items of {run.name}@1: config, data, ")


BAD_ITEMS: dict[str, tuple[Any, str]] = {
    "no mapping": ([1], "expected a mapping"),
    "a number as name": ({1: "x"}, "expected texts as names, got 1"),
    "capitals": ({"Config": "x"}, "item 'Config': expected 1 to 63 lower-case"),
    "a digit first": ({"1a": "x"}, "item '1a': expected .*, a letter first"),
    "a path": ({"a/b": "x"}, "item 'a/b': expected 1 to 63"),
    "an underscore": ({"a_b": "x"}, "item 'a_b': expected 1 to 63"),
    "too many": ({f"x{n}": n for n in range(65)}, "expected at most 64 items, got 65"),
    "a tuple": ({"a": {"b": (1,)}}, r"item 'a': at \['b'\]: .*got tuple"),
    "nan": ({"a": float("nan")}, "item 'a': expected a finite number"),
    "a value of a process": (
        {"a": store.PerProcess({1: 2})},
        "item 'a': expected texts as keys",
    ),
}


@pytest.mark.parametrize(("items", "match"), BAD_ITEMS.values(), ids=BAD_ITEMS)
def test_an_item_that_cannot_be_kept_is_rejected_and_nothing_is_sent(
    run: store.Run, items: Any, match: str
) -> None:
    with pytest.raises(store.InvalidRequestError, match=match) as caught:
        run.save(1, {"x": 1}, items=items)

    assert str(caught.value).startswith(f"save to {run.name}: items=: ")
    run.save(1, {"x": 1}, items={f"x{n}": n for n in range(64)}).result()
    assert 64 == len(run.items(1))


# --- values of a tree -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "like"),
    [
        ("a", "another text"),
        (b"a", b""),
        (2**64, -(2**90)),
        (2**64, 0),
        (-7, 2**64),
        (2**63 - 1, 0),
        (-(2**63), 0),
    ],
)
def test_a_value_is_restored_like_any_of_its_type(
    run: store.Run, saved: Any, like: Any
) -> None:
    run.save(1, {"v": saved, "x": np.ones(3)}).result()

    back = run.restore(1, like={"v": like, "x": np.zeros(3)})
    assert (type(saved), saved) == (type(back["v"]), back["v"])
    assert saved == run.restore(1)["v"]


@pytest.mark.parametrize(
    ("saved", "like", "match"),
    [
        ("a", b"a", r"Python value \(text\), in the target a Python value \(bytes\)"),
        ("a", 1, r"Python value \(text\), in the target a Python scalar \(int64\)"),
        (2**64, 1.0, r"Python value .*, in the target a Python scalar \(float64\)"),
        (2**64, True, r"Python value .*, in the target a Python scalar \(bool\)"),
        ("abc", np.zeros(3, np.uint8), r"Python value .* in the target \(3,\) uint8"),
        (np.zeros(3, np.uint8), "abc", r"\(3,\) uint8, in the target a .* \(text\)"),
    ],
    ids=str,
)
def test_a_value_is_restored_like_no_other_type(
    run: store.Run, saved: Any, like: Any, match: str
) -> None:
    run.save(1, {"v": saved}).result()

    with pytest.raises(store.MismatchError, match=match):
        run.restore(1, like={"v": like})


def test_a_value_that_like_adds_keeps_its_value(run: store.Run) -> None:
    run.save(1, {"x": 1}).result()
    like = {"x": 0, "name": "kept", "large": 2**99, "raw": b"kept"}

    assert {**like, "x": 1} == run.restore(1, like=like, missing="keep")


def test_a_cast_leaves_texts_as_they_are(run: store.Run) -> None:
    run.save(1, {"x": np.ones(2, np.float32), "name": "text"}).result()

    back = run.restore(1, cast="bfloat16")
    assert ("bfloat16", "text") == (back["x"].dtype.name, back["name"])


@pytest.mark.slow
def test_values_change_in_kind_and_size_between_saves(run: store.Run) -> None:
    trees = [
        {"v": value, "x": np.ones(5)}
        for value in (1, 2**64, "1", b"1", b"12", "", 2**64 + 1, 1.0)
    ]
    for step, tree in enumerate(trees):
        run.save(step, tree)
    run.wait()

    for step, tree in enumerate(trees):
        back = run.restore(step)
        assert (type(tree["v"]), tree["v"]) == (type(back["v"]), back["v"])


def test_a_text_that_is_no_unicode_is_rejected_with_its_leaf(run: store.Run) -> None:
    run.save(1, {"x": "abc"}).result()
    for step in (2, 3):
        with pytest.raises(
            store.UnsupportedLeafError, match="leaf 'x': expected Unicode, got a text"
        ):
            run.save(step, {"x": "a\ud800"})


def test_classes_that_are_not_exactly_texts_are_rejected(run: store.Run) -> None:
    class Text(str):
        __slots__ = ()

    with pytest.raises(store.UnsupportedLeafError, match=r"leaf 'x': .* got Text"):
        run.save(1, {"x": Text("a")})
    with pytest.raises(store.UnsupportedLeafError, match=r"leaf 'x': .* got bytearray"):
        run.save(1, {"x": bytearray(b"a")})


# --- storage --------------------------------------------------------------------------


def saved_manifest(root: Path) -> Manifest:
    with store.connect(root.as_uri()) as client:
        return get_reader(client.run(RUN).open(1)).manifest


@pytest.mark.parametrize(
    "plane", ["direct", pytest.param("streamed", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["tokenizer", "config", "long", "data"])
def test_a_flipped_bit_of_an_item_is_caught_by_verify_and_by_reading(
    tmp_path: Path, name: str, plane: str
) -> None:
    root = tmp_path / "store"
    with store.connect(root.as_uri()) as client:
        client.run(RUN).save(1, TREE, items=ITEMS).result()
    manifest = saved_manifest(root)
    tree, places = manifest.tree, manifest.places
    key = f"%item/{name}" + "/0" * (name == "data")
    chunk = int(tree.first_chunk[tree.by_key[key]])
    pool = root / RunPaths(RunName.parse(RUN)).pool
    file = pool / places.files[places.file[chunk]]
    flip(file, int(places.offset[chunk]) + 2, 3)

    what = f"item '{name}'" + " of process 0" * (name == "data") + " chunk 0"
    with store.connect(root.as_uri()) as client:
        if plane == "streamed":
            send_through_server(client)
        run = client.run(RUN)
        items = run.items(1)
        with pytest.raises(store.DataLossError, match=f"{RUN}@1 {what}: expected"):
            items[name]
        assert ITEMS["notes"] == items["notes"]
        assert "héllo\n" == run.restore(1, select="name")["name"]
        (damage,) = run.verify(1).damages
    assert (key, (0,), "checksum") == (damage.key, damage.index, damage.kind)
    assert damage.message.startswith(what)
    shutil.rmtree(root)


def test_items_are_arrays_for_any_client_of_zarr(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with store.connect(root.as_uri()) as client:
        saved = client.run(RUN).save(1, TREE, items=ITEMS).result()
    places = root / RunPaths(RunName.parse(RUN)).root

    def read(key: str) -> bytes:
        kvstore = {
            "driver": "ocdbt",
            "base": f"file://{places}/pool/",
            "manifest": f"file://{places}/trees/{saved.key_space}/",
            "path": f"{key}/",
        }
        spec = {"driver": "zarr3", "kvstore": kvstore}
        array: Any = ts.open(spec).result().read().result()
        assert ("uint8", 1) == (array.dtype.name, array.ndim)
        return bytes(array.tobytes())

    assert ITEMS["tokenizer"] == read("%item/tokenizer")
    assert ITEMS["large"] == read("%item/large")
    assert b'{"at":1099511627776,"epoch":1}' == read("%item/data/0")
    assert "héllo\n".encode() == read("name")
    assert b"" == read("%item/no-text")


@pytest.mark.slow
def test_a_collection_keeps_the_chunks_of_items_that_a_later_checkpoint_shares(
    tmp_path: Path,
) -> None:
    with store.connect((tmp_path / "store").as_uri()) as client:
        run = client.run(RUN)
        for step in (1, 2, 3):
            run.save(step, {"step": step}, items=ITEMS).result()
        run.delete(1, purge_delay=0)
        run.delete(2, purge_delay=0)
        list(client.collect(grace=0))

        assert [3] == run.steps()
        assert values(ITEMS) == dict(run.items(3))
        assert () == run.verify(3).damages


def test_a_diff_names_items_apart_from_leaves(run: store.Run) -> None:
    tree = {"w": np.ones(3), "name": "a", "kind": "1"}
    items = {"same": 1, "text": "abc", "gone": b"", "kind": "1", "size": [1]}
    run.save(1, tree, items={**items, "data": store.PerProcess(1)}).result()
    other = {"same": 1, "text": "abd", "new": {}, "kind": 1, "size": [1, 2]}
    run.save(
        2,
        {"w": np.ones(3), "name": "ab", "kind": b"1"},
        items={**other, "data": store.PerProcess(2)},
    ).result()

    found = run.diff(1, 2)

    assert 1 == found.same_leaf_count
    assert [
        ("kind", "dtype", "text", "bytes", (1,), (1,)),
        ("name", "content", "text", "text", (1,), (2,)),
    ] == [
        (d.key, d.kind, d.base_dtype, d.dtype, d.base_shape, d.shape)
        for d in found.differences
    ]
    assert [
        ("data", 0, "content", "json", 1, "json", 1),
        ("gone", None, "removed", "bytes", 0, None, None),
        ("kind", None, "kind", "text", 1, "json", 1),
        ("new", None, "added", None, None, "json", 2),
        ("size", None, "content", "json", 3, "json", 5),
        ("text", None, "content", "text", 3, "text", 3),
    ] == [
        (
            *(d.name, d.process, d.kind, d.base_value_kind, d.base_size_bytes),
            *(d.value_kind, d.size_bytes),
        )
        for d in found.items
    ]
    assert not found.is_same
    assert run.diff(1, 1).is_same


def test_checkpoints_that_differ_in_items_alone_are_not_the_same(
    run: store.Run,
) -> None:
    run.save(1, {"x": 1}, items={"a": "x"}).result()
    run.save(2, {"x": 1}, items={"a": "y"}).result()

    found = run.diff(1, 2)

    assert ((), 1, False) == (found.differences, len(found.items), found.is_same)


@pytest.mark.slow
def test_reading_items_needs_no_jax(server_address: str, run: store.Run) -> None:
    run.save(1, {"x": 1}, items={"config": {"a": 1}, "raw": b"x"}).result()
    program = (
        "import sys\n"
        "import storesvc_client as store\n"
        f"with store.connect({server_address!r}) as client:\n"
        f"    items = client.run({run.name!r}).items()\n"
        "    print(items['config'], items['raw'])\n"
        "print(*sys.modules)"
    )

    done = run_python(program)

    value, modules = done.stdout.splitlines()
    assert "{'a': 1} b'x'" == value
    assert set() == set(modules.split()) & {"flax", "jax", "jaxlib", "tensorstore"}
