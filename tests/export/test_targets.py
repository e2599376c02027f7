"""Files at the target of an export: complete or absent, written by one at a time."""

import os
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import cast

import pytest

import storesvc_client as store
from storesvc_client._export.orbax import COMMITTED, _new_directory, _new_step
from storesvc_client._export.target import (
    MARK,
    ClaimedStep,
    LocalTarget,
    NewFile,
    RemoteTarget,
    Target,
    lock,
    open_target,
)


def write_and_fail(target: Target) -> None:
    """Fails in the middle of a file."""
    with target.create("x") as file:
        file.write(b"a longer text")
        raise RuntimeError


def refuse(
    context: AbstractContextManager[object], problem: str = "another export writes it"
) -> None:
    """Checks that a context is refused when it begins or ends."""
    with pytest.raises(store.PreconditionError, match=problem), context:
        pass


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = LocalTarget(tmp_path)

    with target.create("a/b") as file:
        file.write(b"whole")
        assert [".b.part"] == target.names("a")

    assert (["b"], 5, b"hol") == (
        target.names("a"),
        target.size("a/b"),
        target.read("a/b", 1, 4),
    )


def test_a_failure_leaves_a_temporary_file_that_a_retry_begins_again(
    tmp_path: Path,
) -> None:
    target = LocalTarget(tmp_path)

    with pytest.raises(RuntimeError):
        write_and_fail(target)
    assert [".x.part"] == target.names()
    with target.create("x") as file:
        file.write(b"short")

    assert b"short" == (tmp_path / "x").read_bytes()
    assert ["x"] == target.names()


def test_two_exports_do_not_write_one_file_or_step(tmp_path: Path) -> None:
    target = LocalTarget(tmp_path)

    with target.create("x"):
        refuse(target.create("x"))
    with _new_directory(tmp_path / "1"):
        refuse(_new_directory(tmp_path / "1"))


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_in_a_bucket_is_completed_by_the_export_that_began_last(
    *, fails: bool
) -> None:
    pytest.importorskip("fsspec")
    url = f"memory://claims/{fails}"
    step = open_target(f"{url}/1")
    first = ExitStack()
    lost = first.enter_context(_new_step(open_target, url, "1"))
    with lost.create("first") as file:
        file.write(b"of the first export")

    with (
        suppress(*([RuntimeError] if fails else [])),
        _new_step(open_target, url, "1") as target,
    ):
        with target.create("second") as file:
            file.write(b"of the second export")
        with pytest.raises(store.PreconditionError, match="another export writes it"):
            lost.create("second")
        if fails:
            raise RuntimeError
    with pytest.raises(store.PreconditionError, match="another export writes it"):
        first.close()

    last = MARK if fails else COMMITTED
    assert sorted([last, "second"]) == step.names()
    assert b"of the second export" == step.read("second", 0, 99)


def test_an_export_that_loses_its_step_at_the_end_leaves_it_unfinished() -> None:
    pytest.importorskip("fsspec")
    step = open_target("memory://claims/end/1")

    class Late(RemoteTarget):
        """A target on which another export begins while the last file is written."""

        def below(self, folder: str) -> "Late":
            return Late(super().below(folder).place)

        @contextmanager
        def create(self, path: str) -> Generator[NewFile]:
            if path == COMMITTED:
                step.remove("")
                ClaimedStep(step)
            with super().create(path) as file:
                yield file

    def opened(url: str) -> Target:
        target = cast("RemoteTarget", open_target(url))
        return Late(target.place)

    refuse(_new_step(opened, "memory://claims/end", "1"))

    assert [MARK] == step.names()


def test_a_file_that_another_export_has_completed_is_not_taken(tmp_path: Path) -> None:
    target, part = LocalTarget(tmp_path), tmp_path / ".x.part"
    with target.create("x") as file:
        file.write(b"whole")
        descriptor = os.open(part, os.O_WRONLY)

    with pytest.raises(store.PreconditionError, match="another export writes it"):
        lock(descriptor, part, tmp_path / "x")

    os.close(descriptor)
    assert b"whole" == (tmp_path / "x").read_bytes()


def test_a_link_in_place_of_a_temporary_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".x.part").symlink_to(tmp_path / "victim")

    refuse(LocalTarget(tmp_path / "out").create("x"), r"out/x: Too many levels")

    assert "kept" == (tmp_path / "victim").read_text()


def test_a_target_below_a_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    refuse(LocalTarget(tmp_path / "file").create("x"), "check the target")


def test_a_failed_upload_leaves_no_object() -> None:
    pytest.importorskip("fsspec")
    target = open_target("memory://uploads/failed")

    with pytest.raises(RuntimeError):
        write_and_fail(target)
    assert [] == target.names()
    with target.create("x") as file:
        file.write(b"whole")

    assert (["x"], 5, b"ho") == (
        target.names(),
        target.size("x"),
        target.read("x", 1, 3),
    )


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("file://host/x", "expected file:///PATH; write"),
        (
            "nowhere://x",
            "expected a path, file:///PATH, or a URL that begins with gs://",
        ),
        ("", "expected a URL or a path"),
        ("gs//bucket/x", r"expected gs://\.\.\. for a URL; write \./gs//bucket/x for"),
        ("s3:/bucket/x", r"expected s3://\.\.\. for a URL"),
        ("https:host/x", r"expected https://\.\.\. for a URL"),
    ],
)
def test_a_url_that_cannot_be_written_is_rejected(url: str, problem: str) -> None:
    with pytest.raises(store.InvalidRequestError, match=problem):
        open_target(url)


def test_a_file_url_is_a_local_directory(tmp_path: Path) -> None:
    spaced = tmp_path / "a b"

    assert spaced == open_target(spaced.as_uri()).local
