"""Every attack on every format: a table of the two, each entry of which is rejected,
cannot be made, or does no harm.

``test_hostile_files.py`` has more of each format. ``python -m
tests.foreign.test_hostile_matrix`` prints the table.
"""

import base64
import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import fsspec
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from jax.experimental.array_serialization import pytree_serialization
from safetensors.numpy import save_file

import storesvc_client as store
from storesvc_client.errors import (
    DataLossError,
    LimitError,
    NotFoundError,
    PreconditionError,
)
from tests.foreign.orbax_checkpoints import WRITERS
from tests.foreign.own_memory import at_most
from tests.foreign.test_hostile_files import (
    DEEP,
    MANY,
    state_of,
    tensor,
    write_eformer,
    write_header,
    write_levanter,
)
from tests.foreign.written_files import files_below, to_memory
from tests.support.command_line import document, printed, refusal
from tests.support.examples import sampled

NOWHERE: Final = "127.0.0.1:1"
MAX_MEMORY_BYTES: Final = 96 << 20
"""Memory that a rejection may take: twice the largest document here that is read."""

MANY_OF_ORBAX: Final = b'{"a":[' + b"0," * 20_000_001 + b"0]}"
"""More values than a million arrays take, which a file of Orbax may list."""

BRACKETS: Final = b"[" * 20_000_000
"""TensorStore would take 1.4 GB to parse it."""

REJECTED: Final = (DataLossError, LimitError, NotFoundError, PreconditionError)

Change: TypeAlias = Callable[[Path], object]
"""Changes a checkpoint of a folder."""


@dataclass(frozen=True, slots=True)
class Harmless:
    """A change after which the checkpoint is read; what it names leads nowhere."""

    change: Change


Entry: TypeAlias = "Change | Harmless | str"
"""Of a format and an attack; a text says why there can be no such files."""

_numbers = count()


def moved_out(path: str) -> Change:
    """Moves a file or folder out of the checkpoint, unchanged, and links to it."""

    def change(folder: Path) -> None:
        outside = folder.parent / f"outside-{next(_numbers)}"
        (folder / path).rename(outside)
        (folder / path).symlink_to(outside)

    return change


def cut(pattern: str) -> Change:
    """Removes the second half of data files."""

    def change(folder: Path) -> None:
        for path in folder.glob(pattern):
            os.truncate(path, path.stat().st_size // 2)

    return change


def replaced(path: str, data: bytes) -> Change:
    return lambda folder: (folder / path).write_bytes(data)


def grown(path: str) -> Change:
    """Makes a file one of 200 MB, most of which take no space."""
    return lambda folder: os.truncate(folder / path, 200_000_000)


def edited(path: str, edit: Callable[[Any], Any]) -> Change:
    """Changes the JSON of a file."""

    def change(folder: Path) -> None:
        file = folder / path
        file.write_text(json.dumps(edit(json.loads(file.read_text()))))

    return change


def entry_twice(path: str) -> Change:
    """Repeats the first name of the JSON object of a file."""

    def change(folder: Path) -> None:
        file = folder / path
        fields = json.loads(file.read_text())
        name, value = next(iter(fields.items()))
        repeated = f"{json.dumps(name)}:{json.dumps(value)},"
        file.write_text("{" + repeated + json.dumps(fields)[1:])

    return change


def stored_bytes(place: str, key: str, data: bytes) -> Change:
    """Replaces a value of an OCDBT database."""

    def change(folder: Path) -> None:
        base = {"driver": "file", "path": f"{folder / place}/"}
        database = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
        assert database.read(key).result().state == "value"
        database.write(key, data).result()

    return change


def stored(place: str, key: str, edit: Callable[[dict[str, Any]], Any]) -> Change:
    """Changes the JSON of a key of an OCDBT database; `edit` may return bytes."""

    def change(folder: Path) -> None:
        base = {"driver": "file", "path": f"{folder / place}/"}
        found = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
        value = edit(json.loads(found.read(key).result().value))
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        found.write(key, data).result()

    return change


def long_chunk(place: str, key: str) -> Change:
    """Stores a chunk of some bytes as 120 MB."""
    return stored_bytes(place, key, bytes(120_000_000))


def _with_key(key: str, key_type: int = 2) -> Callable[[Any], Any]:
    """Returns an edit of ``_METADATA`` that names its one leaf otherwise."""

    def edit(fields: Any) -> Any:
        (row,) = fields["tree_metadata"].values()
        row["key_metadata"] = [{"key": key, "key_type": key_type}]
        return {**fields, "tree_metadata": {f"('{key}',)": row}}

    return edit


def _two_of_one_name(fields: Any) -> Any:
    """Returns ``_METADATA`` with two leaves that are stored under one name."""
    (row,) = fields["tree_metadata"].values()
    keys = [["a", "b"], ["a.b"]]
    rows = {
        str(parts): {
            **row,
            "key_metadata": [{"key": part, "key_type": 2} for part in parts],
        }
        for parts in keys
    }
    return {**fields, "tree_metadata": rows}


def of_document(path: str, many: bytes = MANY) -> dict[str, Entry]:
    """Returns the attacks on a JSON document."""
    return {
        "JSON name twice": entry_twice(path),
        "document of 200 MB": grown(path),
        "deep JSON": replaced(path, DEEP),
        "many values": replaced(path, many),
        "document is a link out": moved_out(path),
    }


HUGE: Final = [2**61]

BEYOND: Final = [10**30]
"""A number that is no integer of 64 bits."""


def _orbax(inside: str, chunk: str = "", array: str = ".zarray") -> dict[str, Entry]:
    """Returns the attacks on an item of Orbax that is a tree.

    Args:
        inside: Its folder.
        chunk: File of the chunk of its array; "": it is in a database.
        array: Name of the metadata of an array.
    """
    metadata = f"{inside}_METADATA"

    def of_array(edit: Callable[[dict[str, Any]], Any]) -> Change:
        if chunk:
            return edited(f"w/{array}", edit)
        return stored(inside, f"w/{array}", edit)

    return {
        "name with ..": edited(metadata, _with_key("../../outside")),
        "absolute name": edited(metadata, _with_key("/etc")),
        "name twice": edited(metadata, _two_of_one_name),
        **of_document(metadata, MANY_OF_ORBAX),
        "ranges that overlap": "no file states ranges",
        "fewer bytes": cut(chunk or f"{inside}d/*"),
        "shape of 2^61": of_array(lambda fields: {**fields, "shape": HUGE}),
        "shape of 10^30": of_array(lambda fields: {**fields, "shape": BEYOND}),
        "brackets for an array": replaced(f"w/{array}", BRACKETS)
        if chunk
        else of_array(lambda _: BRACKETS),
        "long chunk": grown(chunk)
        if chunk
        else long_chunk(inside, "w/c/0" if array == "zarr.json" else "w/0"),
        "data is a link out": moved_out(chunk or f"{inside}d"),
    }


def _safetensors(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Returns a change of the header of a file of two tensors."""
    header = {"a": tensor(), "b": tensor(data_offsets=[8, 16])}
    return lambda folder: write_header(folder, change(header), bytes(16))


def _long_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 200_000_000))
    os.truncate(file, 200_000_100)


_RAW: Final = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'

SAFETENSORS: Final[dict[str, Entry]] = {
    "name with ..": Harmless(_safetensors(lambda h: {"../w": h["a"], "b": h["b"]})),
    "absolute name": Harmless(_safetensors(lambda h: {"/etc": h["a"], "b": h["b"]})),
    "name twice": _safetensors(lambda _: _RAW + _RAW[1:-1] + b"}"),
    "JSON name twice": _safetensors(
        lambda _: (
            b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
        )
    ),
    "document of 200 MB": _long_header,
    "ranges that overlap": _safetensors(
        lambda h: {**h, "b": tensor(data_offsets=[4, 12])}
    ),
    "fewer bytes": cut("model.safetensors"),
    "shape of 2^61": _safetensors(lambda h: {**h, "b": {**h["b"], "shape": HUGE}}),
    "shape of 10^30": _safetensors(lambda h: {**h, "b": {**h["b"], "shape": BEYOND}}),
    "deep JSON": _safetensors(lambda _: b'{"a":' + DEEP),
    "many values": _safetensors(lambda _: MANY),
    "brackets for an array": "an array has no metadata of its own",
    "long chunk": grown("model.safetensors"),
    "document is a link out": moved_out("model.safetensors"),
    "data is a link out": "the document has the data",
}

_INDEX: Final = "model.safetensors.index.json"
_SHARDS: Final = tuple(f"model-0000{n}-of-00002.safetensors" for n in (1, 2))


def _mapped(file: str) -> Change:
    return edited(_INDEX, lambda fields: {**fields, "weight_map": {"w0": file}})


SHARDS: Final[dict[str, Entry]] = {
    "name with ..": _mapped(f"../{_SHARDS[0]}"),
    "absolute name": _mapped("/etc/passwd"),
    "name twice": lambda folder: shutil.copy(folder / _SHARDS[0], folder / _SHARDS[1]),
    **of_document(_INDEX),
    "ranges that overlap": lambda folder: _overlapping(folder / _SHARDS[0]),
    "fewer bytes": cut(_SHARDS[1]),
    "shape of 2^61": lambda folder: _write_one(folder / _SHARDS[0], shape=HUGE),
    "shape of 10^30": lambda folder: _write_one(folder / _SHARDS[0], shape=BEYOND),
    "brackets for an array": "an array has no metadata of its own",
    "long chunk": grown(_SHARDS[1]),
    "data is a link out": moved_out(_SHARDS[1]),
}


def _write_one(file: Path, **fields: Any) -> None:
    text = json.dumps({"w0": tensor(**fields)}).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))


def _overlapping(file: Path) -> None:
    text = json.dumps({"w0": tensor(), "w2": tensor()}).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))


def _indexed(**fields: Any) -> Change:
    def edit(index: Any) -> Any:
        return {**index, "arrays": [{**index["arrays"][0], **fields}]}

    return edited("tensorstore_index.json", edit)


EFORMER: Final[dict[str, Entry]] = {
    "name with ..": _indexed(path="../w"),
    "absolute name": _indexed(path="/etc"),
    "name twice": edited(
        "tensorstore_index.json", lambda i: {**i, "arrays": i["arrays"] * 2}
    ),
    **of_document("tensorstore_index.json"),
    "ranges that overlap": "no file states ranges",
    "fewer bytes": cut("w/0"),
    "shape of 2^61": lambda folder: (
        _indexed(shape=HUGE)(folder),
        edited("w/.zarray", lambda z: {**z, "shape": HUGE, "chunks": [2**40]})(folder),
    ),
    "shape of 10^30": lambda folder: (
        _indexed(shape=BEYOND)(folder),
        edited("w/.zarray", lambda z: {**z, "shape": BEYOND, "chunks": [2**40]})(
            folder
        ),
    ),
    "brackets for an array": replaced("w/.zarray", BRACKETS),
    "long chunk": grown("w/0"),
    "data is a link out": moved_out("w/0"),
}


def _stored_as(name: str) -> Change:
    return lambda folder: write_levanter(folder, name)


LEVANTER: Final[dict[str, Entry]] = {
    "name with ..": Harmless(_stored_as("../../outside")),
    "absolute name": Harmless(_stored_as("/etc/w")),
    "name twice": "a key of the database has one value",
    **of_document("metadata.json"),
    "ranges that overlap": "TensorStore reads the database",
    "fewer bytes": cut("d/*"),
    "shape of 2^61": stored("", "w/zarr.json", lambda z: {**z, "shape": HUGE}),
    "shape of 10^30": stored("", "w/zarr.json", lambda z: {**z, "shape": BEYOND}),
    "brackets for an array": stored("", "w/zarr.json", lambda _: BRACKETS),
    "long chunk": long_chunk("", "w/c/0"),
    "data is a link out": moved_out("d"),
}

FOLDERS: Final[dict[str, Entry]] = {
    "name with ..": "a name is a folder",
    "absolute name": "a name is a folder",
    "name twice": "a name is a folder",
    **of_document("w/.zarray"),
    "JSON name twice": entry_twice("metadata.json"),
    "ranges that overlap": "no file states ranges",
    "fewer bytes": cut("w/0"),
    "shape of 2^61": edited("w/.zarray", lambda z: {**z, "shape": HUGE}),
    "shape of 10^30": edited("w/.zarray", lambda z: {**z, "shape": BEYOND}),
    "brackets for an array": replaced("w/.zarray", BRACKETS),
    "long chunk": grown("w/0"),
    "data is a link out": moved_out("w/0"),
}

_DEF: Final = "pytreedef.json"


def _keyed(old: bytes, new: bytes) -> Change:
    """Replaces a key of the structure, of the same length."""

    def edit(fields: Any) -> Any:
        name = "__jax_pytreedef_repr"
        found = base64.b64decode(fields[name])
        assert old in found
        changed = found.replace(old, new)
        return {**fields, name: base64.b64encode(changed).decode()}

    return edited(_DEF, edit)


def _huge_leaf(shape: list[int]) -> Change:
    def change(folder: Path) -> None:
        name = "__jax_leaf_ids"
        form = f"Array(float32[{shape[0]}])"
        edited(_DEF, lambda fields: {**fields, name: [form, fields[name][1]]})(folder)
        stored("array_store", "0/zarr.json", lambda z: {**z, "shape": shape})(folder)

    return change


JAX: Final[dict[str, Entry]] = {
    "name with ..": Harmless(_keyed(b"first", b"../..")),
    "absolute name": Harmless(_keyed(b"first", b"/etc/")),
    "name twice": _keyed(b"first", b"other"),
    **of_document(_DEF),
    "ranges that overlap": "TensorStore reads the database",
    "fewer bytes": cut("array_store/d/*"),
    "shape of 2^61": _huge_leaf(HUGE),
    "shape of 10^30": _huge_leaf(BEYOND),
    "brackets for an array": stored("array_store", "0/zarr.json", lambda _: BRACKETS),
    "long chunk": long_chunk("array_store", "0/c/0"),
    "data is a link out": moved_out("array_store"),
}


def _write_orbax(writer: str) -> Change:
    return lambda folder: WRITERS[writer](folder, {"w": jnp.ones(1000)})


def _write_safetensors(folder: Path) -> None:
    folder.mkdir()
    save_file({"a": np.ones(2), "b": np.ones(2)}, folder / "model.safetensors")


def _write_shards(folder: Path) -> None:
    folder.mkdir()
    for n, file in enumerate(_SHARDS):
        save_file({f"w{n}": np.ones(2)}, folder / file)
    weight_map = {f"w{n}": file for n, file in enumerate(_SHARDS)}
    (folder / _INDEX).write_text(json.dumps({"weight_map": weight_map}))


def _write_eformer(folder: Path) -> None:
    folder.mkdir()
    write_eformer(folder, [{"path": "w", "shape": [2], "dtype": "float32"}])


def _write_levanter(folder: Path) -> None:
    folder.mkdir()
    write_levanter(folder)


def _write_folders(folder: Path) -> None:
    _write_eformer(folder)
    (folder / "tensorstore_index.json").unlink()


def _write_jax(folder: Path) -> None:
    tree = {"first": jnp.ones(3), "other": jnp.zeros(2)}
    pytree_serialization.save(tree, folder)


FORMATS: Final[Mapping[str, tuple[str, Change, dict[str, Entry]]]] = MappingProxyType(
    {
        "orbax 0": ("orbax", _write_orbax("v0-pytree"), _orbax("")),
        "orbax 0, zarr 2 folders": (
            "orbax",
            _write_orbax("v0-files"),
            _orbax("", "w/0"),
        ),
        "orbax 1": (
            "orbax",
            _write_orbax("v1-save"),
            _orbax("state/", array="zarr.json"),
        ),
        "safetensors": ("safetensors", _write_safetensors, SAFETENSORS),
        "safetensors, shards": ("safetensors", _write_shards, SHARDS),
        "eformer": ("eformer", _write_eformer, EFORMER),
        "levanter": ("levanter", _write_levanter, LEVANTER),
        "levanter, folders": ("levanter", _write_folders, FOLDERS),
        "jax": ("jax", _write_jax, JAX),
    }
)
"""Scheme, writer of a good checkpoint, and attacks, of each format."""

ATTACKS: Final = tuple(SAFETENSORS)


def cases(*, harmless: bool) -> list[tuple[str, str]]:
    """Returns each format and attack whose files are rejected, or do no harm."""
    return [
        (name, attack)
        for name, (_, _, entries) in FORMATS.items()
        for attack in ATTACKS
        for entry in [entries[attack]]
        if not isinstance(entry, str) and isinstance(entry, Harmless) == harmless
    ]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes the good checkpoint of a format once; returns its folder."""
    root = tmp_path_factory.mktemp("good")

    def write(name: str) -> Path:
        folder = root / name.replace(" ", "-").replace(",", "")
        if not folder.exists():
            FORMATS[name][1](folder)
        return folder

    return write


def hostile(name: str, attack: str, good: Callable[[str], Path], parent: Path) -> Path:
    """Returns the folder of a copy with an attack."""
    folder = parent / "hostile"
    shutil.copytree(good(name), folder)
    entry = FORMATS[name][2][attack]
    assert not isinstance(entry, str)
    (entry.change if isinstance(entry, Harmless) else entry)(folder)
    return folder


def url_of(name: str, folder: Path) -> str:
    return f"{FORMATS[name][0]}:{folder}"


def read_all(url: str, *, trust_uncommitted: bool = False) -> None:
    """Opens a checkpoint, and reads its leaves unless they are too large for it."""
    opened = store.open_foreign(url, trust_uncommitted=trust_uncommitted).open()
    for _ in opened.read(opened.leaves):
        pass


def read_in_memory(name: str, url: str) -> None:
    read_all(f"{FORMATS[name][0]}:{url}", trust_uncommitted="orbax" in name)


def test_the_table_has_an_entry_for_every_attack_on_every_format() -> None:
    assert {name: {*ATTACKS} for name in FORMATS} == {
        name: {*entries} for name, (_, _, entries) in FORMATS.items()
    }


@pytest.mark.parametrize("name", FORMATS)
def test_the_checkpoints_are_read_before_they_are_changed(
    name: str, good: Callable[[str], Path]
) -> None:
    read_all(url_of(name, good(name)))
    url = f"memory://good-{next(_numbers)}"
    to_memory(files_below(good(name)), url)
    read_in_memory(name, url)


@pytest.mark.parametrize(("name", "attack"), sampled(cases(harmless=False), every=4))
def test_an_attack_is_rejected_in_bounded_memory_and_nothing_is_written(
    name: str, attack: str, good: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = hostile(name, attack, good, tmp_path)
    before = state_of(tmp_path)

    with at_most(MAX_MEMORY_BYTES), pytest.raises(REJECTED) as raised:
        read_all(url_of(name, folder))

    assert len(str(raised.value)) < 1500
    assert before == state_of(tmp_path)
    root = tmp_path.parent / f"{tmp_path.name}-store"
    refusal(str(root), "import", url_of(name, folder), "a/b", "--create")
    if root.exists():
        assert [] == document(str(root), "ls")


@pytest.mark.parametrize(
    ("name", "attack"),
    sampled([case for case in cases(harmless=False) if "link" not in case[1]], every=4),
)
def test_an_attack_is_rejected_where_fsspec_reads(
    name: str, attack: str, good: Callable[[str], Path], tmp_path: Path
) -> None:
    """Shows that what is checked on a disk is checked elsewhere. What is stored there
    may be received as a whole, and TensorStore copies it."""
    folder = hostile(name, attack, good, tmp_path)
    url = f"memory://hostile-{next(_numbers)}"
    files = files_below(folder)
    to_memory(files, url)

    try:
        limit = MAX_MEMORY_BYTES + 4 * sum(map(len, files.values()))
        with at_most(limit), pytest.raises(REJECTED) as raised:
            read_in_memory(name, url)
    finally:
        fsspec.filesystem("memory").rm(url, recursive=True)

    assert len(str(raised.value)) < 1500


@pytest.mark.parametrize(("name", "attack"), cases(harmless=True))
def test_a_name_that_leads_elsewhere_is_a_key_that_leads_nowhere(
    name: str, attack: str, good: Callable[[str], Path], tmp_path: Path
) -> None:
    """Shows that what is read can be written as files: none is outside the folder."""
    folder = hostile(name, attack, good, tmp_path)
    before = state_of(tmp_path)

    for extra in [], ["--keep-names"] if "safetensors" in name else []:
        url, out = url_of(name, folder), tmp_path / f"leaves{len(extra)}"
        printed(NOWHERE, "get", f"{url}@0:**", "-o", f"{out}/", *extra)
        files = [path for path in out.rglob("*") if path.is_file()]
        assert len(store.open_foreign(url).open().leaves) == len(files)
        shutil.rmtree(out)
    assert before == state_of(tmp_path)


def main() -> None:
    """Prints the table."""
    print("| attack |", " | ".join(FORMATS), "|")
    print("|---" * (len(FORMATS) + 1) + "|")
    for attack in ATTACKS:
        cells = [
            f"({entry})"
            if isinstance(entry, str)
            else "harmless"
            if isinstance(entry, Harmless)
            else "rejected"
            for _, _, entries in FORMATS.values()
            for entry in [entries[attack]]
        ]
        print(f"| {attack} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
