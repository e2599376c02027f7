"""Documents that other releases of flax wrote stay readable.

``python -m tests.trees.test_structure_golden`` writes those of the running one anew.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
import pytest
from flax import nnx

from storesvc_client.trees.structure import (
    common_differences,
    decode_graphdef,
    differences,
    encode_graphdef,
)
from tests.modules import CASES, Case

GOLDEN = Path(__file__).parents[1] / "golden" / "structure"
FILES = sorted(GOLDEN.glob("*/*.json"))
OTHERS = [file for file in FILES if file.parent.name != f"flax-{flax.__version__}"]


def stored(module: Any) -> Any:
    """The document of a module, having been JSON."""
    return json.loads(json.dumps(encode_graphdef(nnx.split(module)[0]), sort_keys=True))


def arrays(tree: Any) -> list[tuple[tuple[int, ...], str, bytes]]:
    """The leaves of a tree, bit by bit."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return [(leaf.shape, leaf.dtype.name, leaf.tobytes()) for leaf in leaves]


def called(case: Case, graphdef: Any, state: Any) -> Any:
    """What a module of this structure and a copy of this state returns."""
    copied = jax.tree.map(lambda leaf: leaf, state)
    return arrays(case.call(nnx.merge(graphdef, copied)))


def file_of(name: str) -> Path:
    """Where the document of a case lies that the running release writes."""
    return GOLDEN / f"flax-{flax.__version__}" / f"{name.replace(' ', '_')}.json"


@cache
def made(name: str) -> tuple[Any, Any, Any]:
    """The structure and state of a case, and what it returns."""
    case = CASES[name]
    graphdef, state = nnx.split(case.make())
    return graphdef, state, called(case, graphdef, state)


def template(name: str) -> Any:
    """A template, for a case that needs one."""
    return CASES[name].make() if CASES[name].needs_template else None


def case_of(file: Path) -> str:
    """The name of a file's case."""
    return file.stem.replace("_", " ")


def id_of(file: Path) -> str:
    """What a test calls a file."""
    return f"{file.parent.name}-{file.stem}"


@pytest.mark.parametrize("file", OTHERS, ids=id_of)
def test_a_document_of_another_release_makes_the_same_module(file: Path) -> None:
    case = CASES[case_of(file)]
    _, state, expected = made(case_of(file))

    decoded = decode_graphdef(
        json.loads(file.read_text()),
        allow=case.allow,
        template=template(case_of(file)),
    )

    assert expected == called(case, decoded, state)


@pytest.mark.parametrize("file", FILES, ids=id_of)
def test_a_module_has_the_same_document_in_any_release(file: Path) -> None:
    document = json.loads(file.read_text())

    found = differences(document, encode_graphdef(made(case_of(file))[0]))

    # attention has this attribute since flax 0.12.4
    assert [] == [each for each in found if not each.path.endswith("num_kv_heads")]


@pytest.mark.parametrize("file", FILES, ids=id_of)
def test_a_module_has_no_common_differences_in_any_release(file: Path) -> None:
    document = json.loads(file.read_text())
    own = encode_graphdef(made(case_of(file))[0])

    assert [] == common_differences(document, own)
    assert [] == common_differences(own, document)


def test_two_releases_of_flax_have_documents_of_every_case() -> None:
    releases = {file.parent.name for file in FILES}

    assert {"flax-0.12.3", "flax-0.12.8"} <= releases
    assert len(FILES) == len(releases) * len(CASES)


def write() -> None:
    """Writes the documents of the running release."""
    for name, case in CASES.items():
        file = file_of(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        document = stored(case.make())
        file.write_text(
            json.dumps(document, separators=(",", ":"), sort_keys=True) + "\n"
        )


if __name__ == "__main__":
    write()
