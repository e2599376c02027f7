"""``storectl --trust-uncommitted``: steps of Orbax that were copied to a bucket
from a directory, without the file that says that they are finished."""

from pathlib import Path
from typing import Final

import numpy as np
import orbax.checkpoint as ocp
import pytest

import storesvc_client as store
from tests.conftest import gcs_root
from tests.fake_gcs import FakeGcs
from tests.foreign.test_mounts import copy_to_bucket
from tests.support.command_line import document, printed, refusal, run_process, storectl

pytestmark = pytest.mark.emulated

ARRAY: Final = np.arange(12.0)

NOWHERE: Final = "127.0.0.1:1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a manager with the steps 5 and 100."""
    path = tmp_path_factory.mktemp("orbax") / "run"
    with ocp.CheckpointManager(path) as manager:
        for step in (5, 100):
            manager.save(step, args=ocp.args.StandardSave({"w": ARRAY + step}))
            manager.wait_until_finished()
    return path


def restored(root: str, step: int) -> list[float]:
    with store.connect(root) as client:
        found: list[float] = np.asarray(client.run("a/b").restore(step)["w"]).tolist()
        return found


@pytest.mark.slow
def test_a_step_without_its_commit_file_is_imported_only_if_it_is_trusted(
    folder: Path, gcs: FakeGcs, tmp_path: Path
) -> None:
    bucket, root = gcs_root(), (tmp_path / "store").as_uri()
    copy_to_bucket(folder, bucket, without="100/commit_success.txt")
    store.connect(root).close()
    line = ("import", f"orbax:{bucket}@100", "a/b")

    text = refusal(root, *line)
    assert f"orbax:{bucket} has no finished step 100; has 5, each with commit_s" in text
    assert "--trust-uncommitted" in text
    assert [] == document(root, "ls")

    assert printed(root, *line, "--trust-uncommitted").startswith("a/b@100: 96 B, ")
    assert (ARRAY + 100).tolist() == restored(root, 100)
    again = printed(root, *line, "--trust-uncommitted")
    assert "a/b@100: was there already\n" == again


def test_of_a_run_the_steps_without_their_commit_files_are_left_out(
    folder: Path, gcs: FakeGcs, tmp_path: Path
) -> None:
    bucket, root = gcs_root(), (tmp_path / "store").as_uri()
    copy_to_bucket(folder, bucket, without="100/commit_success.txt")
    store.connect(root).close()
    line = ("import", f"orbax:{bucket}", "a/b")

    assert printed(root, *line).startswith("a/b@5: 96 B, ")
    lines = printed(root, *line, "--trust-uncommitted").splitlines()
    assert ["a/b@5: was there already", "a/b@100"] == [
        lines[0],
        lines[1].partition(":")[0],
    ]


def test_a_bucket_with_unfinished_steps_only_is_an_error_that_names_the_option(
    folder: Path, gcs: FakeGcs, tmp_path: Path
) -> None:
    bucket, root = gcs_root(), str(tmp_path / "store")
    copy_to_bucket(folder / "100", f"{bucket}/100", without="commit_success.txt")

    for latest in [], ["--latest"]:
        line = ("import", f"orbax:{bucket}", "a/b", "--create", *latest)
        assert "--trust-uncommitted" in refusal(root, *line)
        assert not Path(root).exists()


def test_commands_that_read_such_a_step_have_the_option(
    folder: Path, gcs: FakeGcs
) -> None:
    bucket = gcs_root()
    copy_to_bucket(folder, bucket, without="100/commit_success.txt")
    run = f"orbax:{bucket}"
    step = f"{run}@100"
    lines = [
        ("ls", step),
        ("tree", step),
        ("stat", step),
        ("get", f"{step}:**"),
        ("diff", step, step),
        ("diff", f"{run}@5", step),
    ]
    for line in lines:
        assert "--trust-uncommitted" in refusal(NOWHERE, *line)
        assert printed(NOWHERE, *line, "--trust-uncommitted")
    line = ("cat", f"{step}:config")
    assert "--trust-uncommitted" in refusal(NOWHERE, *line)
    assert "has no items" in refusal(NOWHERE, *line, "--trust-uncommitted")
    assert [5] == [each["step"] for each in document(NOWHERE, "ls", run)]
    trusted = document(NOWHERE, "ls", run, "--trust-uncommitted")
    assert [100, 5] == [each["step"] for each in trusted]


@pytest.mark.parametrize("source", ["levanter:/x", "safetensors:gs://bucket/x"])
def test_other_formats_have_no_such_file(source: str, tmp_path: Path) -> None:
    for line in ("import", source, "a/b"), ("ls", source), ("cat", f"{source}@0:x"):
        found = storectl(str(tmp_path), *line, "--trust-uncommitted")
        assert 2 == found.exit_code
        assert "--trust-uncommitted goes with checkpoints of Orbax" in found.stderr


@pytest.mark.slow
def test_storectl_in_a_process_does_so(
    folder: Path, gcs: FakeGcs, tmp_path: Path
) -> None:
    bucket, root = gcs_root(), (tmp_path / "store").as_uri()
    copy_to_bucket(folder, bucket, without="100/commit_success.txt")
    command = ("-s", root, "import", f"orbax:{bucket}@100", "a/b", "--create")

    refused = run_process(*command)
    done = run_process(*command, "--trust-uncommitted")

    assert (1, "") == (refused.returncode, refused.stdout)
    assert "has 5, each with commit_success.txt" in refused.stderr
    assert 0 == done.returncode, done.stderr
    assert done.stdout.startswith("a/b@100: 96 B, ")
    assert done.stdout.endswith("source has no checksums\n")
    assert (ARRAY + 100).tolist() == restored(root, 100)
