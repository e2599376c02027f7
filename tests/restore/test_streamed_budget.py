"""The host memory of a streamed restore, with a state of several times its budget."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from storesvc.format.grids import whole
from storesvc_client._chunks.buffers import Buffer
from storesvc_client._restore.assembly import Assembly
from storesvc_client._restore.open_tree import get_reader
from tests.conftest import GIVEN_BUCKET  # noqa: F401 - sets jax up before it is imported
from tests.support.programs import run_python
from tests.support.server_process import ServerProcess

MIB = 1 << 20
LEAVES = 64
LEAF_BYTES = 3 * MIB


@pytest.fixture(scope="module")
def saved(server: ServerProcess) -> str:
    """Name of a run whose step 0 has 192 MiB."""
    name = "tests/streamed-budget"
    drawn = np.random.default_rng(0)
    with store.connect(server.address) as client:
        leaves = {f"{n:03}": drawn.bytes(LEAF_BYTES) for n in range(LEAVES)}
        tree = {key: np.frombuffer(data, np.uint8) for key, data in leaves.items()}
        client.run(name).save(0, tree).result()
    return name


def restored(address: str, name: str, budget_bytes: int) -> tuple[int, list[int]]:
    """Restores all leaves and drops them; returns the peak of bytes in buffers, and the
    bytes that were handed over."""
    handed: list[int] = []

    def place(buffers: Iterable[Buffer]) -> None:
        handed.extend(buffer.group.size_bytes for buffer in buffers)

    with store.connect(address) as client:
        reader = get_reader(client.run(name).open(0))
        tree = reader.manifest.tree
        rows = [(row, [whole(leaf.shape)]) for row, leaf in enumerate(tree.leaves)]
        assembly = Assembly(reader.manifest, rows, name="x", place=place)
        source: Any = reader.open_source()
        source.budget_bytes = budget_bytes
        source.read(assembly.missing, assembly)
        assert [] == assembly.missing
        return assembly.peak_bytes, handed


@pytest.mark.slow
@pytest.mark.parametrize("budget_mib", [1, 7, 32])
def test_buffers_of_a_streamed_restore_fit_its_budget(
    server: ServerProcess, saved: str, budget_mib: int
) -> None:
    peak, handed = restored(server.address, saved, budget_mib * MIB)

    assert LEAVES * LEAF_BYTES == sum(handed)
    # a buffer larger than the budget is read alone
    assert peak <= max(budget_mib * MIB, LEAF_BYTES)


@pytest.mark.slow
def test_a_restore_uses_little_more_memory_than_its_budget(
    server: ServerProcess, saved: str
) -> None:
    program = (
        "import json, resource\n"
        "from tests.restore.test_streamed_budget import MIB, restored\n"
        "def most(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10\n"
        f"arguments = {server.address!r}, {saved!r}\n"
        "restored(*arguments, 3 * MIB)\n"
        "before = most()\n"
        "restored(*arguments, 24 * MIB)\n"
        "print(json.dumps(most() - before))"
    )

    run = run_python(program)

    assert json.loads(run.stdout) <= (24 + 24) * MIB < LEAVES * LEAF_BYTES
