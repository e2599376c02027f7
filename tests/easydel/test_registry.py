"""The registry sweep, over one class of each task, a sixth of them in CI;
``make sweep-easydel`` sweeps all."""

from pathlib import Path

import pytest

from tests.easydel.registry import UNBUILDABLE, chosen, registered
from tests.easydel.sweep import sweep
from tests.support.examples import sampled

PARTS = 6
"""So that each part takes a minute at most."""


@pytest.mark.parametrize("part", sampled(range(PARTS), every=PARTS))
def test_one_class_of_each_task_comes_back_by_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], part: int
) -> None:
    names = chosen()[part::PARTS]

    is_well = sweep(names, tmp_path)

    assert is_well, capsys.readouterr().out
    assert 2 <= len(names) <= 4


def test_what_easydel_cannot_build_is_in_its_registry() -> None:
    assert UNBUILDABLE.keys() <= registered().keys()
