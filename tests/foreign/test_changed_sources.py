"""A step whose elements changed at the same URL is not skipped by an import."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.array_serialization.serialization import (
    GlobalAsyncCheckpointManager,
)
from safetensors.numpy import save_file

import storesvc_client as store
from tests.foreign.orbax_checkpoints import WRITERS, tree_for
from tests.foreign.test_eformer import GOLDEN
from tests.foreign.test_levanter import write as write_levanter


def write_eformer(path: Path) -> None:
    shutil.copytree(GOLDEN / "run-10", path)


def write_old_levanter(path: Path) -> None:
    write_levanter(GlobalAsyncCheckpointManager(), path, is_old=True)


def write_safetensors(path: Path) -> None:
    path.mkdir()
    save_file({"w": np.arange(6.0)}, path / "model.safetensors")


def orbax_writer(name: str) -> Callable[[Path], None]:
    return lambda path: WRITERS[name](path, tree_for(name))


WRITTEN: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "safetensors": (write_safetensors, "safetensors", "model.safetensors"),
    "eformer": (write_eformer, "eformer", "model/**/0.0"),
    "old levanter": (write_old_levanter, "levanter", "model/**/0.0"),
    "files of Orbax": (orbax_writer("v0-files"), "orbax", "**/0.0"),
    "item of Orbax": (orbax_writer("v0-composite"), "orbax", "3/iter/*.json"),
}
"""Writer, format, and the files of elements, of which one is changed."""


def change(path: Path) -> None:
    """Changes the last byte of a file, a moment after it was written."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    before = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))


@pytest.mark.parametrize("name", WRITTEN)
def test_a_step_whose_elements_changed_since_its_import_is_rejected(
    name: str, tmp_path: Path, run: store.Run
) -> None:
    write, scheme, pattern = WRITTEN[name]
    write(tmp_path / "source")
    url = f"{scheme}:{tmp_path / 'source'}"
    (first,) = run.import_from(url)
    assert [False] == [done.is_new for done in run.import_from(url)]

    change(min((tmp_path / "source").glob(pattern)))

    with pytest.raises(
        store.AlreadyExistsError,
        match=r"before its files changed, .*; import into another run, or delete the "
        r"step \(storectl rm .*\) and import it once it is purged",
    ):
        run.import_from(url)
    assert first.checkpoint == run.checkpoint(first.checkpoint.step)


def test_a_step_that_was_purged_is_imported_as_it_is_now(
    tmp_path: Path, client: store.Client, run: store.Run
) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": np.zeros(3)}, file)
    run.import_from(f"safetensors:{tmp_path}")
    save_file({"w": np.ones(3)}, file)

    run.delete(0, purge_delay=0)
    list(client.collect(run.name))
    run.import_from(f"safetensors:{tmp_path}")

    opened = run.open(0)
    ((_, found),) = opened.read(opened.leaves)
    assert [1, 1, 1] == found.tolist()


def test_a_step_that_is_named_by_another_url_is_the_same(
    tmp_path: Path, run: store.Run
) -> None:
    write_eformer(tmp_path / "run-10")
    run.import_from(f"eformer:{tmp_path}")

    assert [False] == [
        done.is_new for done in run.import_from(f"eformer:{tmp_path / 'run-10'}")
    ]


def test_an_ocdbt_database_that_was_copied_is_the_same(
    tmp_path: Path, run: store.Run
) -> None:
    tree: Any = {"w": jax.numpy.arange(3.0)}
    WRITERS["v0-pytree"](tmp_path / "first", tree)
    shutil.copytree(
        tmp_path / "first", tmp_path / "second", copy_function=shutil.copyfile
    )
    run.import_from(f"orbax:{tmp_path / 'first'}")

    assert [False] == [
        done.is_new for done in run.import_from(f"orbax:{tmp_path / 'second'}")
    ]
