"""Files made to harm their reader are rejected with a typed error, in bounded memory,
and nothing is written."""

import base64
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import pytest
import tensorstore as ts

from storesvc_client._foreign.foreign_step import ForeignRoot
from storesvc_client._foreign.formats import eformer, jax_arrays, levanter, safetensors
from storesvc_client._foreign.locations import LocalLocation
from storesvc_client.errors import (
    DataLossError,
    LimitError,
    NotFoundError,
    PreconditionError,
)
from tests.foreign.own_memory import at_most
from tests.support.foreign_reading import read_region

MAX_MEMORY_BYTES: Final = 64 << 20
"""Memory that a rejection may take."""

REJECTED: Final = (DataLossError, LimitError, NotFoundError, PreconditionError)

Writer: TypeAlias = Callable[[Path], object]

DEEP: Final = b"[" * 1_000_000
MANY: Final = b'{"a":[' + b"0," * 5_000_001 + b"0]}"
TWICE: Final = b'{"weight_map":{},"format":"tensorstore","step":1,"step":1}'


def tensor(**fields: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | fields


def write_header(folder: Path, header: Any, data: bytes = bytes(8)) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + data
    (folder / "model.safetensors").write_bytes(content)


def header(value: Any, data: bytes = bytes(8)) -> Writer:
    return lambda folder: write_header(folder, value, data)


def in_order(*effects: Callable[[Path], object]) -> Writer:
    """Returns a writer that calls each of `effects`."""

    def write(folder: Path) -> None:
        for each in effects:
            each(folder)

    return write


def raw(name: str, data: bytes) -> Writer:
    return in_order(lambda folder: (folder / name).write_bytes(data))


def linked(path: str, to: str = "/etc/passwd") -> Writer:
    return lambda folder: (folder / path).symlink_to(to)


SAFETENSORS: dict[str, Writer] = {
    "no header": raw("model.safetensors", b""),
    "cut length": raw("model.safetensors", b"\x08\0\0"),
    "length of 100 MB": raw("model.safetensors", struct.pack("<Q", 10**8) + b"{}"),
    "length of 2^63": raw("model.safetensors", struct.pack("<Q", 2**63) + b"{}"),
    "length past the limit": lambda folder: _sparse(folder, 10**8 + 1),
    "no object": header(b"[]"),
    "space first": header(b' {"a":{}}'),
    "deep": header(b'{"a":' + DEEP),
    "many values": header(MANY),
    "huge number": header(
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}'
    ),
    "NaN": header(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}'),
    "no UTF-8": header(b'{"\xff":{}}'),
    "name twice": header(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
    ),
    "overlap": header({"a": tensor(), "b": tensor()}),
    "hole": header({"a": tensor(data_offsets=[8, 16])}, bytes(16)),
    "past the end": header({"a": tensor(shape=[4], data_offsets=[0, 16])}),
    "bytes after the last": header({"a": tensor()}, bytes(9)),
    "shape of 2^62": header({"a": tensor(shape=[2**62, 2**62])}),
    "shape of 2^61 by 0": header(
        {"a": tensor(shape=[2**61, 0, 1], data_offsets=[0, 0])}, b""
    ),
    "negative shape": header({"a": tensor(shape=[-2])}),
    "shape of floats": header({"a": tensor(shape=[2.0])}),
    "shape of booleans": header({"a": tensor(shape=[True, 2])}),
    "offsets that end before they start": header({"a": tensor(data_offsets=[8, 0])}),
    "three offsets": header({"a": tensor(data_offsets=[0, 4, 8])}),
    "33 dimensions": header({"a": tensor(shape=[1] * 32 + [2])}),
    "unknown dtype": header({"a": tensor(dtype="F3")}),
    "dtype that is a list": header({"a": tensor(dtype=["F32"])}),
    "unknown field": header({"a": tensor(more=1)}),
    "metadata of numbers": header({"__metadata__": {"a": 1}, "a": tensor()}),
    "name of 5000 bytes": header({"a" * 5000: tensor()}),
    "lone surrogate": header({"\ud800": tensor()}),
    "leaf and container": header(
        {
            "a": tensor(shape=[1], data_offsets=[0, 4]),
            "a.b": tensor(shape=[1], data_offsets=[4, 8]),
        }
    ),
    "BOOL of 2": header({"a": tensor(dtype="BOOL", shape=[8])}, b"\2\1\0\1\0\1\0\0"),
    "link out": linked("model.safetensors"),
    "folder as file": lambda folder: (folder / "model.safetensors").mkdir(),
    "config that is a link out": in_order(
        lambda folder: write_header(folder, {"a": tensor()}), linked("config.json")
    ),
    "config of 17 MB": in_order(
        lambda folder: write_header(folder, {"a": tensor()}),
        lambda folder: _grow(folder / "config.json", 17 << 20),
    ),
}


def _sparse(folder: Path, size: int) -> None:
    """Writes a header of a size, of zeros, which take no space."""
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", size))
    _grow(path, size + 16)


def _grow(path: Path, size: int) -> None:
    with path.open("ab") as file:
        file.truncate(size)


def index(weight_map: Any) -> Writer:
    def write(folder: Path) -> None:
        write_header(folder, {"a": tensor()})
        write_header(folder.parent, {"a": tensor()})
        text = json.dumps({"weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)

    return write


PATHS: Final = (
    "../model.safetensors",
    "/etc/passwd",
    "",
    ".",
    "..",
    "a\0b",
    "a\\..\\b",
    "x/../model.safetensors",
    "C:/x",
    7,
    None,
)

INDEXES: dict[str, Writer] = {
    **{f"path {path!r}": index({"a": path}) for path in PATHS},
    "no map": index([]),
    "no tensors": index({}),
    "missing file": index({"a": "other.safetensors"}),
    "missing tensor": index({"b": "model.safetensors"}),
    "deep": raw("model.safetensors.index.json", DEEP),
    "many values": raw("model.safetensors.index.json", MANY),
    "name twice": raw("model.safetensors.index.json", TWICE),
    "65 MB": lambda folder: _grow(folder / "model.safetensors.index.json", 65 << 20),
    "link out": linked("model.safetensors.index.json"),
}

ZARRAY: Final = {
    "chunks": [2],
    "compressor": None,
    "dimension_separator": ".",
    "dtype": "<f4",
    "fill_value": None,
    "filters": None,
    "order": "C",
    "shape": [2],
    "zarr_format": 2,
}


def write_eformer(folder: Path, entries: Any, **zarray: Any) -> None:
    """Writes a step of one array, ``w``, of two zeros."""
    (folder / "metadata.json").write_text('{"step": 0}')
    fields = {"format": "tensorstore", "version": "0", "arrays": entries}
    (folder / "tensorstore_index.json").write_text(json.dumps(fields))
    (folder / "w").mkdir()
    (folder / "w" / ".zarray").write_text(json.dumps(ZARRAY | zarray))
    (folder / "w" / "0").write_bytes(bytes(8))


def entry(**fields: Any) -> dict[str, Any]:
    return {"path": "w", "shape": [2], "dtype": "float32"} | fields


def array(**zarray: Any) -> Writer:
    """Returns a writer of a step whose array has other metadata; the index agrees."""
    shape = zarray.get("shape", [2])
    return lambda folder: write_eformer(folder, [entry(shape=shape)], **zarray)


def changed(change: Callable[[Path], object]) -> Writer:
    """Returns a writer of a step that is changed afterwards."""

    def write(folder: Path) -> None:
        write_eformer(folder, [entry()])
        change(folder)

    return write


def at(path: Any) -> Writer:
    """Returns a writer of a step whose index has another path."""
    return lambda folder: write_eformer(folder, [entry(path=path)])


EFORMER: dict[str, Writer] = {
    **{f"path {path!r}": at(path) for path in PATHS},
    "path twice": lambda folder: write_eformer(folder, [entry(), entry()]),
    "array in an array": lambda folder: write_eformer(
        folder, [entry(), entry(path="w/v")]
    ),
    "entries that are no list": lambda folder: write_eformer(folder, {"a": entry()}),
    "no entries": lambda folder: write_eformer(folder, []),
    "other shape": lambda folder: write_eformer(folder, [entry(shape=[3])]),
    "other dtype": lambda folder: write_eformer(folder, [entry(dtype="int32")]),
    "shape of 2^61": array(shape=[2**61], chunks=[2**40]),
    "shape of 2^61 by 0": array(shape=[2**61, 0], chunks=[2**9, 1]),
    "chunk of 64 GiB": array(shape=[2**40], chunks=[2**34]),
    "chunk larger than its file": array(shape=[2**30], chunks=[2**20]),
    "negative shape": array(shape=[-1]),
    "chunk of 0": array(chunks=[0]),
    "33 dimensions": array(shape=[1] * 33, chunks=[1] * 33),
    "dtype of objects": array(dtype="|O"),
    "dtype of fields": array(dtype=[["a", "<f4"], ["b", "<f4"]]),
    "unknown compressor": array(compressor={"id": "pickle"}),
    "filters": array(filters=[{"id": "pickle"}]),
    "deep metadata": changed(lambda d: (d / "w" / ".zarray").write_bytes(DEEP[:1000])),
    "metadata of 2 MB": changed(lambda d: _grow(d / "w" / ".zarray", 2 << 20)),
    "chunk that is too short": changed(lambda d: (d / "w" / "0").write_bytes(b"a")),
    "chunk that is a link out": changed(
        in_order(lambda d: (d / "w" / "0").unlink(), linked("w/0"))
    ),
    "folder that is a link out": changed(
        in_order(lambda d: (d / "w").rename(d / "v"), linked("w", "/etc"))
    ),
    "missing chunk": changed(lambda d: (d / "w" / "0").unlink()),
    "step of 2^63": changed(raw("metadata.json", b'{"step": 9223372036854775808}')),
    "step that is a text": changed(raw("metadata.json", b'{"step": "1"}')),
    "time that is none": changed(
        raw("metadata.json", b'{"step": 0, "timestamp": "now"}')
    ),
    "deep index": changed(raw("tensorstore_index.json", DEEP)),
    "many values": changed(raw("tensorstore_index.json", MANY)),
    "name twice": changed(raw("metadata.json", TWICE)),
    "deep structure": changed(raw("m_structure.json", DEEP)),
}


def write_levanter(folder: Path, name: str = "w") -> None:
    """Writes a step of one array in an OCDBT database."""
    (folder / "metadata.json").write_text('{"step": 0}')
    base = {"driver": "file", "path": f"{folder}/"}
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": base, "path": name},
        "metadata": {"shape": [2], "data_type": "float32"},
    }
    ts.open(spec, create=True).result().write(np.ones(2, np.float32)).result()


def database(change: Callable[[Path], object]) -> Writer:
    def write(folder: Path) -> None:
        write_levanter(folder)
        change(folder)

    return write


def _put(folder: Path, key: bytes, value: bytes) -> None:
    base = {"driver": "file", "path": f"{folder}/"}
    ts.KvStore.open({"driver": "ocdbt", "base": base}).result().write(
        key, value
    ).result()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


LEVANTER: dict[str, Writer] = {
    "no arrays": raw("metadata.json", b'{"step": 0}'),
    "empty part": lambda folder: write_levanter(folder, "a//b/../" + "x" * 4200),
    "key that is no text": database(lambda d: _put(d, b"\xff/zarr.json", b"{}")),
    "metadata that is no array": database(lambda d: _put(d, b"v/zarr.json", b"{}")),
    "deep metadata": database(lambda d: _put(d, b"v/zarr.json", DEEP[:1000])),
    "array in an array": database(lambda d: write_levanter(d, "w/v")),
    "manifest of zeros": database(
        lambda d: (d / "manifest.ocdbt").write_bytes(bytes(64))
    ),
    "cut manifest": database(lambda d: (d / "manifest.ocdbt").write_bytes(b"\x0c\xdb")),
    "flipped manifest": database(lambda d: _flip(d / "manifest.ocdbt")),
    "manifest of 17 MB": database(lambda d: _grow(d / "manifest.ocdbt", 17 << 20)),
    "manifest that is a link out": database(
        in_order(lambda d: (d / "manifest.ocdbt").unlink(), linked("manifest.ocdbt"))
    ),
    "data that is a link out": database(
        in_order(lambda d: (d / "d").rename(d / "e"), linked("d", "/etc"))
    ),
    "metadata of 2 MB": database(lambda d: _grow(d / "metadata.json", 2 << 20)),
    "deep folders": in_order(
        lambda folder: (folder / "metadata.json").write_text('{"step": 0}'),
        lambda folder: (folder / "/".join("a" * 70)).mkdir(parents=True),
    ),
}


def write_jax(folder: Path, structure: bytes, leaves: Any) -> None:
    (folder / "array_store").mkdir()
    write_levanter(folder / "array_store", "0")
    text = base64.b64encode(structure).decode()
    fields = {"__jax_pytreedef_repr": text, "__jax_leaf_ids": leaves}
    (folder / "pytreedef.json").write_text(json.dumps(fields))


def structure(value: bytes, leaves: Any = None) -> Writer:
    form = ["Array(float32[2])"] if leaves is None else leaves
    return lambda folder: write_jax(folder, value, form)


TABLE: Final = struct.pack("<HHHH", 8, 8, 4, 0)
"""A table's description: 8 bytes, a kind at 4, no children."""

LEAF: Final = struct.pack("<I", 12) + TABLE + struct.pack("<ii", 8, 0)
"""A structure that is one leaf."""

SHARED: Final = struct.pack(
    "<IHHHHiiIIIIiiII", 12, 8, 12, 4, 8, 8, 3, 4, 2, 8, 4, 32, 0, 4, 0
)
"""A list whose two items are one node."""

JAX: dict[str, Writer] = {
    "empty": structure(b""),
    "root past the end": structure(b"\xff" * 4),
    "table before the file": structure(struct.pack("<Ii", 4, 2**31 - 1)),
    "node with two parents": structure(SHARED),
    "unknown kind": structure(LEAF[:-4] + struct.pack("<i", 9)),
    "other number of leaves": structure(LEAF, ["null", "null"]),
    "leaves that are no list": structure(LEAF, {"a": 1}),
    "other shape": structure(LEAF, ["Array(float32[3])"]),
    "leaf that is no array": structure(LEAF, ["int"]),
    "leaf that is a list": structure(LEAF, [["Array"]]),
    "deep": in_order(
        lambda folder: write_jax(folder, LEAF, []),
        lambda folder: (folder / "pytreedef.json").write_bytes(DEEP),
    ),
    "no base64": in_order(
        lambda folder: write_jax(folder, LEAF, []),
        lambda folder: (folder / "pytreedef.json").write_text(
            '{"__jax_pytreedef_repr": "!"}'
        ),
    ),
}

CASES: Final = [
    pytest.param(open_root, write, id=f"{name}: {case}")
    for name, open_root, cases in [
        ("safetensors", safetensors.open_root, SAFETENSORS),
        ("index of shards", safetensors.open_root, INDEXES),
        ("eformer", eformer.open_root, EFORMER),
        ("levanter", levanter.open_root, LEVANTER),
        ("jax", jax_arrays.open_root, JAX),
    ]
    for case, write in cases.items()
]


def read_all(root: ForeignRoot) -> None:
    """Opens each step and reads up to two elements of each dimension of its leaves."""
    step = root.open(0)
    for row in step.tree.leaves:
        read_region(step, row.key, tuple((0, min(n, 2)) for n in row.shape))


def state_of(folder: Path) -> list[tuple[str, int, int]]:
    """Returns path, size and time of change of all files."""
    found = [(str(p), p.lstat()) for p in sorted(folder.rglob("*"))]
    return [(path, stat.st_size, stat.st_mtime_ns) for path, stat in found]


@pytest.mark.parametrize(("open_root", "write"), CASES)
def test_hostile_files_are_rejected(
    tmp_path: Path, open_root: Callable[[Any], ForeignRoot], write: Writer
) -> None:
    folder = tmp_path / "hostile"
    folder.mkdir()
    write(folder)
    before = state_of(tmp_path)
    with at_most(MAX_MEMORY_BYTES), pytest.raises(REJECTED) as raised:
        read_all(open_root(LocalLocation(folder)))
    assert len(str(raised.value)) < 1500
    assert before == state_of(tmp_path)


def test_the_small_structures_of_these_tests_are_read_unless_hostile(
    tmp_path: Path,
) -> None:
    """Shows that each rejection is for the reason that its name states."""
    write_header(tmp_path, {"a": tensor()})
    read_all(safetensors.open_root(LocalLocation(tmp_path)))
    formats: list[tuple[str, Callable[[Any], ForeignRoot], Writer]] = [
        ("e", eformer.open_root, changed(lambda _: None)),
        ("l", levanter.open_root, database(lambda _: None)),
        ("j", jax_arrays.open_root, structure(LEAF)),
    ]
    for name, open_root, write in formats:
        (tmp_path / name).mkdir()
        write(tmp_path / name)
        read_all(open_root(LocalLocation(tmp_path / name)))
