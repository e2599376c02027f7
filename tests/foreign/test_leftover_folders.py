"""Folders that are left over in the folder of a manager hide no step."""

from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

import storesvc_client as store
from tests.support.command_line import printed, refusal, storectl, table

NOWHERE = "127.0.0.1:1"
"""A store that is not there: no command that reads needs one."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a manager with the steps 1 and 300."""
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 300):
            manager.save(step, args=ocp.args.StandardSave({"w": np.arange(6.0)}))
            manager.wait_until_finished()
    return tmp_path / "run"


@pytest.mark.parametrize("inside", ["", "default", "default/d"])
def test_an_empty_folder_is_no_step(inside: str, folder: Path, tmp_path: Path) -> None:
    (folder / "100" / inside).mkdir(parents=True)
    root = str(tmp_path / "store")

    rows = table(printed(NOWHERE, "ls", f"orbax:{folder}"))
    assert ["300", "1"] == [row[0] for row in rows[1:]]
    text = printed(root, "import", f"orbax:{folder}", "a/b", "--create")
    assert ["a/b@1", "a/b@300"] == [line.split(":")[0] for line in text.splitlines()]
    assert "expected a finished step 100" in refusal(
        NOWHERE, "ls", f"orbax:{folder}@100"
    )


@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "notes.txt"])
def test_a_step_without_items_is_reported_after_the_others_are_listed(
    name: str, folder: Path
) -> None:
    (folder / "100").mkdir()
    (folder / "100" / name).write_text("{}")

    result = storectl(NOWHERE, "ls", f"orbax:{folder}")

    assert 1 == result.exit_code
    assert ["300", "1"] == [row[0] for row in table(result.stdout)[1:]]
    assert "/100: expected a step with a folder for each item" in result.stderr
    assert f"files in it, got {name}; use another step" in result.stderr


def test_a_mount_yields_what_is_whole_and_passes_the_errors_on(folder: Path) -> None:
    (folder / "100").mkdir()
    (folder / "100" / "notes.txt").write_text("")
    errors: list[store.DataLossError] = []
    run = store.open_foreign(f"orbax:{folder}")

    found = [each.step for each in run.checkpoints(on_damage=errors.append)]

    assert ([300, 1], [store.DataLossError]) == (found, [*map(type, errors)])
    with pytest.raises(store.DataLossError, match=r"got notes\.txt"):
        list(run.checkpoints())


def test_a_step_that_lost_all_its_metadata_is_no_run_without_steps(
    tmp_path: Path,
) -> None:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as saver:
        state = ocp.args.StandardSave({"w": np.arange(6.0)})
        metadata = ocp.args.JsonSave({"a": 1})
        composite = ocp.args.Composite(state=state, metadata=metadata)
        saver.save(tmp_path / "step", composite)
    for path in "_CHECKPOINT_METADATA", "state/_METADATA", "commit_success.txt":
        (tmp_path / "step" / path).unlink(missing_ok=True)
    with pytest.raises(store.NotFoundError, match="expected checkpoints of Orbax"):
        store.open_foreign(f"orbax:{tmp_path / 'step'}")


def test_a_manager_that_saved_no_step_yet_has_none(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "run", metadata={"a": 1}):
        pass
    assert [] == list(store.open_foreign(f"orbax:{tmp_path / 'run'}").steps())
