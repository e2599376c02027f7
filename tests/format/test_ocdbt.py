"""TensorStore reads the key spaces that we write by hand as its own.

``tests/golden/ocdbt`` was written once, by ``python -m tests.format.test_ocdbt``; what
is written today must be the same, byte for byte.
"""

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from storesvc.errors import CorruptDataError
from storesvc.format import ocdbt
from storesvc.format.chunks import MAX_VALUE, ChunkLocations
from storesvc.format.ocdbt import ValueLocation
from storesvc.storage.object_bucket import KeySpace, TensorStoreBucket

GOLDEN = Path(__file__).parents[1] / "golden" / "ocdbt"

UUID: Final = bytes(range(16))

DATA_FILES: Final = ("3f2a/8c1d", "3f2a/8c1e", "b0")


def sorted_places(
    values: Mapping[str, tuple[str, int, int]],
) -> tuple[list[str], ChunkLocations]:
    """Keys and places as the encoder takes them."""
    keys = sorted(values)
    return keys, ChunkLocations.of_rows([values[key] for key in keys])


def encoded(
    values: Mapping[str, tuple[str, int, int]], **changed: Any
) -> ocdbt.Encoded:
    keys, places = sorted_places(values)
    reported: dict[str, Any] = {
        "node_file": "3f2a/n",
        "commit_time_ns": 5,
        "uuid": UUID,
    } | changed
    return ocdbt.encode(keys, places, **reported)


@dataclass
class Store:
    """A bucket, with key spaces in it that share a pool."""

    root: str = "memory://"
    bucket: TensorStoreBucket = field(init=False)

    def __post_init__(self) -> None:
        self.bucket = asyncio.run(TensorStoreBucket.open(self.root))

    def write(self, files: Mapping[str, bytes]) -> None:
        for place, data in files.items():
            asyncio.run(self.bucket.write(place, data))

    def key_space(self, name: str = "x") -> KeySpace:
        return self.bucket.key_space(path=f"trees/{name}/", pool="pool/")

    def add(self, written: ocdbt.Encoded, name: str = "x") -> KeySpace:
        """The key space of something encoded."""
        self.write(
            {
                "pool/3f2a/n": written.nodes,
                f"trees/{name}/manifest.ocdbt": written.manifest,
            }
        )
        return self.key_space(name)

    def add_values(self, values: Mapping[str, bytes], name: str = "x") -> KeySpace:
        """A key space of values that are contiguous in one file."""
        keys = sorted(values)
        ends = itertools.accumulate(len(values[key]) for key in keys)
        places = {
            key: ("b0", end - len(values[key]), len(values[key]))
            for key, end in zip(keys, ends, strict=True)
        }
        self.write({"pool/b0": b"".join(values[key] for key in keys)})
        return self.add(encoded(places), name)


def contents(opened: "ts.KvStore") -> dict[str, bytes]:
    """All keys and values, as TensorStore reads them."""
    keys = opened.list().result()
    reads = [opened.read(key) for key in keys]
    return {k.decode(): r.result().value for k, r in zip(keys, reads, strict=True)}


def listed(key_space: KeySpace, first: str = "", last: str = "") -> list[str]:
    """The keys of a range, sorted: TensorStore lists nodes as they come."""
    keys = key_space.opened().list(ts.KvStore.KeyRange(first, last)).result()
    return sorted(key.decode() for key in keys)


def manifest(key_space: KeySpace) -> dict[str, Any]:
    opened = key_space._bucket.opened
    base = opened.root / key_space._path
    dumped = ts.ocdbt.dump(base, context=opened.context).result()
    assert isinstance(dumped, dict)
    return dumped


def version(key_space: KeySpace) -> dict[str, Any]:
    """The newest version that a manifest names."""
    newest = manifest(key_space)["versions"][-1]
    assert isinstance(newest, dict)
    return newest


def node(key_space: KeySpace, location: str) -> dict[str, Any]:
    opened = key_space._bucket.opened
    base = opened.root / key_space._pool
    dumped = ts.ocdbt.dump(base, location, context=opened.context).result()
    assert isinstance(dumped, dict)
    return dumped


def walked(key_space: KeySpace, location: str) -> dict[str, int]:
    """The statistics of a node, added up; those that are stored must be the same."""
    reported = {"num_keys": 0, "num_tree_bytes": 0, "num_indirect_value_bytes": 0}
    reported["num_tree_bytes"] = int(location.rpartition(":")[2])
    for entry in node(key_space, location)["entries"]:
        if "location" in entry:
            below = walked(key_space, entry["location"])
            assert below == entry["statistics"]
            reported = {name: reported[name] + below[name] for name in reported}
        else:
            reported["num_keys"] += 1
            reported["num_indirect_value_bytes"] += int(
                entry["indirect_value"].split(":")[4]
            )
    return reported


VALUES: Final = {
    f"params/{layer}/{name}/c/0/{at}": f"{layer}{name}{at}".encode() * (at + 1)
    for layer in range(7)
    for name in ("kernel", "bias")
    for at in range(5)
} | {"step/c": b"1", "ü/c": b"two", "\0aside": b"three"}


@pytest.mark.parametrize("root", ["memory", "file"])
def test_a_key_space_has_the_keys_and_values_that_were_encoded(
    tmp_path: Path, root: str
) -> None:
    store = Store("memory://" if root == "memory" else tmp_path.as_uri())
    key_space = store.add_values(VALUES)
    assert VALUES == contents(key_space.opened())
    assert all(value == key_space.opened()[key] for key, value in VALUES.items())
    assert not key_space.opened().read("params/0").result().value


def test_the_nodes_are_byte_for_byte_those_that_tensorstore_writes() -> None:
    store = Store()
    written = ts.KvStore.open(
        {
            "driver": "ocdbt",
            "base": "memory://pool/",
            "manifest": "memory://trees/theirs/",
            "config": {"max_inline_value_bytes": 0, "compression": None},
        },
        context=store.bucket.opened.context,
    ).result()
    transaction = ts.Transaction()
    for key, value in VALUES.items():
        written.with_transaction(transaction)[key] = value
    transaction.commit_sync()
    theirs = store.key_space("theirs")
    root = version(theirs)["root"]
    _, _, file, offset, length = root["location"].split(":")
    entries = node(theirs, root["location"])["entries"]
    places = {
        entry["key"].decode(): (found[2], int(found[3]), int(found[4]))
        for entry in entries
        for found in [entry["indirect_value"].split(":")]
    }

    start = int(offset)
    ours = encoded(places, node_file=file, node_offset=start)
    data = asyncio.run(store.bucket.read(f"pool/{file}"))
    assert data is not None
    assert data.data[start : start + int(length)] == ours.nodes
    store.write({"trees/x/manifest.ocdbt": ours.manifest})
    assert root == version(store.key_space())["root"]
    assert VALUES == contents(store.key_space().opened())


def test_the_manifest_says_what_was_asked_for() -> None:
    key_space = Store().add_values(VALUES)
    found = version(key_space)
    assert (5, 1, 0) == tuple(
        found[name] for name in ("commit_time", "generation_number", "root_height")
    )
    assert walked(key_space, found["root"]["location"]) == found["root"]["statistics"]
    assert {
        "uuid": UUID.hex(),
        "compression": None,
        "max_inline_value_bytes": 0,
        "max_decoded_node_bytes": 8 << 20,
        "version_tree_arity_log2": 4,
    } == manifest(key_space)["config"]


def test_a_key_space_may_be_empty() -> None:
    store = Store()
    key_space = store.add(encoded({}))
    assert b"" == encoded({}).nodes
    assert {} == contents(key_space.opened())
    assert {} == asyncio.run(key_space.places())
    theirs = store.key_space("theirs")
    theirs.opened()["a"] = b"b"
    del theirs.opened()["a"]
    assert version(theirs)["root"] == version(key_space)["root"]


def test_values_may_precede_the_nodes_in_their_file() -> None:
    store = Store()
    written = encoded({"a": ("3f2a/n", 0, 3), "b": ("3f2a/n", 3, 2)}, node_offset=5)
    moved = ocdbt.Encoded(nodes=b"value" + written.nodes, manifest=written.manifest)
    assert {"a": b"val", "b": b"ue"} == contents(store.add(moved).opened())


part = st.text(st.characters(codec="utf-8"), max_size=4) | st.sampled_from(
    ["layers", "a", "b", "0", "1", "params" * 40]
)
names = st.lists(part, max_size=5).map("/".join)


@settings(deadline=None)  # a database is opened for each
@given(
    st.dictionaries(
        names,
        st.tuples(st.sampled_from(DATA_FILES), st.integers(0, 900), st.integers(0, 99)),
        max_size=60,
    ),
    st.sampled_from([1, 300, 1000, 8 << 20]),
)
def test_any_keys_and_places_are_read_as_encoded(
    values: dict[str, tuple[str, int, int]], node_bytes: int
) -> None:
    store = Store()
    data = {
        name: np.random.default_rng(n).bytes(1000) for n, name in enumerate(DATA_FILES)
    }
    store.write({f"pool/{name}": content for name, content in data.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ocdbt, "NODE_BYTES", node_bytes)
        key_space = store.add(encoded(values))

    expected = {key: data[f][at : at + n] for key, (f, at, n) in values.items()}
    assert expected == contents(key_space.opened())
    for first in [*values, "params", "a/"]:
        assert sorted(k for k in values if k >= first) == listed(key_space, first)
    root = version(key_space)["root"]
    if values:
        assert walked(key_space, root["location"]) == root["statistics"]


sizes = st.integers(0, MAX_VALUE - 1) | st.integers(0, 62).map(lambda n: (1 << n) - 1)


@settings(deadline=None)  # a database is opened for each
@given(
    st.dictionaries(
        names.filter(lambda name: not name.startswith("\0")),
        st.tuples(st.sampled_from([*DATA_FILES, "d" * 300, "d" * 299]), sizes, sizes),
        min_size=1,
    )
)
def test_places_of_any_size_are_kept(values: dict[str, tuple[str, int, int]]) -> None:
    key_space = Store().add(encoded(values))
    assert {key: ValueLocation(*place) for key, place in values.items()} == asyncio.run(
        key_space.places()
    )
    most = min(sum(length for _, _, length in values.values()), 2**64 - 1)
    statistics = version(key_space)["root"]["statistics"]
    assert most == statistics["num_indirect_value_bytes"]


@pytest.mark.slow
def test_a_deep_tree_is_searched_as_a_flat_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ocdbt, "NODE_BYTES", 16 << 10)
    count = 100_000
    keys = sorted(f"params/{at // 500}/kernel/c/{at % 500}" for at in range(count))
    places = ChunkLocations(
        files=DATA_FILES,
        file=np.arange(count) % 3,
        offset=np.arange(count) * 2,
        length=np.full(count, 2),
    )
    store = Store(tmp_path.as_uri())
    data = np.arange(count, dtype="<u2").tobytes()
    store.write({f"pool/{name}": data for name in DATA_FILES})
    key_space = store.add(
        ocdbt.encode(keys, places, node_file="3f2a/n", commit_time_ns=5, uuid=UUID)
    )

    found = version(key_space)
    assert found["root_height"] >= 2
    statistics = found["root"]["statistics"]
    assert walked(key_space, found["root"]["location"]) == statistics
    assert (count, 2 * count) == (
        statistics["num_keys"],
        statistics["num_indirect_value_bytes"],
    )
    opened = key_space.opened()
    assert keys == listed(key_space)
    for prefix in ("params/7/", "params/19", "params/199/kernel/c/49", "q", ""):
        last = prefix and prefix[:-1] + chr(ord(prefix[-1]) + 1)
        assert [k for k in keys if k.startswith(prefix)] == listed(
            key_space, prefix, last
        )
    for at in range(0, count, 997):
        assert data[2 * at : 2 * at + 2] == opened[keys[at]]


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_anywhere_is_an_error(
    bit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ocdbt, "NODE_BYTES", 120)
    store = Store()
    values = {"a/0": b"zero", "a/1": b"one", "b/c": b"two"}
    store.add_values(values)
    written = encoded({"a/0": ("b0", 0, 4), "a/1": ("b0", 4, 3), "b/c": ("b0", 7, 3)})
    for name in ("nodes", "manifest"):
        good = getattr(written, name)
        for at in range(len(good)):
            bad = bytearray(good)
            bad[at] ^= 1 << bit
            files = {"nodes": written.nodes, "manifest": written.manifest}
            key_space = store.add(ocdbt.Encoded(**(files | {name: bytes(bad)})))
            with pytest.raises(CorruptDataError):
                asyncio.run(key_space.places())
            with pytest.raises((ValueError, OSError)):
                contents(key_space.opened())


def test_nodes_that_refer_to_themselves_are_damage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def looped(file: ocdbt.NodeFile, *_: object) -> list[ocdbt.Node]:
        statistics = ocdbt.Statistics(1, 1, 1)
        itself = ocdbt.Node(
            first_key=b"k", common=0, offset=0, length=38, statistics=statistics
        )
        (root,) = ocdbt.interior(file, [itself], 1)
        assert (root.offset, root.length) == (itself.offset, itself.length)
        return [root]

    monkeypatch.setattr(ocdbt, "leaves", looped)
    key_space = Store().add(encoded({"k": ("b0", 0, 4)}))

    with pytest.raises(CorruptDataError, match=r"refers to the node .* twice"):
        asyncio.run(key_space.places())


def test_an_array_is_opened_as_any_other(tmp_path: Path) -> None:
    expected = np.arange(35, dtype=np.float32).reshape(5, 7)
    ts.open(
        {"driver": "zarr3", "kvstore": f"file://{tmp_path}/plain/"},
        create=True,
        dtype=ts.float32,
        shape=expected.shape,
        schema=ts.Schema(chunk_layout=ts.ChunkLayout(chunk_shape=[2, 3])),
    ).result().write(expected).result()
    top = tmp_path / "plain"
    values = {
        f"params/w/{file.relative_to(top).as_posix()}": file.read_bytes()
        for file in top.rglob("*")
        if file.is_file()
    }
    Store(tmp_path.as_uri()).add_values(values)

    array = ts.open(
        {
            "driver": "zarr3",
            "kvstore": {
                "driver": "ocdbt",
                "base": f"file://{tmp_path}/pool/",
                "manifest": f"file://{tmp_path}/trees/x/",
                "path": "params/w/",
            },
            "fill_missing_data_reads": False,
        },
        open=True,
        read=True,
    ).result()
    assert expected.tolist() == array.read().result().tolist()


@pytest.mark.parametrize(
    ("keys", "changed", "message"),
    [
        (["b", "a"], {}, "ascending"),
        (["a", "a"], {}, "ascending"),
        (["aaaaaaaaab", "aaaaaaaaa"], {}, "ascending"),
        (["\U00010000", "\uffff"], {}, "ascending"),
        (["a"], {}, "expected 1 rows"),
        (["a", "\ud800"], {}, "surrogates"),
        (["a", "b" * 65536], {}, "at most 65535 bytes"),
        (["a", "b"], {"uuid": b"1"}, "expected 16 bytes, got 1"),
        (["a", "b"], {"file": np.array([0, 1])}, "from 0 to 0, got 0 to 1"),
        (["a", "b"], {"offset": np.array([-1, 1])}, "got -1 to 1"),
        (["a", "b"], {"length": np.array([1, 2**62])}, f"got 1 to {2**62}"),
    ],
)
def test_what_the_format_has_no_place_for_is_rejected(
    keys: list[str], changed: dict[str, Any], message: str
) -> None:
    columns: dict[str, Any] = {
        "file": np.zeros(2, int),
        "offset": np.arange(2),
        "length": np.arange(2),
    }
    reported: dict[str, Any] = {"node_file": "n", "commit_time_ns": 5, "uuid": UUID}
    for name, value in changed.items():
        (columns if name in columns else reported)[name] = value
    with pytest.raises(ValueError, match=message):
        ocdbt.encode(keys, ChunkLocations(files=("b0",), **columns), **reported)


def test_the_longest_key_is_kept() -> None:
    values = {"": b"1", "k" * 65534: b"2", "k" * 65535: b"3"}
    assert values == contents(Store().add_values(values).opened())


def the_golden_key_space() -> ocdbt.Encoded:
    """Nodes of the key space: a root, and leaves that name two files."""
    values = {
        f"params/{layer}/{name}/c/0": ("3f2a/8c1d", 4 * at, 4)
        for at, (layer, name) in enumerate(itertools.product(range(5), ("b", "kernel")))
    }
    values["é/c"] = ("b0", 2**40, 2**33)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ocdbt, "NODE_BYTES", 300)
        return encoded(values)


def test_the_encoding_never_changes() -> None:
    written = the_golden_key_space()
    assert (GOLDEN / "nodes").read_bytes() == written.nodes
    assert (GOLDEN / "manifest.ocdbt").read_bytes() == written.manifest
    key_space = Store().add(written)
    assert 1 == version(key_space)["root_height"]
    assert 11 == len(listed(key_space))


if __name__ == "__main__":
    assert not GOLDEN.exists(), "a golden key space is written once"
    GOLDEN.mkdir()
    (GOLDEN / "nodes").write_bytes(the_golden_key_space().nodes)
    (GOLDEN / "manifest.ocdbt").write_bytes(the_golden_key_space().manifest)
