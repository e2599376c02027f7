"""A restore with a mapping returns another tree, and reads what that is made of."""

import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import storesvc_client as store
from storesvc.format.dtypes import CHECKSUM_BYTES
from storesvc_client._restore import mapped
from storesvc_client._restore.open_tree import get_reader
from storesvc_client._telemetry.progress import Meter
from storesvc_client._values.arguments import NEVER
from tests.conftest import gcs_root
from tests.fake_gcs import FakeGcs
from tests.mapping.drawn import DrawnMapping, plan
from tests.support import job_parts
from tests.support.examples import sampled
from tests.support.jax_job import run_job
from tests.support.leaf_bits import leaf_bytes

LAYERS, WIDTH = 4, 64


def values(*shape: int) -> jax.Array:
    return jnp.asarray(
        np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32
    )


def make_model() -> dict[str, Any]:
    return {
        "embed": values(100, WIDTH),
        "layers": {
            str(n): {
                "q": values(WIDTH, WIDTH) + n,
                "k": values(WIDTH // 2, WIDTH) + n,
                "v": values(WIDTH // 2, WIDTH) - n,
                "norm": values(WIDTH) * n,
            }
            for n in range(LAYERS)
        },
    }


RULES: dict[str, Any] = {
    "version": 1,
    "otherwise": "keep",
    "rules": [
        {"from": "model/embed", "to": ["params/embed", "params/head"]},
        {
            "from": [f"model/layers/{{n:int}}/{name}" for name in "qkv"],
            "to": "params/qkv",
            "operations": [
                {"transpose": [1, 0]},
                {"concatenate": {"axis": 1}},
                {"stack": {"axis": 0, "by": "n"}},
            ],
        },
        {"from": "model/layers/{n:int}/norm", "to": "params/layer_{n}/scale"},
        {
            "default": {"shape": [8, 3], "dtype": "bfloat16", "value": 1.5},
            "to": "params/new",
        },
    ],
}


def join_projections(model: dict[str, Any]) -> Any:
    layers = [model["layers"][str(n)] for n in range(LAYERS)]
    return np.stack([np.concatenate([x[k].T for k in "qkv"], 1) for x in layers])


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[store.Run]:
    """A run of a store in this process."""
    with store.connect(f"file://{tmp_path}/store") as client:
        yield client.run("prod/model")


def make_mesh() -> Mesh:
    return jax.make_mesh((2, 4), ("a", "b"))


def test_a_restore_returns_the_tree_of_the_rules(run: store.Run) -> None:
    model = make_model()
    key = jax.random.key(3)
    run.save(5, {"model": model, "step": 5, "key": key, "note": "x"}).result()

    back = run.restore(5, mapping=RULES)

    assert {"params", "step", "key", "note"} == back.keys()
    assert (5, "x") == (back["step"], back["note"])
    assert leaf_bytes(key) == leaf_bytes(back["key"])
    params = back["params"]
    np.testing.assert_array_equal(join_projections(model), params["qkv"])
    np.testing.assert_array_equal(model["embed"], params["embed"])
    np.testing.assert_array_equal(model["embed"], params["head"])
    np.testing.assert_array_equal(
        model["layers"]["2"]["norm"], params["layer_2"]["scale"]
    )
    assert params["new"].dtype == jnp.bfloat16
    assert 1.5 == float(params["new"][7, 2])


def test_it_is_restored_like_a_state_onto_eight_devices(embedded: store.Run) -> None:
    model = make_model()
    embedded.save(5, {"model": model}).result()
    opened = embedded.open(5).map(RULES)

    back = opened.restore(
        mesh=make_mesh(),
        rules=[("qkv", P("a", None, "b")), ("embed|head", P(None, "b")), ("", P())],
    )
    again = embedded.restore(5, like=back, mapping=RULES)

    for found in back, again:
        assert 8 == len(found["params"]["qkv"].sharding.device_set)
        np.testing.assert_array_equal(join_projections(model), found["params"]["qkv"])
        np.testing.assert_array_equal(model["embed"], found["params"]["head"])
    assert back["params"]["qkv"].sharding == again["params"]["qkv"].sharding


def test_a_leaf_that_no_rule_makes_keeps_its_initial_value(run: store.Run) -> None:
    run.save(1, {"encoder": {"w": values(8, 4)}}).result()
    rule = {"from": "encoder/w", "to": "body/w"}
    rules: dict[str, Any] = {"version": 1, "rules": [rule]}
    initial = values(3)
    like: Any = {"body": {"w": jnp.zeros((8, 4))}, "head": initial}

    with pytest.raises(store.MismatchError, match="leaf 'head': not in the checkpoint"):
        run.restore(1, like=like, mapping=rules)
    restored = run.restore(1, like=like, mapping=rules, missing="keep")

    assert restored["head"] is initial
    assert leaf_bytes(values(8, 4)) == leaf_bytes(restored["body"]["w"])


@pytest.mark.parametrize("spec", [P(), P("b"), P(None, "b"), P(None, None, ("a", "b"))])
def test_each_stored_chunk_is_read_once(embedded: store.Run, spec: P) -> None:
    model = make_model()
    embedded.save(5, {"model": model}).result()
    opened = embedded.open(5)

    mapping = opened.map(RULES)
    mapping.restore(mesh=make_mesh(), rules=[("qkv", spec), ("", P())])

    assert mapping.report is not None
    assert opened.info.stored_bytes == mapping.report.read_bytes


def cut(axis: int, start: int, stop: int) -> dict[str, Any]:
    return {"slice": {"axis": axis, "start": start, "stop": stop}}


@pytest.mark.parametrize(
    ("shape", "to", "operations", "expected"),
    [
        ((4, 0), "x/{n}", [{"unstack": {"axis": 0, "by": "n"}}], (0,)),
        ((4, 0), "x/0", [{"reshape": [0, 7]}], (0, 7)),
        ((), "x/0", [{"reshape": [1]}, cut(0, 1, 1)], (0,)),
        ((2, 3), "x/0", [cut(1, 3, 3), {"reshape": [-1, 2]}], (0, 2)),
        ((3, 0), "x/0", [{"transpose": [1, 0]}, {"cast": "bfloat16"}], (0, 3)),
    ],
)
def test_a_leaf_without_elements_has_its_shape(
    embedded: store.Run,
    shape: tuple[int, ...],
    to: str,
    operations: list[dict[str, Any]],
    expected: tuple[int, ...],
) -> None:
    embedded.save(5, {"a": jnp.ones(shape), "b": values(3)}).result()
    rules = [{"from": "a", "to": to, "operations": operations}]

    back = embedded.restore(
        5, mapping={"version": 1, "rules": rules, "otherwise": "keep"}
    )

    assert expected == back["x"]["0"].shape
    np.testing.assert_array_equal(values(3), back["b"])


def test_leaves_that_differ_in_the_sign_of_zero_are_not_taken_for_one_form(
    embedded: store.Run,
) -> None:
    embedded.save(5, {"a": values(3), "b": values(3)}).result()
    rules = [
        {
            "from": key,
            "to": key,
            "operations": [{"pad": {"axis": 0, "size": 4, "value": value}}],
        }
        for key, value in (("a", 0.0), ("b", -0.0))
    ]

    back = embedded.restore(5, mapping={"version": 1, "rules": rules})

    assert [False, True] == [bool(np.signbit(back[key][3])) for key in "ab"]


def test_a_part_reads_only_what_it_is_made_of(embedded: store.Run) -> None:
    embedded.save(5, {"model": make_model()}).result()
    mapping = embedded.open(5).map(RULES)

    back = mapping.restore(select="params/layer_1/scale")

    assert mapping.report is not None
    assert 4 * WIDTH + CHECKSUM_BYTES == mapping.report.read_bytes
    assert ["layer_1"] == [*back["params"]]


@pytest.mark.parametrize(
    "spec", sampled([P("a"), P(None, "b"), P("b", "a")], every=3), ids=str
)
@pytest.mark.parametrize("name", ["split", "unstacked", "transposed"])
def test_large_leaves_are_read_in_batches_with_few_extra_bytes(
    embedded: store.Run, monkeypatch: pytest.MonkeyPatch, spec: P, name: str
) -> None:
    """Bars: memory of one batch, and stored bytes read for each byte returned."""
    rules = {
        "split": {
            "from": "w",
            "to": ["x/q", "x/k", "x/v"],
            "operations": [{"split": {"axis": 1, "sizes": [1024, 256, 256]}}],
        },
        "unstacked": {
            "from": "w",
            "to": "x/{n}",
            "operations": [
                {"reshape": [4, 2048, 1536]},
                {"unstack": {"axis": 0, "by": "n"}},
            ],
        },
        "transposed": {"from": "w", "to": "x/w", "operations": [{"transpose": [1, 0]}]},
    }[name]
    saved = np.arange(8192 * 1536, dtype=np.float32).reshape(8192, 1536)  # 48 MiB
    embedded.save(5, {"w": jnp.asarray(saved)}).result()
    monkeypatch.setattr(mapped, "BATCH_BYTES", 16 << 20)
    opened = embedded.open(5)
    mapping = opened.map({"version": 1, "rules": [rules]})

    back = mapping.restore(mesh=make_mesh(), rules=[("", spec)])["x"]

    if name == "split":
        found = np.concatenate([back["q"], back["k"], back["v"]], 1)
    elif name == "unstacked":
        found = np.concatenate([back[str(n)] for n in range(4)])
    else:
        found = np.asarray(back["w"]).T
    np.testing.assert_array_equal(saved, found)
    assert mapping.report is not None
    assert mapping.report.read_bytes <= 1.05 * saved.nbytes
    assert saved.nbytes == mapping.report.returned_bytes


def test_a_renamed_leaf_is_returned_in_the_buffer_that_it_was_read_into(
    embedded: store.Run,
) -> None:
    embedded.save(5, {"a": values(64, 64)}).result()
    rules = {"version": 1, "rules": [{"from": "a", "to": "b"}]}
    reader = mapped.MappedReader(get_reader(embedded.open(5)), rules)
    taken = list[Any]()

    assembly = reader.plan_reads(
        [(0, [((0, 64), (0, 64))])],
        taken.extend,
        Meter("restore", "x"),
        NEVER,
    )

    assert [] == assembly.missing  # nothing is built
    reader.open_source().read([], assembly)
    assert [0] == [buffer.row for buffer in taken]


def test_leaves_are_read_and_described_as_the_rules_show_them(
    embedded: store.Run,
) -> None:
    model = make_model()
    embedded.save(5, {"model": model}, items={"config": {"x": 1}}).result()

    opened = embedded.open(5).map(RULES)

    assert (LAYERS, WIDTH, 2 * WIDTH) == opened.leaves["params/qkv"].shape
    assert {"x": 1} == opened.items["config"]
    ((_, found),) = opened.read(["params/qkv"])
    np.testing.assert_array_equal(join_projections(model), found)
    assert opened.statistics("params/qkv").count == found.size


def test_rules_may_be_a_file(embedded: store.Run, tmp_path: Path) -> None:
    embedded.save(5, {"w": values(3)}).result()
    toml, of_json = tmp_path / "r.toml", tmp_path / "r.json"
    toml.write_text('version = 1\n[[rules]]\nfrom = "w"\nto = "v"\n')
    of_json.write_text(json.dumps({"version": 1, "rules": [{"from": "w", "to": "v"}]}))

    paths: list[Any] = [str(toml), of_json]
    for path in paths:
        assert ["v"] == [*embedded.restore(5, mapping=path)]
    rejected: list[tuple[Any, str]] = [
        (tmp_path / "r.yaml", "ends in .toml or .json"),
        (tmp_path / "none.toml", "No such file"),
        (3, "expected a file or a document of rules"),
    ]
    for path, expected in rejected:
        with pytest.raises(store.InvalidRequestError, match=expected):
            embedded.restore(5, mapping=path)


def test_rules_that_do_not_fit_read_no_leaf(embedded: store.Run) -> None:
    embedded.save(5, {"w": values(3), "x": values(2)}).result()
    rules = {"version": 1, "rules": [{"from": "w", "to": "v"}]}

    with pytest.raises(store.MismatchError, match="none for x; "):
        embedded.restore(5, mapping=rules)
    fits = rules | {"otherwise": "drop"}
    with pytest.raises(store.MismatchError, match="leaf 'v': in the checkpoint"):
        embedded.restore(5, mapping=fits, like={"y": values(3)})
    with pytest.raises(store.MismatchError, match="@5 mapped by mapping: rule 1"):
        embedded.open(5).map(fits).map(fits)


def test_a_second_mapping_takes_the_tree_that_the_first_makes(
    embedded: store.Run,
) -> None:
    model = make_model()
    embedded.save(5, {"model": model, "step": 5}).result()
    second = {
        "version": 1,
        "otherwise": "drop",
        "rules": [
            {
                "from": "params/qkv",
                "to": ["q/{n}", "kv/{n}"],
                "operations": [
                    {"unstack": {"axis": 0, "by": "n"}},
                    {"split": {"axis": 1, "sizes": [WIDTH, WIDTH]}},
                    {"transpose": [1, 0]},
                ],
            },
            {"from": "params/embed", "to": "e"},
            {"from": "step", "to": "steps"},
            {"from": "params/new", "to": "n", "operations": [{"reshape": [-1]}]},
        ],
    }

    opened = embedded.open(5).map(RULES).map(second)
    back = opened.restore()

    assert opened.report is not None
    for n in range(LAYERS):
        layer = model["layers"][str(n)]
        np.testing.assert_array_equal(layer["q"], back["q"][str(n)])
        kv = np.concatenate([layer["k"], layer["v"]])
        np.testing.assert_array_equal(kv, back["kv"][str(n)])
    np.testing.assert_array_equal(model["embed"], back["e"])
    assert (5, (24,)) == (back["steps"], back["n"].shape)
    assert opened.report.read_bytes <= 1.05 * opened.report.returned_bytes


def test_damage_names_the_stored_leaf(embedded: store.Run, tmp_path: Path) -> None:
    embedded.save(5, {"w": values(300, 300)}).result()
    rule = {"from": "w", "to": "v", "operations": [{"transpose": [1, 0]}]}
    files = (path for path in (tmp_path / "store/data").rglob("*") if path.is_file())
    largest = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)

    with pytest.raises(store.DataLossError, match="leaf 'w' chunk 0"):
        embedded.restore(5, mapping={"version": 1, "rules": [rule]})


def test_a_checkpoint_of_another_project_is_mapped_in_place(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    weights = {f"model.layers.{n}.w": np.asarray(values(8, 4) + n) for n in range(3)}
    save_file(weights, tmp_path / "model.safetensors")
    rule = {
        "from": "model/layers/{n:int}/w",
        "to": "w",
        "operations": [{"transpose": [1, 0]}, {"stack": {"axis": 0, "by": "n"}}],
    }

    opened = store.open_foreign(f"safetensors:{tmp_path}").open()
    mapping = opened.map({"version": 1, "rules": [rule]})
    back = mapping.restore()

    wanted = np.stack([each.T for _, each in sorted(weights.items())])
    np.testing.assert_array_equal(wanted, back["w"])
    assert mapping.report is not None
    assert wanted.nbytes + 3 * CHECKSUM_BYTES == mapping.report.read_bytes


@pytest.mark.parametrize("spec", [P(), P("b"), P(None, ("a", "b"))])
@pytest.mark.parametrize("axis", [0, 1])
def test_ranges_of_an_axis_change_their_order(
    embedded: store.Run, tmp_path: Path, axis: int, spec: P
) -> None:
    """They are no boxes of what is stored, here or in files of another project."""
    from safetensors.numpy import save_file

    array = np.asarray(values(128, 256))
    embedded.save(1, {"w": array, "v": array}).result()
    save_file({"w": array, "v": array}, tmp_path / "model.safetensors")
    halves, parts = {"heads": 8, "from": "halves"}, {"parts": 2}
    mapping = {
        "version": 1,
        "rules": [
            {
                "from": "w",
                "to": "pairs",
                "operations": [{"permute_heads": {"axis": axis, **halves}}],
            },
            {
                "from": "v",
                "to": ["even", "odd"],
                "operations": [{"deinterleave": {"axis": axis, **parts}}],
            },
        ],
    }
    heads = np.moveaxis(array, axis, -1).reshape(-1, 8, 2, array.shape[axis] // 16)
    pairs = heads.swapaxes(2, 3).reshape(-1, array.shape[axis])
    wanted = {
        "pairs": np.moveaxis(
            pairs.reshape(np.moveaxis(array, axis, -1).shape), -1, axis
        ),
        "even": array[::2] if axis == 0 else array[:, ::2],
        "odd": array[1::2] if axis == 0 else array[:, 1::2],
    }

    for reader in (
        embedded.open(1),
        store.open_foreign(f"safetensors:{tmp_path}").open(),
    ):
        view = reader.map(mapping)
        found = view.restore(mesh=make_mesh(), rules=[("", spec)])
        assert wanted.keys() == found.keys()
        for key, each in wanted.items():
            np.testing.assert_array_equal(each, found[key], err_msg=key)
        assert view.report is not None
        assert view.report.read_bytes <= 2 * array.nbytes + 64


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_drawn_rules_restore_what_numpy_makes(run: store.Run, seed: int) -> None:
    drawn = DrawnMapping(Random(seed))
    plan(drawn.rules, drawn.arrays)
    tree: dict[str, Any] = {}
    for key, array in drawn.arrays.items():
        *above, name = key.split("/")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[name] = array
    run.save(seed, tree).result()
    mapping = run.open(seed).map({"version": 1, "rules": drawn.rules})

    found = {leaf.key: array for leaf, array in mapping.read(mapping.leaves)}

    assert drawn.wanted.keys() == found.keys()
    for key, array in drawn.wanted.items():
        np.testing.assert_array_equal(array, found[key])


@pytest.mark.slow
def test_processes_of_a_job_restore_with_the_same_rules_or_not_at_all(
    tmp_path: Path,
) -> None:
    where = Mesh(np.array(jax.devices()[:4]).reshape(4, 1), ("row", "column"))
    with store.connect(tmp_path.as_uri()) as client:
        client.run(job_parts.RUN).save(1, job_parts.rows_on(where)).result()

    results = run_job(
        "tests.support.job_parts:reads_mapped", 4, devices=1, target=tmp_path.as_uri()
    )

    assert [[]] * 4 == [each["wrong"] for each in results]
    for mapping, plain in (each["read_bytes"] for each in results):
        assert mapping == plain
    for others, spread in (each["errors"] for each in results):
        assert "other leaves, shardings" in others
        assert "expected spread= without mapping= and migrations" in spread


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stack", "transpose", "split", "built"])
def test_stored_chunks_are_read_into_the_target_or_in_batches(
    embedded: store.Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    rules: dict[str, dict[str, Any]] = {
        "stack": {"to": "x", "operations": [{"stack": {"axis": 1, "by": "n"}}]},
        "transpose": {"to": "x/{n}", "operations": [{"transpose": [1, 0]}]},
        "split": {
            "to": ["q/{n}", "k/{n}"],
            "operations": [{"split": {"axis": 1, "sizes": [1536, 512]}}],
        },
        "built": {
            "to": "x/{n}",
            "operations": [{"cast": "bfloat16"}, {"cast": "float32"}],
        },
    }
    layers = {str(n): jnp.full((4096, 2048), n, jnp.float32) for n in range(4)}
    embedded.save(5, {"l": layers}).result()  # 128 MiB
    rule = {"from": "l/{n:int}", **rules[name]}
    inner = get_reader(embedded.open(5))
    reader = mapped.MappedReader(inner, {"version": 1, "rules": [rule]})
    monkeypatch.setattr(mapped, "BATCH_BYTES", 40 << 20)
    allocate, held, most = inner.allocate, [0], [0]

    def count(size: int) -> Any:
        memory = allocate(size)
        held[0] += size
        most[0] = max(most[0], held[0])
        weakref.finalize(memory, lambda: held.__setitem__(0, held[0] - size))
        return memory

    inner.allocate = count
    for _, array in reader.read_arrays(range(len(reader.tree.leaves))):
        assert array.size

    if name == "built":
        assert (16 << 20) <= most[0] <= (40 << 20)
    else:
        assert 0 == most[0]
    del array
    gc.collect()
    assert 0 == held[0]


@pytest.mark.emulated
def test_a_bucket_sends_what_the_wanted_leaves_are_made_of(gcs: FakeGcs) -> None:
    layers = {str(n): {"q": values(1024, 512) + n, "k": values(512)} for n in range(4)}
    rules = {
        "version": 1,
        "otherwise": "drop",
        "rules": [
            {
                "from": "l/{n:int}/q",
                "to": "x/{n}/q",
                "operations": [{"transpose": [1, 0]}],
            },
            {"from": "l/{n:int}/k", "to": "x/{n}/k"},
        ],
    }
    with store.connect(gcs_root()) as client:
        run = client.run("prod/model")
        run.save(5, {"l": layers, "other": values(2048, 1024)}).result()
        opened = run.open(5)
        before = gcs.sent_bytes

        back = opened.map(rules).restore(
            select="x/[13]/q", mesh=make_mesh(), rules=[("", P("a", "b"))]
        )["x"]

        sent = gcs.sent_bytes - before
    for n in (1, 3):
        np.testing.assert_array_equal(layers[str(n)]["q"].T, back[str(n)]["q"])
    wanted = 2 * layers["1"]["q"].nbytes
    assert wanted <= sent <= 1.05 * wanted
