"""A namespace is backed up by one command, again and again, and restored from there."""

from pathlib import Path

import numpy as np
import pytest

import storesvc_client as store
from tests.support.command_line import document, printed, storectl

RUNS = ("prod/a", "prod/b")


def state(run: str, step: int) -> dict[str, np.ndarray]:
    return {"w": np.full(1000, step + ord(run[-1]), np.float32)}


def save(root: str, step: int) -> None:
    with store.connect(root) as client:
        for name in RUNS:
            run = client.run(name)
            run.save(step, state(name, step), items={"step": step}).result()
            run.tags.set("best", step)
            run.retention.set(store.KeepLatest(3))


def test_a_backup_is_repeated_and_a_new_store_is_restored_from_it(
    tmp_path: Path,
) -> None:
    live, backup, new = ((tmp_path / name).as_uri() for name in ("live", "copy", "new"))
    back_up = ("cp", "prod", f"{backup}//prod", "--move-tags", "--retention")
    save(live, 1)
    printed(live, *back_up, "--create")
    save(live, 2)

    again = document(live, *back_up)
    printed(backup, "cp", "prod", f"{new}//prod", "--retention", "--create")

    assert [("prod/a", 2), ("prod/b", 2)] == [
        (one["checkpoint"]["run"], one["checkpoint"]["step"])
        for one in again
        if one["is_new"]
    ]
    with store.connect(new) as client:
        assert RUNS == tuple(found.name for found in client.runs())
        for name in RUNS:
            run = client.run(name)
            assert [1, 2] == run.steps()
            assert store.KeepLatest(3) == run.retention.get()
            for which in (1, "best"):
                step = run.checkpoint(which).step
                np.testing.assert_array_equal(
                    state(name, step)["w"], run.restore(which)["w"]
                )
                assert step == run.items(which)["step"]
                assert run.verify(which).ok


@pytest.mark.parametrize("arguments", [("prod", "prod/a"), ("prod/a", "prod")])
def test_a_namespace_and_a_run_are_not_copied_into_each_other(
    tmp_path: Path, arguments: tuple[str, str]
) -> None:
    save(tmp_path.as_uri(), 1)

    result = storectl(tmp_path.as_uri(), "cp", *arguments)

    assert 2 == result.exit_code
    assert f"got {arguments[0]} and {arguments[1]}" in result.stderr


def test_steps_are_of_one_run(tmp_path: Path) -> None:
    save(tmp_path.as_uri(), 1)

    result = storectl(tmp_path.as_uri(), "cp", "prod", "lab", "--steps", "1")

    assert 2 == result.exit_code
    assert "a run as SRC only" in result.stderr
