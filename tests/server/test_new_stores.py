"""A store is created only in an empty place, so a mistyped root is noticed."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import storesvc_client as store
from storesvc.format.layout import PROBES, RESERVE, STORE
from tests.conftest import gcs_root
from tests.fake_gcs import FakeGcs
from tests.support.command_line import storectl
from tests.support.gcs_calls import BUCKET, GcsCalls
from tests.support.server_process import EndedError, ServerProcess

NEW = "new store at "


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    made.mkdir()
    return made


@pytest.mark.slow
def test_a_directory_with_foreign_files_is_neither_served_nor_opened(
    root: Path, start_server: Callable[..., ServerProcess]
) -> None:
    for name in ("thesis.tex", "photos", "notes", "ns"):
        (root / name).mkdir()
    expected = (
        f"root {root.as_uri()}: expected a store, or nothing yet, found 'notes', 'ns' "
        f"and more and no {STORE}; correct the root, or name a directory for a new "
        "store"
    )

    with pytest.raises(store.InvalidRequestError) as opened:
        store.connect(root.as_uri())
    with pytest.raises(EndedError) as served:
        start_server(root=root)

    assert expected == str(opened.value)
    assert "INVALID_FIELD" == opened.value.reason
    assert expected in str(served.value)
    assert {"thesis.tex", "photos", "notes", "ns"} == {p.name for p in root.iterdir()}


@pytest.mark.parametrize(
    "name",
    [
        f"{STORE}.__lock",
        RESERVE,
        f"{RESERVE}.__lock",
        f"{PROBES}0123",
        "lost+found/",
        ".snapshot/",
        ".DS_Store",
    ],
)
def test_files_of_a_killed_creation_or_the_file_system_are_ignored(
    root: Path, name: str
) -> None:
    (root / name).parent.mkdir(exist_ok=True)
    if name.endswith("/"):
        (root / name).mkdir()
    else:
        (root / name).write_bytes(b"\0")

    with store.connect(root.as_uri()) as client:
        client.run("tests/new").save(1, {"x": np.ones(3)}).result()


def test_a_store_opens_with_foreign_files_next_to_it(root: Path) -> None:
    store.connect(root.as_uri()).close()
    (root / "README").touch()

    store.connect(root.as_uri()).close()


@pytest.mark.slow
def test_a_new_store_is_logged_once(
    root: Path, start_server: Callable[..., ServerProcess]
) -> None:
    server = start_server(root=root)
    server.stop()
    server.start()

    lines = [line for line in server.log.splitlines() if NEW in line]
    assert 1 == len(lines), server.log
    assert lines[0].endswith(
        f"INFO storesvc.catalog.store_record: {NEW}{root.as_uri()}"
    )


def test_a_new_store_of_a_client_is_logged_by_the_library(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "absent"
    with caplog.at_level(logging.INFO, "storesvc"):
        store.connect(root.as_uri()).close()
        store.connect(root.as_uri()).close()

    shown = [text for text in caplog.messages if text.startswith(NEW)]
    assert [f"{NEW}{root.as_uri()}"] == shown


def test_a_command_does_not_create_a_store(tmp_path: Path) -> None:
    done = storectl((tmp_path / "absent").as_uri(), "ls")

    assert 1 == done.exit_code
    assert not (tmp_path / "absent").exists()


@pytest.mark.emulated
def test_a_bucket_prefix_with_foreign_objects_is_rejected(gcs: FakeGcs) -> None:
    root = gcs_root()
    with GcsCalls(gcs.url) as calls:
        calls.upload(f"{root.removeprefix(f'gs://{BUCKET}/')}/models/x", b"1")

    with pytest.raises(store.InvalidRequestError, match="found 'models' and no store"):
        store.connect(root)
