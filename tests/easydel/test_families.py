"""Tables of families take models of transformers to EasyDeL and MaxText, and back."""

import os
import subprocess
import sys

import pytest

from tests.easydel import families, maxtext

NAMES = [*families.MODELS]
MAXTEXT = [*maxtext.MODELS]


@pytest.mark.parametrize("names", [NAMES[::2], NAMES[1::2]], ids=["even", "odd"])
def test_logits_are_those_of_transformers_both_ways(names: list[str]) -> None:
    run("tests.easydel.families", *names)


@pytest.mark.parametrize("names", [MAXTEXT[::2], MAXTEXT[1::2]], ids=["even", "odd"])
def test_logits_of_the_tree_of_maxtext_are_those_of_transformers(
    names: list[str],
) -> None:
    run("tests.easydel.maxtext", *names)


def run(module: str, *names: str) -> None:
    """Runs a module in a process with one device, as transformers has it."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}

    ran = subprocess.run(
        [sys.executable, "-m", module, *names],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    print(ran.stdout)
    assert "all as they should be" in ran.stdout, ran.stderr[-4000:]
