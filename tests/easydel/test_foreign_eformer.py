"""Checkpoints that the installed eformer writes are read as steps."""

from pathlib import Path

from storesvc_client._foreign.formats import eformer
from storesvc_client._foreign.local_location import LocalLocation
from tests.easydel.eformer_writer import write
from tests.support.eformer_parts import check_steps


def test_each_writer_of_eformer_makes_a_step(tmp_path: Path) -> None:
    write(tmp_path)
    check_steps(eformer.open_root(LocalLocation(tmp_path)))
