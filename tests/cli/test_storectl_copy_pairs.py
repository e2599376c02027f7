"""``storectl cp`` between every pair of stores: in a directory, in a bucket of each
provider, and behind a server; also between two of one kind.

A copy has all that its source has, stores a tenth of a step that shares nine tenths
with the one before it, is repeated to finish after a kill, and rejects a source of
which a byte has changed.
"""

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import pytest
import tensorstore as ts

import storesvc_client as store
from storesvc_client._foreign.locations import open_location
from tests.conftest import gcs_root, s3_root
from tests.support.command_line import document, printed, refusal
from tests.support.examples import sampled, soaked
from tests.support.in_process_server import InProcessServer

pytestmark = pytest.mark.emulated

KINDS: Final = ("file", "gs", "s3", "server")
PAIRS: Final = list(itertools.product(KINDS, KINDS))
LEAVES: Final = 10
LEAF_BYTES: Final = 80_000
STEPS: Final = (1, 2)

NewStore: TypeAlias = Callable[[str], tuple[str, str]]
"""Makes a store where the name of the kind says; returns its address, and the root
where its files are."""


def state_of(step: int) -> dict[str, Any]:
    """Returns a state of ten leaves, of which each step changes the first one."""
    numbers = np.random.default_rng(0).random((LEAVES, LEAF_BYTES // 8))
    return {f"w{k}": numbers[k] + (step if k == 0 else 0) for k in range(LEAVES)}


def save(address: str, steps: tuple[int, ...] = STEPS) -> None:
    """Saves a run with all that a run can have."""
    with store.connect(address) as client:
        run = client.run("prod/llama")
        for step in steps:
            run.save(
                step,
                state_of(step),
                metrics={"loss": 1 / step},
                labels={"team": "a"},
                items={"config": {"layers": step}, "notes": "a text"},
            ).result()
        run.tags.set("best", steps[0], protected=True)
        run.update(steps[-1], pinned=True)
        run.configure(labels={"owner": "b"}, purge_delay=60)


@pytest.fixture(scope="module")
def new_store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NewStore]:
    """Makes stores of each kind, which live as long as the module."""
    emulators: Any = {kind: request.getfixturevalue(k) for kind, k in _EMULATORS}
    with ExitStack() as servers:

        def make(kind: str) -> tuple[str, str]:
            root = tmp_path_factory.mktemp(kind) / "store"
            if kind == "gs":
                address = gcs_root()
                return address, address
            if kind == "s3":
                address = s3_root(emulators["s3"])
                return address, address
            if kind == "file":
                return root.as_uri(), root.as_uri()
            server = InProcessServer(root)
            servers.callback(server.close)
            return server.address, root.as_uri()

        yield make


_EMULATORS: Final = (("gs", "gcs"), ("s3", "s3"))


@pytest.fixture(scope="module")
def sources(new_store: NewStore) -> Callable[[str], str]:
    """Returns the address of a store with the run."""

    @cache
    def source(kind: str) -> str:
        address, _ = new_store(kind)
        save(address)
        return address

    return source


@pytest.fixture(scope="module")
def damaged(new_store: NewStore) -> Callable[[str], str]:
    """Returns the address of a store with a run of one step, of which a byte of an
    array has changed."""

    @cache
    def source(kind: str) -> str:
        address, root = new_store(kind)
        save(address, (1,))
        flip(root, state_of(1)["w5"].tobytes())
        return address

    return source


def flip(root: str, content: bytes) -> None:
    """Flips a bit of these bytes, in the one file below a root that has them."""
    location = open_location(root)
    with location.opening():
        files = ts.KvStore.open(location.kvstore()).result()
        for name in files.list().result():
            data = files.read(name).result().value
            if (at := data.find(content)) >= 0:
                changed = bytearray(data)
                changed[at + len(content) // 2] ^= 1
                files.write(name, bytes(changed)).result()
                return
    raise AssertionError(f"{root}: no file has these bytes")


def check_same(source: str, target: str) -> None:
    """Compares the runs of two stores: every bit, and all that belongs to it."""
    with store.connect(source) as one, store.connect(target) as other:
        ours, theirs = one.run("prod/llama"), other.run("lab/copy")
        assert [*STEPS] == ours.steps() == theirs.steps()
        for step in STEPS:
            was, became = ours.checkpoint(step), theirs.checkpoint(step)
            assert (was.metrics, was.pinned) == (became.metrics, became.pinned)
            assert was.uid == became.labels["copy.uid"]
            assert "a" == became.labels["team"]
            assert dict(ours.items(step)) == dict(theirs.items(step))
            assert {"layers": step} == theirs.items(step)["config"]
            state = state_of(step)
            for leaf, array in theirs.open(step).read(state):
                assert state.pop(leaf.key).tobytes() == array.tobytes()
            assert {} == state
            assert theirs.verify(step).ok
        (tag,) = theirs.tags.list()
        assert ("best", STEPS[0], True) == (tag.name, tag.step, tag.protected)
        before, after = ours.info(), theirs.info()
        assert (before.labels, before.purge_delay) == (after.labels, after.purge_delay)


@pytest.mark.parametrize(("kind", "other"), sampled(PAIRS, every=11))
def test_a_copy_has_everything_and_stores_a_tenth_of_its_second_step(
    kind: str, other: str, sources: Callable[[str], str], new_store: NewStore
) -> None:
    source, (target, _) = sources(kind), new_store(other)
    line = ("cp", "prod/llama", f"{target}//lab/copy", "--create")

    first, second = document(source, *line)

    assert (True, True) == (first["is_verified"], second["is_verified"])
    assert LEAVES * LEAF_BYTES <= first["sent_bytes"] < LEAVES * LEAF_BYTES + 4096
    assert LEAF_BYTES <= second["sent_bytes"] < LEAF_BYTES + 4096
    assert (LEAVES - 1) * LEAF_BYTES <= second["reused_bytes"]
    assert second["checkpoint"]["own_bytes"] < LEAF_BYTES + 4096
    check_same(source, target)
    again = printed(source, *line)
    assert "".join(f"lab/copy@{n}: was there already\n" for n in STEPS) == again


@pytest.mark.parametrize(("kind", "other"), sampled(PAIRS, every=8))
def test_a_source_of_which_a_byte_has_changed_is_not_copied(
    kind: str, other: str, damaged: Callable[[str], str], new_store: NewStore
) -> None:
    target, _ = new_store(other)
    line = ("cp", "prod/llama", f"{target}//lab/copy", "--create")

    text = refusal(damaged(kind), *line)

    assert "w5" in text
    with store.connect(target) as client:
        assert [] == client.run("lab/copy").steps()


@pytest.mark.parametrize(("kind", "other"), soaked(PAIRS, every=6))
def test_a_copy_that_is_killed_is_repeated_to_finish_it(
    kind: str, other: str, new_store: NewStore
) -> None:
    (source, _), (target, _) = new_store(kind), new_store(other)
    steps = tuple(range(1, 13))
    save(source, steps)
    line = ["cp", "prod/llama", f"{target}//lab/copy", "--create"]
    command = [sys.executable, "-u", "-m", "storesvc_client.cli", "-s", source, *line]

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("lab/copy@1: ")
        process.kill()

    lines = printed(source, *line).splitlines()
    assert "lab/copy@1: was there already" == lines[0]
    assert [f"lab/copy@{step}" for step in steps] == [
        each.partition(":")[0] for each in lines
    ]
    with store.connect(target) as client:
        run = client.run("lab/copy")
        assert list(steps) == run.steps()
        assert 1 == run.checkpoint("best").step
        assert run.verify().ok


def test_a_bit_that_flips_in_the_target_is_found_by_a_verification(
    sources: Callable[[str], str], new_store: NewStore, tmp_path: Path
) -> None:
    """Shows that a copy brings the checksums along."""
    target, root = new_store("file")
    printed(sources("file"), "cp", "prod/llama", f"{target}//lab/copy", "--create")

    flip(root, state_of(1)["w5"].tobytes())

    with store.connect(target) as client:
        assert not client.run("lab/copy").verify().ok
