"""The lifecycle of committed checkpoints: update, delete, undelete, purge."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import storesvc_client as store
from storesvc.catalog import slots as transitions
from storesvc.catalog.slots import COMMITTED, FREE, PURGING, purging
from storesvc.errors import CheckpointInUseError
from storesvc.failpoints import VARIABLE
from storesvc.format.layout import RunPaths
from storesvc.format.names import CheckpointName
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from tests.support.contract import Writer
from tests.support.interleaving import (
    RUN,
    START,
    Process,
    World,
    new_id,
    put_record,
    put_state,
    slot_of,
    uid_of,
    world_of,
)
from tests.support.refusals import rejected
from tests.support.server_process import ServerProcess
from tests.support.small_disk import small_disk
from tests.support.stored_files import unchanged

TREE = {"x": np.arange(12.0), "y": 3}
AT_ONCE = timedelta()


@pytest.fixture
def run(run: store.Run) -> store.Run:
    """A run with checkpoints at the steps 1, 2 and 3."""
    for step in (1, 2, 3):
        run.save(step, TREE, labels={"a": "b"}, metrics={"loss": 1.0 / step})
    run.wait()
    return run


@pytest.fixture(scope="module")
def settled(server_address: str) -> Iterator[store.Run]:
    """A run that no test changes: 2 is deleted, 3 pinned."""
    with store.connect(server_address) as client:
        run = client.run("tests/settled")
        for step in (1, 2, 3):
            run.save(step, TREE)
        run.wait()
        run.delete(2)
        run.update(3, pinned=True)
        yield run


def test_labels_metrics_and_the_pin_are_set_each_by_itself(run: store.Run) -> None:
    before = run.checkpoint(2)

    labelled = run.update(2, labels={"kind": "milestone"})
    measured = run.update(2, metrics={"loss": 0.1, "bleu": float("inf")})
    pinned = run.update(2, pinned=True)

    assert {"kind": "milestone"} == labelled.labels == pinned.labels
    assert {"loss": 0.5} == labelled.metrics
    assert {"loss": 0.1, "bleu": float("inf")} == measured.metrics == pinned.metrics
    assert (False, True) == (measured.pinned, pinned.pinned)
    etags = [c.etag for c in (before, labelled, measured, pinned)]
    assert 4 == len(set(etags))
    assert run.checkpoint(2) == pinned
    assert {} == run.update(2, labels={}).labels
    assert not run.update("latest", pinned=False).pinned


def test_what_a_checkpoint_holds_is_the_same_after_an_update(run: store.Run) -> None:
    run.update(3, labels={"new": "label"}, pinned=True)

    np.testing.assert_array_equal(TREE["x"], run.restore(3)["x"])


def test_a_deleted_checkpoint_is_shown_only_on_request(run: store.Run) -> None:
    deleted = run.delete(3)

    assert [2, 1] == [c.step for c in run.checkpoints()]
    assert 2 == run.latest().step
    assert [deleted] == list(run.checkpoints(deleted=True))
    for call in (run.checkpoint, run.restore, run.open, run.holds.create):
        with rejected(
            "CHECKPOINT_DELETED", store.NotFoundError, match=r"@3 was deleted; undelete"
        ):
            call(3)


def test_a_deleted_checkpoint_can_be_undeleted_as_it_was(run: store.Run) -> None:
    before = run.checkpoint(3)
    deleted = run.delete(3)
    assert deleted.delete_time is not None
    assert deleted.purge_time == deleted.delete_time + timedelta(days=3)
    assert deleted == run.delete(3)

    back = run.undelete(3)

    assert (None, None) == (back.delete_time, back.purge_time)
    assert (before.uid, before.metrics) == (back.uid, back.metrics)
    assert back == run.undelete(3)
    assert [3, 2, 1] == [c.step for c in run.checkpoints()]
    np.testing.assert_array_equal(TREE["x"], run.restore(3)["x"])


def test_how_long_it_can_be_undeleted_is_said_with_the_deletion(run: store.Run) -> None:
    deleted = run.delete(1, purge_delay=timedelta(hours=5))

    assert deleted.delete_time is not None
    assert deleted.purge_time == deleted.delete_time + timedelta(hours=5)


def test_a_purged_checkpoint_is_gone_and_its_step_free(run: store.Run) -> None:
    before = run.checkpoint(3)
    run.delete(3)

    run.purge(3)

    assert [] == list(run.checkpoints(deleted=True))
    for call in (run.checkpoint, run.purge, run.undelete, run.delete):
        with rejected(
            "CHECKPOINT_NOT_FOUND", store.NotFoundError, match="@3 does not exist"
        ):
            call(3)
    again = run.save(3, {"other": 1.0}).result()
    assert before.uid != again.uid
    assert {"other": 1.0} == run.restore(3)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["purge.before_reply", "delete.before_reply"])
def test_a_change_whose_answer_was_lost_is_asked_for_again_and_done(
    start_server: Callable[..., ServerProcess], point: str
) -> None:
    server = start_server()
    with store.connect(server.address) as client:
        run = client.run("tests/lost")
        for step in (1, 2):
            run.save(step, TREE).result()
        server.kill()
        server.environment[VARIABLE] = f"{point}=drop_reply@1"
        server.start()

        run.delete(1)
        run.purge(1)

        assert [2] == [checkpoint.step for checkpoint in run.checkpoints()]
        assert [] == list(run.checkpoints(deleted=True))
        with pytest.raises(store.NotFoundError):
            run.purge(1)


def test_a_step_is_not_saved_again_before_it_is_purged(run: store.Run) -> None:
    run.delete(3)

    with pytest.raises(store.AlreadyExistsError, match="purge"):
        run.save(3, TREE).result()
    run.undelete(3)


def test_a_run_whose_checkpoints_are_all_deleted_is_not_listed(
    run: store.Run, client: store.Client
) -> None:
    for step in (1, 2, 3):
        run.delete(step)

    assert run.name not in [r.name for r in client.runs()]
    assert [] == list(run.checkpoints())
    assert [3, 2, 1] == [c.step for c in run.checkpoints(deleted=True)]
    run.undelete(2)
    assert 2 == run.latest().step


def test_an_opened_checkpoint_is_read_until_it_is_purged_though_it_was_deleted(
    run: store.Run,
) -> None:
    opened = run.open(3)
    run.delete(3)

    np.testing.assert_array_equal(TREE["x"], opened.restore()["x"])
    assert ["y"] == [leaf.key for leaf, _ in opened.read(["y"])]
    assert [] == list(run.holds.list())


def test_an_opened_checkpoint_that_is_purged_fails_before_the_first_byte(
    run: store.Run,
) -> None:
    opened = run.open(3)
    run.delete(3)
    run.purge(3)

    with pytest.raises(store.NotFoundError, match="does not exist"):
        opened.restore()
    run.save(3, TREE).result()
    with pytest.raises(store.NotFoundError, match="was replaced"):
        opened.restore()


def test_what_is_meant_by_its_uid_is_not_taken_for_another_at_its_step(
    run: store.Run,
) -> None:
    first = run.checkpoint(3)
    run.delete(3, uid=first.uid)
    run.undelete(3, uid=first.uid)
    run.delete(3, uid=first.uid)
    run.purge(3, uid=first.uid)
    second = run.save(3, TREE).result()

    with rejected("CHECKPOINT_NOT_FOUND", store.NotFoundError, match="was replaced"):
        run.delete(3, uid=first.uid)
    deleted = run.delete(3, uid=second.uid)
    for call in (run.undelete, run.purge):
        with rejected(
            "CHECKPOINT_NOT_FOUND", store.NotFoundError, match="was replaced"
        ):
            call(3, uid=first.uid)
    assert [deleted] == list(run.checkpoints(deleted=True))


def test_what_is_being_read_is_not_purged(run: store.Run) -> None:
    reading = run.open(3).read(["x", "y"])
    next(reading)
    run.delete(3)

    with rejected(
        "CHECKPOINT_IN_USE", store.PreconditionError, match="kept by hold"
    ) as caught:
        run.purge(3)
    assert caught.value.metadata["by"].startswith("hold ")
    assert ["y"] == [leaf.key for leaf, _ in reading]
    run.purge(3)


def test_reads_and_restores_leave_no_hold_behind(run: store.Run) -> None:
    run.restore(2)
    dict(run.open(2).read(["x"]))
    broken = run.open(2).read(["x", "y"])
    next(broken)
    broken.close()
    with pytest.raises(store.NotFoundError):
        run.restore(2, select="nothing/**")

    assert [] == list(run.holds.list())


def test_a_full_storage_can_be_restored_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        small_disk(tmp_path / "disk", size_bytes=2 << 20) as disk,
        store.connect((disk / "store").as_uri()) as client,
    ):
        run = client.run("tests/full")
        run.save(1, TREE).result()
        ballast = (disk / "ballast").open("wb", buffering=0)
        with ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(4096))

        restored = run.restore(1)

    np.testing.assert_array_equal(TREE["x"], restored["x"])
    assert "read without a hold" in caplog.text


@pytest.mark.parametrize(
    ("method", "request_", "reason"),
    [
        ("UpdateCheckpoint", {"update_mask": []}, "INVALID_FIELD"),
        ("UpdateCheckpoint", {"update_mask": ["step"]}, "INVALID_FIELD"),
        ("UpdateCheckpoint", {"update_mask": ["pinned", ""]}, "INVALID_FIELD"),
        ("UpdateCheckpoint", {"etag": '"stale"'}, "ETAG_MISMATCH"),
        ("UpdateCheckpoint", {"request_id": "1"}, "INVALID_FIELD"),
        ("UpdateCheckpoint", {"labels": {"": "x"}}, "INVALID_FIELD"),
        ("UpdateCheckpoint", {"metrics": {"m" * 257: 1}}, "INVALID_FIELD"),
        ("UpdateCheckpoint", {"name": "9"}, "CHECKPOINT_NOT_FOUND"),
        ("UpdateCheckpoint", {"name": "best"}, "INVALID_FIELD"),
        ("UpdateCheckpoint", {"name": "latest"}, "INVALID_FIELD"),
        ("UpdateCheckpoint", {"name": "2"}, "CHECKPOINT_DELETED"),
        ("DeleteCheckpoint", {"name": "latest"}, "INVALID_FIELD"),
        ("DeleteCheckpoint", {"name": "best"}, "INVALID_FIELD"),
        ("DeleteCheckpoint", {"etag": '"stale"'}, "ETAG_MISMATCH"),
        ("DeleteCheckpoint", {"request_id": ""}, "INVALID_FIELD"),
        ("DeleteCheckpoint", {"purge_delay": -1}, "INVALID_FIELD"),
        ("DeleteCheckpoint", {"purge_delay": 365 * 86400 + 1}, "INVALID_FIELD"),
        ("DeleteCheckpoint", {"name": "9"}, "CHECKPOINT_NOT_FOUND"),
        ("DeleteCheckpoint", {"name": "3"}, "CHECKPOINT_IN_USE"),
        ("DeleteCheckpoint", {"name": "2", "etag": '"stale"'}, "ETAG_MISMATCH"),
        ("UndeleteCheckpoint", {"name": "latest"}, "INVALID_FIELD"),
        ("UndeleteCheckpoint", {"name": "9"}, "CHECKPOINT_NOT_FOUND"),
        ("UndeleteCheckpoint", {"request_id": "x"}, "INVALID_FIELD"),
        ("PurgeCheckpoint", {"name": "latest"}, "INVALID_FIELD"),
        ("PurgeCheckpoint", {"name": "1"}, "CHECKPOINT_NOT_DELETED"),
        ("PurgeCheckpoint", {"name": "2", "etag": '"stale"'}, "ETAG_MISMATCH"),
        ("PurgeCheckpoint", {"name": "9"}, "CHECKPOINT_NOT_FOUND"),
    ],
)
def test_a_change_that_cannot_be_is_rejected_for_its_own_reason(
    settled: store.Run,
    stub: CheckpointServiceStub,
    server: ServerProcess,
    method: str,
    request_: dict[str, Any],
    reason: str,
) -> None:
    request = request_of(method, settled.name, request_)

    with unchanged(server.root), rejected(reason):
        getattr(stub, method)(request, timeout=30)


def request_of(method: str, run: str, given: dict[str, Any]) -> Any:
    """A request of a method with fields that differ from the fields of a valid one."""
    request = getattr(api, f"{method}Request")()
    namespace, _, name = run.partition("/")
    step = given.get("name", "1")
    resource = f"namespaces/{namespace}/runs/{name}/checkpoints/{step}"
    if "etag" in given:
        request.etag = given["etag"]
    if hasattr(request, "request_id"):
        request.request_id = given.get("request_id", new_id())
    if method != "UpdateCheckpoint":
        request.name = resource
        if "purge_delay" in given:
            request.purge_delay.seconds = given["purge_delay"]
        return request
    request.checkpoint.name = resource
    request.checkpoint.labels.update(given.get("labels", {}))
    request.checkpoint.metrics.update(given.get("metrics", {}))
    request.update_mask.paths.extend(given.get("update_mask", ["labels", "metrics"]))
    return request


def test_an_etag_fits_until_the_next_change(run: store.Run) -> None:
    read = run.checkpoint(2)
    run.update(2, pinned=True, etag=read.etag)

    with rejected("ETAG_MISMATCH", store.ConflictError, match="read it again"):
        run.update(2, pinned=False, etag=read.etag)
    with pytest.raises(store.ConflictError, match="read it again"):
        run.delete(2, etag=read.etag)
    now = run.update(2, pinned=False)
    deleted = run.delete(2, etag=now.etag)
    with pytest.raises(store.ConflictError):
        run.purge(2, etag=now.etag)
    run.purge(2, etag=deleted.etag)


def test_a_change_that_is_asked_for_again_is_not_made_again(
    run: store.Run, stub: CheckpointServiceStub, server: ServerProcess
) -> None:
    etag = run.checkpoint(1).etag
    requests = [
        ("UpdateCheckpoint", request_of("UpdateCheckpoint", run.name, {"etag": etag})),
        ("DeleteCheckpoint", request_of("DeleteCheckpoint", run.name, {})),
        ("UndeleteCheckpoint", request_of("UndeleteCheckpoint", run.name, {})),
    ]

    for method, request in requests:
        first = getattr(stub, method)(request, timeout=30)
        with unchanged(server.root):
            assert first == getattr(stub, method)(request, timeout=30)


def test_a_deletion_that_is_asked_for_again_with_its_etag_answers_as_before(
    run: store.Run, stub: CheckpointServiceStub
) -> None:
    etag = run.checkpoint(1).etag
    request = request_of("DeleteCheckpoint", run.name, {"etag": etag})

    assert stub.DeleteCheckpoint(request) == stub.DeleteCheckpoint(request)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "expected"),
        ({"labels": {"a": 1}}, "labels=: expected a text"),
        ({"labels": "a"}, "labels=: expected a mapping"),
        ({"labels": dict.fromkeys(map(str, range(65)), "")}, "labels=: .*got 65"),
        ({"metrics": {"a": "b"}}, "metrics=: expected a number"),
        ({"metrics": {"": 1.0}}, "metrics=: expected texts"),
        ({"pinned": "yes"}, "pinned=: expected a bool"),
        ({"pinned": 1}, "pinned=: expected a bool"),
    ],
)
def test_an_update_that_says_nothing_sensible_is_rejected(
    settled: store.Run, arguments: dict[str, Any], match: str
) -> None:
    with pytest.raises(store.InvalidRequestError, match=match):
        settled.update(1, **arguments)


@pytest.mark.parametrize("text", [5, 0, b"x", ["x"], "\ud800"], ids=ascii)
def test_what_is_no_text_is_rejected_before_anything_is_asked(
    settled: store.Run, server: ServerProcess, text: Any
) -> None:
    calls: list[Callable[[], object]] = [
        lambda: settled.update(1, pinned=True, etag=text),
        lambda: settled.delete(1, etag=text),
        lambda: settled.delete(1, uid=text),
        lambda: settled.undelete(2, uid=text),
        lambda: settled.purge(2, uid=text),
        lambda: settled.purge(2, etag=text),
        lambda: settled.tags.set("best", 1, etag=text),
        lambda: settled.tags.delete("best", etag=text),
        lambda: settled.holds.create(1, owner=text),
        lambda: settled.retention.set(None, etag=text),
        lambda: settled.configure(labels={}, etag=text),
    ]
    with unchanged(server.root):
        for call in calls:
            with pytest.raises(
                store.InvalidRequestError, match=r"=.*: expected a text"
            ):
                call()


def test_a_tag_is_protected_or_not(settled: store.Run) -> None:
    protected: Any = "yes"

    with pytest.raises(store.InvalidRequestError, match="protected=: expected a bool"):
        settled.tags.set("best", 1, protected=protected)


def test_an_update_takes_every_kind_of_number(run: store.Run) -> None:
    updated = run.update(
        1, metrics={"loss": cast("float", np.float32(0.5)), "count": 3}
    )

    assert {"loss": 0.5, "count": 3.0} == updated.metrics


@pytest.mark.parametrize("step", ["latest", "best", -1, True, None, 1.5])
def test_only_a_step_is_deleted_undeleted_or_purged(
    settled: store.Run, step: Any
) -> None:
    for call in (settled.delete, settled.undelete, settled.purge):
        with pytest.raises(store.InvalidRequestError):
            call(step)


def test_the_base_of_a_live_upload_is_not_purged(
    run: store.Run, server_address: str
) -> None:
    writer = Writer(server_address, run.name, 9)
    base = f"{writer._parent}/checkpoints/3"
    writer.begin(base=base)
    run.delete(3)

    with pytest.raises(store.PreconditionError, match="kept by upload") as caught:
        run.purge(3)
    assert caught.value.metadata["by"] == f"upload {writer.name.rpartition('/')[2]}"
    writer.abort()
    run.purge(3)


def test_a_purge_that_was_cut_off_is_finished_by_the_next() -> None:
    world = world_of(0, steps=2)
    process = Process(world)
    _delete(process, 0)
    _cut_off(world)

    asyncio.run(process.lifecycle.purge(RUN, 0, etag=""))

    assert FREE == slot_of(world, 0).state


def test_a_purge_that_was_cut_off_is_finished_by_the_collector() -> None:
    world = world_of(0, steps=3)
    process = Process(world)
    for step in (0, 1):
        _delete(process, step, purge_delay=timedelta(days=1))
    _cut_off(world)

    slots = asyncio.run(
        process.catalog.checkpoints(RUN, before=None, limit=9, show_deleted=True)
    )
    purged = asyncio.run(process.lifecycle.purge_due(RUN, slots))

    assert [0] == [slot.step for slot in purged]  # the other's time has not come
    world.seconds += 86400 - 600
    assert [] == asyncio.run(process.lifecycle.purge_due(RUN, slots))
    world.seconds += 1200
    purged = asyncio.run(process.lifecycle.purge_due(RUN, slots))
    assert [1] == [slot.step for slot in purged]


def test_what_is_used_is_spared_by_the_collector_and_can_be_undeleted() -> None:
    world = world_of(1, steps=1)
    process = Process(world)
    _delete(process, 0)
    _cut_off(world)
    _tag_without_a_look(world)

    with pytest.raises(CheckpointInUseError, match="tag best"):
        asyncio.run(process.lifecycle.purge(RUN, 0, etag=""))
    _cut_off(world)
    slots = [slot_of(world, 0)]
    assert [] == asyncio.run(process.lifecycle.purge_due(RUN, slots))

    asyncio.run(process.lifecycle.undelete(RUN, 0, write_id=new_id()))
    name = CheckpointName(RUN, "best")
    assert 0 == asyncio.run(process.catalog.checkpoint(name)).step


def test_what_is_used_is_not_touched_by_the_collector() -> None:
    world = world_of(0, steps=3)
    process = Process(world)
    for step in (0, 1):
        _delete(process, step)
    _tag_without_a_look(world)
    before = slot_of(world, 0)
    changed: list[str] = []
    world.watch = lambda place, data: changed.append(place)

    purged = asyncio.run(
        process.lifecycle.purge_due(RUN, [slot_of(world, step) for step in range(3)])
    )

    assert [1] == [slot.step for slot in purged]
    assert before == slot_of(world, 0)
    assert {RunPaths(RUN).checkpoint(1)} == set(changed)


def _delete(
    process: Process, step: int, *, purge_delay: timedelta = timedelta()
) -> None:
    deleting = process.lifecycle.delete(
        RUN, step, purge_delay=purge_delay, etag="", write_id=new_id()
    )
    asyncio.run(deleting)


def _cut_off(world: World) -> None:
    """Leaves step 0 as a purge leaves it whose process died."""
    put_state(world, 0, PURGING)


def _tag_without_a_look(world: World) -> None:
    """Leaves what a tag is whose setting was overtaken by a deletion."""
    record = pb.TagRecord(step=0, upload=uid_of(0))
    put_record(world, RunPaths(RUN).tag("best"), record)


labels = st.dictionaries(st.text(min_size=1), st.text(), max_size=3)


@given(labels, st.booleans(), st.timedeltas(timedelta(0), timedelta(days=365)))
def test_whatever_happens_to_a_slot_what_it_holds_stays(
    texts: dict[str, str], pinned: bool, delay: timedelta
) -> None:
    slot = pb.CheckpointRecord(
        state=COMMITTED, step=3, upload=uid_of(3), epoch=7, manifest_digest=b"digest"
    )
    before = slot.SerializeToString()
    change = transitions.Change(labels=texts, pinned=False)

    updated = transitions.update_slot(RUN, slot, change, etag="", write_id="1")
    deleted = transitions.delete_slot(
        RUN,
        updated,
        tagged={},
        when=START,
        purge_time=START + delay,
        etag="",
        write_id="2",
    )
    marked = purging(RUN, deleted, etag="")

    assert before == slot.SerializeToString()
    assert deleted == transitions.spare_slot(marked)
    assert not transitions.is_due(updated, START + delay)
    assert transitions.is_due(deleted, START + delay)
    assert transitions.is_due(marked, START - timedelta(days=999))
    back = transitions.undelete_slot(RUN, deleted, write_id="1")
    assert updated == back
    freed = transitions.free_slot(marked, when=START)
    assert (FREE, 3, 7) == (freed.state, freed.step, freed.epoch)
    assert pinned == _is_refused(slot, pinned=pinned)


def _is_refused(slot: pb.CheckpointRecord, *, pinned: bool) -> bool:
    slot.pinned = pinned
    try:
        transitions.delete_slot(
            RUN, slot, tagged={}, when=START, purge_time=START, etag="", write_id="3"
        )
    except CheckpointInUseError:
        return True
    return False
