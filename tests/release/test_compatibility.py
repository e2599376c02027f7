"""Clients and servers of neighbouring releases work together, over the wire and over
the same store.

The other release is the newest tag before this version. Until there is one, it is the
last commit: the test then shows that the test works, and what changed since.
"""

import io
import os
import subprocess
import sys
import tarfile
import textwrap
from pathlib import Path
from typing import Final

import numpy as np
import pytest

import storesvc_client as store
from tests.release.artefacts import release_version
from tests.support.server_process import ServerProcess

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("storesvc", "client", "proto")

pytestmark = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="needs the history of the repository"
)

PROGRAM: Final = textwrap.dedent(
    """
    import sys
    import numpy as np
    import storesvc_client as store

    target, step = sys.argv[1], int(sys.argv[2])
    with store.connect(target) as client:
        run = client.run("release/run")
        for found in run.steps():
            w = run.restore(found)["w"]
            assert (w == np.arange(1000) + found).all(), found
            assert run.verify(found).ok
            assert run.items(found)["config"] == {"step": found}
        items = {"config": {"step": step}}
        run.save(step, {"w": np.arange(1000) + step}, items=items).result()
        run.tags.set("newest", step)
        run.retention.set(store.KeepLatest(10))
        print(*run.steps(), run.checkpoint("newest").step)
    """
)
"""Saves a step, and restores those that the other side has saved."""


def other_release() -> str:
    """Returns the tag of the newest release before this version; HEAD if none is."""
    tags = _git("tag", "--list", "v*", "--sort=-version:refname").decode().split()
    return next((tag for tag in tags if tag != f"v{release_version()}"), "HEAD")


def _git(*arguments: str) -> bytes:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, check=True).stdout


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process that runs the other release."""
    folder = tmp_path_factory.mktemp("release")
    packed = _git("archive", other_release(), *PACKAGES)
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(folder, filter="data")
    places = [folder, *(folder / name for name in PACKAGES[1:])]
    # without the current directory, which may be this checkout
    return {"PYTHONPATH": os.pathsep.join(map(str, places)), "PYTHONSAFEPATH": "1"}


def program(target: str, step: int, environment: dict[str, str]) -> str:
    """Runs the program; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, target, str(step)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_other_release_is_another_tree(other: dict[str, str]) -> None:
    code = "import storesvc_client, storesvc; print(storesvc.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | other,
        capture_output=True,
        text=True,
        check=True,
    )

    assert not found.stdout.startswith(str(ROOT / "storesvc"))


@pytest.mark.parametrize("is_server_old", [False, True])
def test_a_client_and_a_server_of_two_releases_work_together(
    tmp_path: Path, other: dict[str, str], is_server_old: bool
) -> None:
    server = ServerProcess(tmp_path / "store", tmp_path)
    server.environment = other if is_server_old else {}
    server.start()
    try:
        assert "1 1" == program(server.address, 1, {} if is_server_old else other)
        assert "1 2 2" == program(server.address, 2, other if is_server_old else {})
        assert "1 2 3 3" == program(server.address, 3, {} if is_server_old else other)
    finally:
        server.stop()


def test_two_releases_use_one_store_in_turn(
    tmp_path: Path, other: dict[str, str]
) -> None:
    root = (tmp_path / "store").as_uri()

    assert "1 1" == program(root, 1, other)
    assert "1 2 2" == program(root, 2, {})
    assert "1 2 3 3" == program(root, 3, other)
    with store.connect(root) as client:
        w = client.run("release/run").restore("newest")["w"]
    np.testing.assert_array_equal(np.arange(1000) + 3, w)
