"""Clients and servers of neighbouring releases work together, over the wire and over
the same store.

The other releases are the newest tag before this version, and the newest of the minor
release before. Until there is one, it is the last commit: the test then shows that the
test works, and what changed since.
"""

import io
import os
import re
import subprocess
import sys
import tarfile
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest

import storesvc_client as store
from storesvc.format import layout
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.release.artefacts import release_version
from tests.support import stored_records
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

    def use(target, step):
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
            return " ".join(map(str, [*run.steps(), run.checkpoint("newest").step]))

    print(store.__file__, flush=True)
    for line in sys.stdin:
        target, step = line.split()
        try:
            print(use(target, int(step)), flush=True)
        except Exception as e:
            print(repr(e), flush=True)
    """
)
"""For each line with a store and a step: saves the step, and restores those that the
other side has saved."""


class Release:
    """A process with the client of a release. It is asked several times, since to start
    it takes a second."""

    def __init__(self, environment: dict[str, str]) -> None:
        """Starts it; `environment` leads to its packages."""
        self.environment = environment
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.place = self._read()
        """The file of its client library."""

    def use(self, target: str, step: int) -> str:
        """Connects to a store, and restores and saves there; returns all steps, or the
        error."""
        print(target, step, file=self._process.stdin, flush=True)
        return self._read()

    def end(self) -> None:
        """Ends it."""
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def other_releases(tags: Iterable[str], version: str) -> list[str]:
    """Returns the tags of the releases that a version must work with; HEAD if none is
    before it."""
    this = parse_version(version)
    earlier = sorted(
        (found for tag in tags if (found := parse_version(tag)) and found < this),
        reverse=True,
    )
    of_minors = [found for found in earlier if found[:2] < this[:2]]
    chosen = dict.fromkeys((*earlier[:1], *of_minors[:1]))
    return ["v{}.{}.{}".format(*found) for found in chosen] or ["HEAD"]


def parse_version(text: str) -> tuple[int, ...]:
    """Returns the numbers of a version or its tag; () if it is neither."""
    found = re.fullmatch(r"v?(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else ()


def list_tags() -> list[str]:
    """Returns all tags; none without the history."""
    return _git("tag", "--list").decode().split() if (ROOT / ".git").exists() else []


def _git(*arguments: str) -> bytes:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, check=True).stdout


@pytest.fixture(scope="module")
def this() -> Iterator[Release]:
    """The release of this checkout."""
    release = Release({})
    yield release
    release.end()


@pytest.fixture(scope="module", params=other_releases(list_tags(), release_version()))
def other(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Release]:
    """Another release."""
    folder = tmp_path_factory.mktemp("release")
    packed = _git("archive", request.param, *PACKAGES)
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(folder, filter="data")
    places = [folder, *(folder / name for name in PACKAGES[1:])]
    # without the current directory, which may be this checkout
    release = Release(
        {"PYTHONPATH": os.pathsep.join(map(str, places)), "PYTHONSAFEPATH": "1"}
    )
    yield release
    release.end()


@pytest.mark.parametrize(
    ("tags", "version", "expected"),
    [
        ([], "0.2.0", ["HEAD"]),
        (["v0.2.0"], "0.2.0", ["HEAD"]),  # between the tag and the next version
        (["v0.2.0"], "0.3.0", ["v0.2.0"]),
        (["v0.2.0", "v0.2.1", "nightly", "v0.3.0rc1"], "0.3.0", ["v0.2.1"]),
        (["v0.9.0", "v0.10.0"], "0.11.0", ["v0.10.0"]),
        (["v0.2.0", "v0.2.1", "v0.3.0"], "0.3.1", ["v0.3.0", "v0.2.1"]),
        (["v0.2.0", "v0.3.0"], "0.2.1", ["v0.2.0"]),  # a fix of an older release
    ],
)
def test_the_other_releases_are_the_newest_before_this_version(
    tags: list[str], version: str, expected: list[str]
) -> None:
    assert expected == other_releases(tags, version)


def test_the_other_release_is_another_tree(this: Release, other: Release) -> None:
    assert this.place.startswith(f"{ROOT}/")
    assert not other.place.startswith(f"{ROOT}/")


@pytest.mark.parametrize("is_server_old", [False, True])
def test_a_client_and_a_server_of_two_releases_work_together(
    tmp_path: Path, this: Release, other: Release, is_server_old: bool
) -> None:
    served, opposite = (other, this) if is_server_old else (this, other)
    server = ServerProcess(tmp_path / "store", tmp_path)
    server.environment = served.environment
    server.start()
    try:
        assert "1 1" == opposite.use(server.address, 1)
        assert "1 2 2" == served.use(server.address, 2)
        assert "1 2 3 3" == opposite.use(server.address, 3)
    finally:
        server.stop()


def test_two_releases_use_one_store_in_turn(
    tmp_path: Path, this: Release, other: Release
) -> None:
    root = (tmp_path / "store").as_uri()

    assert "1 1" == other.use(root, 1)
    assert "1 2 2" == this.use(root, 2)
    assert "1 2 3 3" == other.use(root, 3)
    with store.connect(root) as client:
        w = client.run("release/run").restore("newest")["w"]
    np.testing.assert_array_equal(np.arange(1000) + 3, w)


def test_the_other_release_rejects_a_store_of_a_later_format_by_name(
    tmp_path: Path, this: Release, other: Release
) -> None:
    root = tmp_path / "store"
    assert "1 1" == this.use(root.as_uri(), 1)
    record = stored_records.read(root, layout.STORE, pb.StoreRecord)
    record.format_version, record.release = 99, "9.0.0"
    stored_records.write(root, layout.STORE, record)

    error = other.use(root.as_uri(), 2)

    assert "store.binpb: expected a store of format 1 to " in error
    assert "got format 99, set by storesvc 9.0.0; use that release" in error
