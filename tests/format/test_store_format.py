"""The version of the format of a store: it decides who writes, and only an operator
raises it.

This release writes version 2 alone, so the stores to raise are of version 1, and a
store of version 3 is one of version 2 whose record has another number.
"""

import asyncio
import shutil
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storesvc
import storesvc_client as store
from storesvc.catalog.records import read_record, write_record
from storesvc.catalog.store_record import NOTICE_SECONDS, StoreFormat, read_store
from storesvc.errors import CorruptDataError, FormatUnsupportedError
from storesvc.format import layout
from storesvc.format.seal import FORMAT_VERSION
from storesvc.server.gc_scheduler import collecting
from storesvc.storage.bucket import ALWAYS
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.support import stored_records
from tests.support.audited import Audited
from tests.support.collecting_process import Process, started
from tests.support.command_line import document, printed, refusal
from tests.support.faulty_bucket import Call, Fault
from tests.support.in_process_server import InProcessServer
from tests.support.server_process import EndedError, ServerProcess

GOLDEN = Path(__file__).parents[1] / "golden"
RELEASE = storesvc.__version__
NEXT = FORMAT_VERSION + 1
UNKNOWN = (
    f"store.binpb: expected a store of format 1 to {FORMAT_VERSION}, which storesvc "
    f"{RELEASE} knows, got format {NEXT}, set by storesvc 9.0.0; use that release or a "
    "newer one, or a backup from before the upgrade"
)
UNWRITTEN = (
    "store.binpb: expected a store of format 2 to write to, got format 1, which "
    f"storesvc {RELEASE} only reads; raise it with storectl upgrade"
)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Root of a store of version 1."""
    return Path(shutil.copytree(GOLDEN / "v1", tmp_path / "store"))


def read(root: Path) -> pb.StoreRecord:
    """Returns the record of a store."""
    return stored_records.read(root, layout.STORE, pb.StoreRecord)


def set_next(root: Path) -> None:
    """Makes a store one of a version that this release does not know."""
    record = read(root)
    record.format_version, record.release = NEXT, "9.0.0"
    stored_records.write(root, layout.STORE, record)


def list_contents(root: Path) -> dict[str, bytes]:
    """Returns the bytes of each file of a store, but of its reserve."""
    files = (path for path in root.rglob("*") if path.is_file())
    names = {path.relative_to(root).as_posix(): path for path in files}
    return {
        name: path.read_bytes()
        for name, path in names.items()
        if name != layout.RESERVE
    }


def test_a_new_store_has_the_newest_version_and_names_its_release(
    tmp_path: Path,
) -> None:
    root = tmp_path / "store"
    with store.connect(root.as_uri()):
        pass

    record = read(root)
    assert (FORMAT_VERSION, RELEASE) == (record.format_version, record.release)
    # in which each later release, too, seals this record
    sealed = pb.Sealed.FromString((root / layout.STORE).read_bytes())
    assert 2 == sealed.format_version


def test_a_store_of_an_older_version_is_read_and_not_changed(old: Path) -> None:
    before = list_contents(old)
    with store.connect(old.as_uri()) as client:
        run = client.run("golden/run")
        assert 1234 == run.restore()["a"]["step"]
        assert run.verify(1234).ok
        assert [1234] == run.steps()
        changes: list[Callable[[], object]] = [
            lambda: run.save(1235, {"w": np.arange(3)}).result(),
            lambda: run.tags.set("best", 1234),
            lambda: run.delete(1234),
            lambda: run.retention.set(store.KeepLatest(1)),
            lambda: list(client.collect()),
            lambda: client.run("golden/new").save(1, {"w": np.arange(3)}).result(),
        ]
        for change in changes:
            with pytest.raises(store.PreconditionError) as caught:
                change()
            assert "FORMAT_UNSUPPORTED" == caught.value.reason
            assert UNWRITTEN in str(caught.value)

    assert before == list_contents(old)


def test_an_operator_raises_the_version_once_and_never_lowers_it(old: Path) -> None:
    target = str(old)
    before = list_contents(old)

    assert "the format would be raised from 1 to 2\n" == printed(
        target, "upgrade", "--dry-run"
    )
    assert before == list_contents(old)
    assert {"previous_version": 1, "format_version": 2} == document(
        target, "upgrade", "--to", "2"
    )
    raised = list_contents(old)
    assert "format 2; nothing to raise\n" == printed(target, "upgrade")
    assert raised == list_contents(old)
    assert (2, RELEASE) == (read(old).format_version, read(old).release)
    assert (
        "format_version: expected at least 2, the format of the store, got 1; a format "
        "is never lowered, the way back is a backup from before it was raised"
    ) in refusal(target, "upgrade", "--to", "1")
    assert (
        f"format_version: expected 2, which storesvc {RELEASE} writes, got {NEXT}; "
        "upgrade the servers first"
    ) in refusal(target, "upgrade", "--to", str(NEXT))
    assert raised == list_contents(old)
    with store.connect(old.as_uri()) as client:
        assert 1234 == client.run("golden/run").restore()["a"]["step"]
        client.run("golden/run").save(1235, {"w": np.arange(3)}).result()


@pytest.mark.parametrize("version", [0, -1, True, "2", 2**31])
def test_a_version_that_is_none_is_rejected(old: Path, version: Any) -> None:
    with (
        store.connect(old.as_uri()) as client,
        pytest.raises(store.InvalidRequestError, match="expected a version from 1"),
    ):
        client.upgrade(version)


def test_a_running_server_writes_at_once_after_another_process_raised_it(
    old: Path,
) -> None:
    with (
        closing(InProcessServer(old)) as server,
        store.connect(server.address) as client,
    ):
        tags = client.run("golden/run").tags
        with pytest.raises(store.PreconditionError, match="only reads"):
            tags.set("best", 1234)
        printed(str(old), "upgrade")

        tags.set("best", 1234)


def test_a_watch_resumes_over_an_upgrade(old: Path) -> None:
    with (
        closing(InProcessServer(old)) as server,
        store.connect(server.address) as client,
    ):
        events = client.watch("golden", since="latest")
        token = next(events).resume_token
        events.close()
        client.upgrade()
    with (
        closing(InProcessServer(old)) as server,
        store.connect(server.address) as client,
    ):
        events = client.watch("golden", since=token)
        client.run("golden/run").save(1235, {"w": np.arange(3)}).result()
        assert 1235 == next(events).step
        events.close()


@pytest.mark.slow
def test_the_audit_log_has_who_raised_the_version_and_from_which(
    tmp_path: Path, old: Path
) -> None:
    log = Audited(tmp_path, tmp_path / "audit.log")
    try:
        printed(log.server.address, "upgrade")
    finally:
        log.server.stop()

    intent, ended = [e for e in log.entries() if e.get("method") == "UpgradeStore"]
    assert ("intent", "ended") == (intent["stage"], ended["stage"])
    assert "1 -> 2" == ended["detail"]["format_version"]
    assert {"local"} == {intent["principal"], ended["principal"]}
    assert 2 == read(old).format_version


@pytest.mark.parametrize("command", [["ls"], ["upgrade"], ["upgrade", "--to", "2"]])
def test_a_store_of_an_unknown_version_is_rejected_at_the_start(
    old: Path, command: list[str]
) -> None:
    set_next(old)
    before = list_contents(old)

    assert UNKNOWN in refusal(str(old), *command)
    assert before == list_contents(old)


@pytest.mark.slow
@pytest.mark.parametrize("option", [[], ["--read-only"]])
def test_a_server_does_not_start_over_an_unknown_version(
    tmp_path: Path, old: Path, option: list[str]
) -> None:
    set_next(old)

    with pytest.raises(EndedError, match=UNKNOWN):
        ServerProcess(old, tmp_path, *option).start()


async def set_version(process: Process, version: int) -> None:
    """Writes the record of the store as another release does."""
    found = await read_record(process.bucket, layout.STORE, pb.StoreRecord)
    assert found is not None
    found[0].format_version, found[0].release = version, "9.0.0"
    await write_record(process.bucket, layout.STORE, found[0], condition=ALWAYS)


async def test_a_running_process_rejects_changes_a_minute_after_the_upgrade() -> None:
    process = await started()
    await set_version(process, NEXT)
    process.clock.turn(timedelta(seconds=NOTICE_SECONDS - 1))
    await process.store.format.check()

    process.clock.turn(timedelta(seconds=1))
    with pytest.raises(FormatUnsupportedError) as caught:
        await process.store.format.check()

    assert UNKNOWN == str(caught.value)
    with pytest.raises(FormatUnsupportedError):
        await process.store.format.upgrade(0, is_preview=False)


async def test_a_running_process_does_not_collect_a_store_of_an_unknown_version(
    caplog: pytest.LogCaptureFixture,
) -> None:
    process = await started()
    await set_version(process, NEXT)
    process.clock.turn(timedelta(seconds=NOTICE_SECONDS))
    asked = set()

    def note(call: Call) -> Fault:
        asked.add(call.path)
        return Fault.NONE

    process.bucket.calls.follow(note)
    async with collecting(process.store, timedelta(milliseconds=1)):
        while UNKNOWN not in caplog.text:  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0.01)

    assert {layout.STORE} == asked


async def test_a_store_whose_record_is_gone_is_not_changed() -> None:
    process = await started()
    await process.bucket.delete(layout.STORE)
    process.clock.turn(timedelta(seconds=NOTICE_SECONDS))

    with pytest.raises(CorruptDataError, match=r"store\.binpb is missing"):
        await process.store.format.check()


async def test_concurrent_raises_are_one_raise() -> None:
    process = await started()
    await set_version(process, 1)
    others = []
    for _ in range(4):
        record, _stored = await read_store(process.bucket)
        others.append(StoreFormat(process.bucket, record, clock=process.clock))

    found = await asyncio.gather(*(o.upgrade(0, is_preview=False) for o in others))

    assert [(1, 2), (2, 2), (2, 2), (2, 2)] == sorted(found)
    for other in others:
        await other.check()
