"""Tags: names that move, and what they keep."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import storesvc_client as store
from storesvc.catalog.catalog import sound
from storesvc.catalog.slots import CHECKPOINTS
from storesvc.errors import CheckpointNotFoundError, StoreError
from storesvc.format.layout import RunPaths
from storesvc.format.names import CheckpointName, RunName, TagName
from storesvc.rpc.paging import page_token
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from tests.support.examples import examples
from tests.support.interleaving import (
    RUN,
    Process,
    freed_uid,
    new_id,
    put_record,
    slot_of,
    together,
    world_of,
)
from tests.support.refusals import rejected
from tests.support.server_process import ServerProcess
from tests.support.stored_files import unchanged

SETTLED: Final = "namespaces/tests/runs/settled"
TREE = {"x": 1.0}


@pytest.fixture
def run(run: store.Run) -> store.Run:
    """A run with checkpoints at the steps 1, 2 and 3."""
    for step in (1, 2, 3):
        run.save(step, TREE)
    run.wait()
    return run


@pytest.fixture(scope="module")
def settled(server_address: str) -> Iterator[store.Run]:
    """A run that no test changes: 2 is deleted, 1 tagged."""
    with store.connect(server_address) as client:
        run = client.run("tests/settled")
        for step in (1, 2, 3):
            run.save(step, TREE)
        run.wait()
        run.delete(2)
        run.tags.set("best", 1)
        run.tags.set("protected", 1, protected=True)
        yield run


def test_a_tag_stands_for_a_step_wherever_one_does(run: store.Run) -> None:
    tag = run.tags.set("best", 2)

    assert ("best", 2, run.checkpoint(2).uid) == (tag.name, tag.step, tag.uid)
    assert run.checkpoint(2) == run.checkpoint("best")
    assert TREE == run.restore("best")
    assert 2 == run.open("best").info.step
    assert [tag] == list(run.tags.list())
    assert 2 == run.update("best", labels={"a": "b"}).step


def test_a_tag_moves_to_a_step_the_latest_or_another_tag(run: store.Run) -> None:
    first = run.tags.set("best", 1)
    latest = run.tags.set("best")
    other = run.tags.set("other", 2)
    moved = run.tags.set("best", "other")

    assert [1, 3, 2] == [first.step, latest.step, moved.step]
    assert other.uid == moved.uid
    assert first.create_time == moved.create_time <= moved.update_time
    assert 3 == len({first.etag, latest.etag, moved.etag})
    assert ["best", "other"] == [t.name for t in run.tags.list()]


def test_a_deleted_tag_is_gone_and_may_come_again(run: store.Run) -> None:
    first = run.tags.set("best", 1)
    run.tags.delete("best")

    assert [] == list(run.tags.list())
    for call in (run.checkpoint, run.restore, run.tags.delete):
        with rejected("TAG_NOT_FOUND", store.NotFoundError, match="no tag best"):
            call("best")
    again = run.tags.set("best", 2)
    assert again.create_time > first.create_time
    assert 2 == run.checkpoint("best").step


def test_an_unknown_tag_is_named_with_those_most_like_it(run: store.Run) -> None:
    for name in ("best-loss", "best-bleu", "release"):
        run.tags.set(name, 1)
    run.tags.set("best-los", 1)
    run.tags.delete("best-los")

    with pytest.raises(store.NotFoundError, match=r"no tag best-lost .*best-loss") as e:
        run.restore("best-lost")
    assert ["best-loss", "best-bleu"] == e.value.metadata["nearest"].split(",")


def test_what_is_tagged_is_not_deleted(run: store.Run) -> None:
    run.tags.set("best", 2)

    with rejected(
        "CHECKPOINT_IN_USE", store.PreconditionError, match="kept by tag best"
    ) as caught:
        run.delete(2)
    assert "tag best" == caught.value.metadata["by"]
    run.tags.set("best", 3)
    run.delete(2)


def test_a_protected_tag_changes_only_with_its_etag(run: store.Run) -> None:
    first = run.tags.set("prod", 1, protected=True)
    assert first.protected

    for call in (lambda: run.tags.set("prod", 2), lambda: run.tags.delete("prod")):
        with rejected("TAG_PROTECTED", store.PreconditionError, match="give its etag"):
            call()
    second = run.tags.set("prod", 2, protected=True, etag=first.etag)
    with pytest.raises(store.ConflictError):
        run.tags.delete("prod", etag=first.etag)
    run.tags.delete("prod", etag=second.etag)


def test_many_tags_are_listed_by_name_page_by_page(
    run: store.Run, stub: CheckpointServiceStub
) -> None:
    names = ["a", "a-b", "a1", "b", "zz"]
    for name in reversed([*names, "gone"]):
        run.tags.set(name, 1)
    run.tags.delete("gone")
    parent = RunName.parse(run.name).resource

    listed, token = [], ""
    for _ in range(3):
        request = api.ListTagsRequest(parent=parent, page_size=2, page_token=token)
        page = stub.ListTags(request)
        listed += [tag.name.rpartition("/")[2] for tag in page.tags]
        token = page.next_page_token

    assert names == listed
    assert "" == token


@pytest.mark.parametrize(
    ("method", "fields", "reason"),
    [
        ("SetTag", {"name": "latest"}, "INVALID_FIELD"),
        ("SetTag", {"name": "1st"}, "INVALID_FIELD"),
        ("SetTag", {"name": "a/b"}, "INVALID_FIELD"),
        ("SetTag", {"name": "../best"}, "INVALID_FIELD"),
        ("SetTag", {"checkpoint": "9"}, "CHECKPOINT_NOT_FOUND"),
        ("SetTag", {"checkpoint": "2"}, "CHECKPOINT_DELETED"),
        ("SetTag", {"checkpoint": "other"}, "TAG_NOT_FOUND"),
        ("SetTag", {"checkpoint": "x" * 64}, "INVALID_FIELD"),
        ("SetTag", {"run": "tests/missing"}, "INVALID_FIELD"),
        ("SetTag", {"request_id": "1"}, "INVALID_FIELD"),
        ("SetTag", {"etag": "stale"}, "ETAG_MISMATCH"),
        ("SetTag", {"name": "new", "etag": "stale"}, "ETAG_MISMATCH"),
        ("SetTag", {"name": "protected"}, "TAG_PROTECTED"),
        ("SetTag", {"name": "protected", "etag": "stale"}, "ETAG_MISMATCH"),
        ("DeleteTag", {"name": "other"}, "TAG_NOT_FOUND"),
        ("DeleteTag", {"name": "latest"}, "INVALID_FIELD"),
        ("DeleteTag", {"etag": "stale"}, "ETAG_MISMATCH"),
        ("DeleteTag", {"name": "protected"}, "TAG_PROTECTED"),
        ("DeleteTag", {"request_id": ""}, "INVALID_FIELD"),
    ],
)
def test_a_tag_that_cannot_be_is_rejected_for_its_own_reason(
    settled: store.Run,
    stub: CheckpointServiceStub,
    server: ServerProcess,
    method: str,
    fields: dict[str, str],
    reason: str,
) -> None:
    request = getattr(api, f"{method}Request")(
        name=f"{SETTLED}/tags/{fields.get('name', 'best')}",
        request_id=fields.get("request_id", new_id()),
        etag=fields.get("etag", ""),
    )
    if method == "SetTag":
        of = RunName.parse(fields.get("run", settled.name)).resource
        request.checkpoint = f"{of}/checkpoints/{fields.get('checkpoint', '1')}"

    with unchanged(server.root), rejected(reason):
        getattr(stub, method)(request, timeout=30)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"page_size": -1}, "INVALID_FIELD"),
        ({"page_token": "!"}, "INVALID_PAGE_TOKEN"),
        ({"page_token": page_token(SETTLED, "1")}, "INVALID_PAGE_TOKEN"),
        ({"page_token": page_token(f"{SETTLED}/holds", "a")}, "INVALID_PAGE_TOKEN"),
        ({"parent": "namespaces/tests/runs/missing"}, "RUN_NOT_FOUND"),
        ({"parent": "namespaces/tests"}, "INVALID_FIELD"),
    ],
)
def test_a_list_of_tags_that_cannot_be_is_rejected(
    settled: store.Run, stub: CheckpointServiceStub, fields: dict[str, Any], reason: str
) -> None:
    with rejected(reason):
        stub.ListTags(api.ListTagsRequest(**({"parent": SETTLED} | fields)))


def test_a_tag_that_is_set_or_deleted_again_is_announced_once(
    run: store.Run, stub: CheckpointServiceStub, server: ServerProcess
) -> None:
    resource = RunName.parse(run.name).resource
    name = f"{resource}/tags/best"
    setting = api.SetTagRequest(
        name=name, checkpoint=f"{resource}/checkpoints/latest", request_id=new_id()
    )
    deleting = api.DeleteTagRequest(name=name, request_id=new_id())

    for method, request in (("SetTag", setting), ("DeleteTag", deleting)):
        first = getattr(stub, method)(request)
        with unchanged(server.root):
            assert first == getattr(stub, method)(request)


@pytest.mark.parametrize("name", ["latest", "best tag", "1st", "", "a/b", None, 1])
def test_what_is_no_tag_is_rejected_before_anything_is_asked(
    settled: store.Run, name: Any
) -> None:
    for call in (settled.tags.set, settled.tags.delete):
        with pytest.raises(store.InvalidRequestError):
            call(name)


def test_a_tag_whose_checkpoint_is_gone_says_so() -> None:
    world = world_of(0, steps=2)
    process = Process(world)
    record = pb.TagRecord(step=1, upload="f" * 32)
    put_record(world, RunPaths(RUN).tag("best"), record)

    with pytest.raises(CheckpointNotFoundError, match="points to a purged checkpoint"):
        asyncio.run(process.catalog.checkpoint(CheckpointName(RUN, "best")))


async def _tag(
    process: Process, promised: dict[str, str], tag: str, step: int | str
) -> None:
    """Sets a tag; from the answer on, until anybody sets it again, it is a promise."""
    promised.pop(tag, None)
    with suppress(StoreError):
        record = await process.tags.set(
            TagName(RUN, tag),
            CheckpointName(RUN, step),
            protected=False,
            etag="",
            write_id=new_id(),
        )
        promised[tag] = record.upload


@given(st.integers(0, 2**63), st.booleans())
@settings(max_examples=examples(150), deadline=None)
def test_what_a_tag_names_is_never_purged_whatever_the_order(
    seed: int, tag_is_set: bool
) -> None:
    world = world_of(seed, steps=3)  # the last one stays
    one, two = Process(world), Process(world, skew=timedelta(days=-30))
    promised: dict[str, str] = {}

    def watch(place: str, data: bytes) -> None:
        assert freed_uid(place, data) not in promised.values()

    world.watch = watch
    if tag_is_set:
        together(_tag(one, promised, "best", 1))
    together(
        _tag(one, promised, "best", 0),
        _tag(two, promised, "good", 0),
        one.remove(0),
        two.remove(0),
        two.remove(1),
        one.collect(),
    )

    listed = asyncio.run(one.tags.list(RUN, after="", limit=9))
    tags = {name: sound(tag) for name, tag in listed}
    for tag, uid in promised.items():
        assert uid == tags[TagName(RUN, tag)].upload
    for record in tags.values():
        slot = slot_of(world, record.step)
        assert slot.upload == record.upload
        assert slot.state in CHECKPOINTS


def test_a_tag_that_moves_stays_as_protected_as_it_was(run: store.Run) -> None:
    first = run.tags.set("keeps", 1, protected=True)
    second = run.tags.set("keeps", 2, etag=first.etag)
    third = run.tags.set("keeps", 1, protected=False, etag=second.etag)

    assert [True, True, False] == [tag.protected for tag in (first, second, third)]
    assert not run.tags.set("keeps", 2).protected
    run.tags.set("keeps", 1, protected=True)
    with pytest.raises(store.PreconditionError):
        run.tags.delete("keeps")
