"""Checkpoints that eformer 0.0.99.12 wrote (``tests/golden/foreign/eformer``, made by
``tests/easydel/eformer_writer.py``) are read as steps."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import storesvc_client as store
from storesvc_client._foreign.foreign_step import ForeignStep
from storesvc_client._foreign.formats import eformer
from storesvc_client._foreign.locations import LocalLocation
from storesvc_client.errors import DataLossError, NotFoundError
from tests.support.eformer_parts import KERNEL, check_steps, expected_tree
from tests.support.foreign_reading import as_bytes, read_leaf, read_tree

GOLDEN = Path(__file__).parents[1] / "golden" / "foreign" / "eformer"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the checkpoints."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "copy"))


def opened(folder: Path, step: int = 10) -> ForeignStep:
    return eformer.open_root(LocalLocation(folder)).open(step)


def rewrite(file: Path, **fields: Any) -> None:
    """Replaces fields of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_every_step_of_each_writer_is_read() -> None:
    check_steps(eformer.open_root(LocalLocation(GOLDEN)))


@pytest.mark.slow
def test_every_bit_of_each_writer_is_imported(run: store.Run) -> None:
    run.import_from(store.open_foreign(f"eformer:{GOLDEN}"))
    assert [10, 20, 30] == list(run.steps())
    for step in run.steps():
        opened = run.open(step)
        leaves = {leaf.key: array for leaf, array in opened.read(opened.leaves)}
        assert as_bytes(expected_tree(step)) == as_bytes(leaves)
        assert run.verify(step).ok


def test_a_step_without_metadata_is_unfinished(copy: Path) -> None:
    (copy / "run-10" / "metadata.json").unlink()
    assert [20, 30] == list(eformer.open_root(LocalLocation(copy)).steps())
    with pytest.raises(NotFoundError, match="no finished step 10"):
        opened(copy)


def test_a_folder_that_save_pretrained_wrote_is_a_step(copy: Path) -> None:
    (copy / "run-10" / "metadata.json").unlink()
    step = opened(copy / "run-10", 10)
    assert KERNEL.tobytes() == read_leaf(step, "model/layers/0/kernel").tobytes()


def test_the_metadata_states_the_step(copy: Path) -> None:
    rewrite(copy / "run-10" / "metadata.json", step=11)
    rewrite(copy / "run-20" / "metadata.json", step=-1)  # the writer was given none
    assert [11, 20, 30] == list(eformer.open_root(LocalLocation(copy)).steps())


def test_a_lost_chunk_is_damage_and_not_zeros(copy: Path) -> None:
    (copy / "run-10" / "model/layers/1/bias/0").unlink()
    with pytest.raises(DataLossError, match="array 'model/layers/1/bias'"):
        read_tree(opened(copy))


def test_an_array_that_differs_from_the_index_is_damage(copy: Path) -> None:
    entry = {"path": "layers/0/kernel", "shape": [3, 2], "dtype": "bfloat16"}
    rewrite(copy / "run-20" / "tensorstore_index.json", arrays=[entry])
    with pytest.raises(DataLossError, match=r"expected \(3, 2\) bfloat16 by"):
        opened(copy, 20)


def test_a_prefix_whose_arrays_are_elsewhere_is_damage(copy: Path) -> None:
    file = copy / "run-10" / "tensorstore_index.json"
    prefixes = json.loads(file.read_text())["prefixes"]
    rewrite(file, prefixes={"model": prefixes["tx"]})
    with pytest.raises(DataLossError, match="expected a path below 'model'"):
        opened(copy)
