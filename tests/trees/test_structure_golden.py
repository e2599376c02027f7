"""Documents that other flax releases wrote stay readable.

``python -m tests.trees.test_structure_golden`` writes the installed release's.
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
from tests.modules import CASES, Case, Holder
from tests.support.examples import sampled

GOLDEN = Path(__file__).parents[1] / "golden" / "structure"
FILES = sorted(GOLDEN.glob("*/*.json"))
OTHERS = [file for file in FILES if file.parent.name != f"flax-{flax.__version__}"]


def stored(module: Any) -> Any:
    """Returns the document of a module after a round trip through JSON."""
    return json.loads(json.dumps(encode_graphdef(nnx.split(module)[0]), sort_keys=True))


def store_setting(value: Any) -> Any:
    """Returns the document of a module with one static attribute."""
    return stored(Holder({"setting": nnx.static(value)}))


def arrays(tree: Any) -> list[tuple[tuple[int, ...], str, bytes]]:
    """Returns the leaves of a tree, bit by bit."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return [(leaf.shape, leaf.dtype.name, leaf.tobytes()) for leaf in leaves]


def called(case: Case, graphdef: Any, state: Any) -> Any:
    """Returns the output of a module of this structure and a copy of this state."""
    copied = jax.tree.map(lambda leaf: leaf, state)
    return arrays(case.call(nnx.merge(graphdef, copied)))


def file_of(name: str) -> Path:
    """Returns the path of a case's document for the installed release."""
    return GOLDEN / f"flax-{flax.__version__}" / f"{name.replace(' ', '_')}.json"


@cache
def made(name: str) -> tuple[Any, Any]:
    """Returns the structure and state of a case."""
    graphdef, state = nnx.split(CASES[name].make())
    return graphdef, state


def template(name: str) -> Any:
    """Returns a template, for a case that needs one."""
    return CASES[name].make() if CASES[name].needs_template else None


def case_of(file: Path) -> str:
    """Returns the name of a file's case."""
    return file.stem.replace("_", " ")


def id_of(file: Path) -> str:
    """Returns the test id of a file."""
    return f"{file.parent.name}-{file.stem}"


def marked(files: list[Path]) -> list[Any]:
    """Marks the files of transformers as slow."""
    return [
        pytest.param(file, marks=pytest.mark.slow if file.stem == "transformer" else ())
        for file in files
    ]


@pytest.mark.parametrize("file", sampled(OTHERS, every=4), ids=list(map(id_of, OTHERS)))
def test_a_document_of_another_release_makes_the_same_module(file: Path) -> None:
    case = CASES[case_of(file)]
    graphdef, state = made(case_of(file))

    decoded = decode_graphdef(
        json.loads(file.read_text()), allow=case.allow, template=template(case_of(file))
    )

    assert called(case, graphdef, state) == called(case, decoded, state)


@pytest.mark.parametrize("file", sampled(FILES, every=3), ids=[*map(id_of, FILES)])
def test_a_module_has_the_same_document_in_any_release(file: Path) -> None:
    document = json.loads(file.read_text())

    found = differences(document, encode_graphdef(made(case_of(file))[0]))

    # Attention has this attribute since flax 0.12.4.
    assert [] == [each for each in found if not each.path.endswith("num_kv_heads")]


@pytest.mark.parametrize("file", marked(FILES), ids=id_of)
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
    """Writes the documents of the installed release."""
    for name, case in CASES.items():
        file = file_of(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        document = stored(case.make())
        file.write_text(
            json.dumps(document, separators=(",", ":"), sort_keys=True) + "\n"
        )


if __name__ == "__main__":
    write()
