"""``python -m tests.release.golden``: writes the golden store of this release.

A folder of ``tests/golden/releases`` is written once, by the release that it is named
after, and never again:

- ``store/``, a small store with what the release can record;
- ``audit.log`` of the server that wrote it;
- ``expected.json``: what must be read from both. Its values are those that were saved,
  not what the release restored.

`test_golden_releases` reads the folder of each release, so the next one only adds a
folder.
"""

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import jax
import ml_dtypes
import numpy as np

import storesvc_client as store
from storesvc.format import layout
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.release.artefacts import release_version
from tests.support import stored_records
from tests.support.audited import Audited
from tests.support.contract import Writer, frame
from tests.support.jax_job import run_job

RELEASES: Final = Path(__file__).parents[1] / "golden" / "releases"

RUN: Final = "golden/run"

DTYPES: Final = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "int4", "uint4"),
)

POLICY: Final = store.KeepLatest(10) | store.KeepBest(2, metric="loss", mode="min")

A_YEAR: Final = timedelta(days=365)

JOINT: Final = 3
"""The step that two processes save together."""


def make_tree(version: int) -> dict[str, Any]:
    """Returns the tree of a step; versions differ in one leaf."""
    numbers = np.arange(12).reshape(3, 4) % 5
    large = np.random.default_rng(7).standard_normal((96, 64))
    return {
        "params": {
            "layers": [{"kernel": large.astype(np.float32)}, {"bias": numbers[0]}],
            "odd/name %": np.array([1, -2, 7], ml_dtypes.int4),
        },
        "dtypes": {name: numbers.astype(find_dtype(name)) for name in DTYPES},
        "version": np.full((5,), version, np.float32),
        "scalar": np.float16(-0.0),
        "empty": np.zeros((3, 0), np.complex64),
        "rng": jax.random.key(7),
        "step": 2**40 + version,
        "rate": 0.1,
        "done": False,
        "text": "é\n",
        "bytes": b"\x00\xff",
        "large": -(2**70),
    }


def find_dtype(name: str) -> np.dtype[Any]:
    """Returns the dtype of a name."""
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def describe(tree: Any, path: str = "") -> dict[str, str]:
    """Returns type, shape and digest of the elements of each leaf, by its path."""
    if isinstance(tree, Mapping):
        parts = [describe(tree[name], f"{path}/{name}") for name in sorted(tree)]
    elif isinstance(tree, list):
        parts = [describe(each, f"{path}/{i}") for i, each in enumerate(tree)]
    else:
        return {path: describe_leaf(tree)}
    return {key: text for part in parts for key, text in part.items()}


def describe_leaf(leaf: Any) -> str:
    """Returns the type of a leaf, and its value or the digest of its elements."""
    if leaf is None or isinstance(leaf, bool | int | float | str | bytes):
        return f"{type(leaf).__name__} {leaf!r}"
    kind = type(leaf).__name__
    if isinstance(leaf, jax.Array):
        kind = f"key {jax.random.key_impl(leaf)}"
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    digest = hashlib.sha256(array.tobytes()).hexdigest()[:32]
    return f"{kind} {array.dtype} {array.shape} {digest}"


def make_items(process: int) -> dict[str, Any]:
    """Returns the items of the joint save, as a process passes them."""
    return {
        "config": {"b": [1, -0.0, None, True, "é"], "a": 10**30},
        "notes": "é\n",
        "tokenizer": b"\x00\xff",
        "data": store.PerProcess({"at": 10**process}),
    }


def save_jointly(target: str) -> int:
    """Saves a part of the joint step, as one process of a job."""
    with store.connect(target) as client:
        saved = client.run(RUN).save(
            JOINT, make_tree(JOINT), items=make_items(jax.process_index())
        )
        return saved.result().step


def write(folder: Path) -> None:
    """Writes the golden store of this release into a new folder."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Audited(Path(scratch), Path(scratch) / "audit.log")
        try:
            fill(log.server.address)
        finally:
            log.server.stop()
        # without the reserve of space, which is large and holds nothing
        unneeded = shutil.ignore_patterns(layout.RESERVE)
        shutil.copytree(log.server.root, folder / "store", ignore=unneeded)
        shutil.copyfile(log.file, folder / "audit.log")
    text = json.dumps(expect(folder), indent=1, sort_keys=True)
    (folder / "expected.json").write_text(text + "\n")


def fill(address: str) -> None:
    """Saves what a release can record."""
    with store.connect(address) as client:
        run = client.run(RUN)
        run.save(1, make_tree(1), metrics={"loss": 0.5}, labels={"note": "é"}).result()
        run.save(2, make_tree(2), metrics={"loss": 0.25}).result()  # reuses step 1
        run.update(2, pinned=True)
        run_job("tests.release.golden:save_jointly", 2, devices=1, target=address)
        for step, delay in ((4, A_YEAR), (6, timedelta(0))):
            run.save(step, {"w": np.arange(3)}, base=None).result()
            run.delete(step, purge_delay=delay)
        run.tags.set("best", 2, protected=True)
        run.tags.set("gone", 1)
        run.tags.delete("gone")
        run.holds.create(1, ttl=timedelta(days=1), owner="golden")
        run.retention.set(POLICY)
    writer = Writer(address, RUN, 5)  # an upload that never ends
    writer.begin()
    writer.write(frame(0))


def expect(folder: Path) -> dict[str, Any]:
    """Returns what must be read from a golden store: what `fill` saved."""
    record = stored_records.read(folder / "store", layout.STORE, pb.StoreRecord)
    return {
        "format": record.format_version,
        "steps": {str(step): describe(make_tree(step)) for step in (1, 2, JOINT)},
        "items": describe(make_items(0) | {"data": [{"at": 1}, {"at": 10}]}),
        "metrics": {"1": {"loss": 0.5}, "2": {"loss": 0.25}, str(JOINT): {}},
        "labels": {"1": {"note": "é"}, "2": {}, str(JOINT): {}},
        "pinned": [2],
        "deleted": [6, 4],
        "tags": {"best": 2},
        "holds": {"golden": 1},
        "uploads": [5],
        "policy": store.format_policy(POLICY),
        "audit_entries": len((folder / "audit.log").read_bytes().splitlines()),
    }


def main() -> int:
    """Writes the folder of this release; returns the exit code."""
    folder = RELEASES / release_version()
    if folder.exists():
        print(
            f"{folder}: it exists, and is never written again once {folder.name} is "
            "tagged; until then, remove it first",
            file=sys.stderr,
        )
        return 1
    write(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    print(f"{folder}: {len(files)} files, {size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
