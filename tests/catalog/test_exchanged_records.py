"""A record counts only at its place and as its kind: exchanged ones are damage."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from itertools import permutations
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

import storesvc_client as store
from storesvc.format import layout
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc.format.seal import CorruptRecordError, FormatVersionError, seal, unseal
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub
from tests.support.contract import Writer, frame, sums
from tests.support.in_process_server import InProcessServer
from tests.support.refusals import rejected
from tests.support.stored_records import sealed_of_version_1

ONE, OTHER = RunName("tests", "one"), RunName("tests", "other")
KINDS: dict[str, type] = {
    "store": pb.StoreRecord,
    "runs": pb.RunRecord,
    "journal": pb.Announcement,
    "checkpoints": pb.CheckpointRecord,
    "tags": pb.TagRecord,
    "holds": pb.HoldRecord,
    "uploads": pb.UploadRecord,
    "lease": pb.LeaseRecord,
    "writers": pb.Receipt,
    "staging": pb.Receipt,
}
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store with two records of each kind, in two runs of the same history."""
    scratch = tmp_path_factory.mktemp("prepared")
    server = InProcessServer(scratch / "store")
    with store.connect(server.address) as client:
        for name in (ONE, OTHER):
            run = client.run(str(name))
            for step in (1, 2, 3, 4):
                run.save(step, {"x": np.full(9, step)}).result()
            run.tags.set("prod", 1)
            run.tags.set("canary", 3)
            run.holds.create(1, ttl=DAY)
            run.holds.create(2, ttl=DAY)
    for name in (ONE, OTHER):
        for step in (5, 6):
            writer = Writer(server.address, str(name), step, writers=2)
            # brief, so that each call renews it: a longer one, the begin has renewed
            writer.begin(lease_duration=Duration(nanos=1_000_000))
            for number, chunk in enumerate((0, 1)):
                writer.write(frame(chunk), writer=number)
                writer.finish(sums(chunk), writer=number)
    server.close()
    yield scratch / "store"
    shutil.rmtree(scratch)


@pytest.fixture
def root(prepared: Path, tmp_path: Path) -> Path:
    shutil.copytree(prepared, tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def client(root: Path, serve: Callable[..., InProcessServer]) -> Iterator[store.Client]:
    with store.connect(serve(root).address) as client:
        yield client


def kind_of(place: str) -> str:
    """Returns the kind of record at a path; "" for no sealed record."""
    parts = place.split("/")
    kind = parts[3] if parts[0] == "data" else parts[0].removesuffix(".binpb")
    if kind == "uploads" and len(parts) > 5:
        kind = parts[5] if parts[5] == "writers" else parts[5].removesuffix(".binpb")
    return kind if kind in KINDS else ""


def sealed_places(root: Path) -> list[str]:
    places = [file.relative_to(root).as_posix() for file in root.rglob("*.binpb")]
    return sorted(place for place in places if kind_of(place))


def exchange(root: Path, one: str, other: str) -> None:
    """Exchanges the objects of two places."""
    data = (root / one).read_bytes()
    (root / one).write_bytes((root / other).read_bytes())
    (root / other).write_bytes(data)


def refused(call: Callable[[], object]) -> str:
    """Returns what the refusal of damaged data says."""
    with rejected("CORRUPT_DATA", store.DataLossError) as caught:
        call()
    return str(caught.value)


@pytest.mark.slow
def test_no_record_counts_at_the_place_of_another(prepared: Path) -> None:
    places = sealed_places(prepared)
    assert set(KINDS) == {kind_of(place) for place in places}
    data = {place: (prepared / place).read_bytes() for place in places}

    for place in places:
        unseal(data[place], KINDS[kind_of(place)], place=place)
    for place, other in permutations(places, 2):
        with pytest.raises(CorruptRecordError) as caught:
            unseal(data[other], KINDS[kind_of(place)], place=place)
        assert str(caught.value).endswith(f" of {other}")


def test_no_record_counts_as_another_kind() -> None:
    kinds = {*KINDS.values(), pb.CollectorRecord}
    for kind, other in permutations(kinds, 2):
        with pytest.raises(CorruptRecordError, match=r"expected the .* of this path"):
            unseal(seal(other(), place="p"), kind, place="p")


def test_damage_is_reported_before_another_version_and_before_another_path() -> None:
    data = pb.Sealed.FromString(seal(pb.TagRecord(step=1), place="p", nonce=b"n"))
    data.payload = data.payload[:-1]
    with pytest.raises(CorruptRecordError, match="its checksum does not match"):
        unseal(data.SerializeToString(), pb.TagRecord, place="q")
    data.format_version = 3
    with pytest.raises(CorruptRecordError, match="its checksum does not match"):
        unseal(data.SerializeToString(), pb.TagRecord, place="p")


def test_a_later_version_is_rejected_as_such(root: Path) -> None:
    # Computed as in all versions, whatever the payload is then.
    data = pb.Sealed(format_version=3, crc32c=0x201617C7, payload=b"later")
    assert data.crc32c == pb.Sealed.FromString(data.SerializeToString()).crc32c
    with pytest.raises(FormatVersionError, match="expected format version 1 to 2, got"):
        unseal(data.SerializeToString(), pb.TagRecord, place="p")

    (root / layout.STORE).write_bytes(data.SerializeToString())
    with rejected(
        "FORMAT_UNSUPPORTED", store.PreconditionError, match="use a newer release"
    ):
        store.connect(root.as_uri())


def test_a_record_of_version_1_is_valid_at_any_path() -> None:
    record = pb.TagRecord(step=7)
    data = sealed_of_version_1(record.SerializeToString(deterministic=True))
    assert record == unseal(data, pb.TagRecord, place="anywhere")


def test_exchanged_tags_name_nothing(root: Path, client: store.Client) -> None:
    places, run = RunPaths(ONE), client.run(str(ONE))
    exchange(root, places.tag("prod"), places.tag("canary"))

    for tag, other in permutations(("prod", "canary")):
        reported = refused(lambda tag=tag: run.restore(tag))  # type: ignore[misc]
        assert (
            f"the record of tag {ONE}@{tag} is damaged ({places.tag(tag)}: expected "
            "the tag record of this path, got the tag record of "
            f"{places.tag(other)}); "
            "restore this object from a copy, or remove it to abandon tag "
            f"{ONE}@{tag}" == reported
        )
    damaged: list[store.DataLossError] = []
    assert [] == list(run.tags.list(on_damage=damaged.append))
    assert 2 == len(damaged)
    refused(lambda: run.delete(4))  # it may be what a tag names

    exchange(root, places.tag("prod"), places.tag("canary"))
    assert 1 == run.restore("prod")["x"][0]


def test_exchanged_runs_lose_nothing_by_the_policy_of_the_other(
    root: Path, client: store.Client
) -> None:
    client.run(str(OTHER)).retention.set(store.KeepLatest(1), purge_delay=timedelta(0))
    exchange(root, layout.run_record(ONE), layout.run_record(OTHER))

    for _ in range(2):
        for made in client.collect(grace=timedelta(0)):
            assert "run record of this path, got the run record of" in made.postponed
            assert (0, 0) == (made.deleted_checkpoint_count, made.deleted_object_count)
    for name in (ONE, OTHER):
        steps = [checkpoint.step for checkpoint in client.run(str(name)).checkpoints()]
        assert [4, 3, 2, 1] == steps


def test_the_record_of_a_checkpoint_of_another_run_or_step_is_damage(
    root: Path, client: store.Client
) -> None:
    place, run = RunPaths(ONE).checkpoint(4), client.run(str(ONE))
    whole = (root / place).read_bytes()
    for other in (RunPaths(OTHER).checkpoint(4), RunPaths(ONE).checkpoint(2)):
        shutil.copyfile(root / other, root / place)
        for call in (run.latest, lambda: run.checkpoint(4), lambda: run.restore(4)):
            reported = refused(call)
            assert f"the record of {ONE}@4 is damaged ({place}: " in reported
            assert f"got the checkpoint record of {other})" in reported
        (made,) = client.collect(str(ONE), grace=timedelta(0))
        assert f"the record of {ONE}@4 is damaged" in made.postponed
        (root / place).write_bytes(whole)
    assert 4 == run.restore("latest")["x"][0]


def test_exchanged_holds_are_damage_and_still_keep_all(
    root: Path, client: store.Client
) -> None:
    run = client.run(str(ONE))
    holds = [hold.id for hold in run.holds.list()]
    exchange(root, *(RunPaths(ONE).hold(hold) for hold in holds))

    damaged: list[store.DataLossError] = []
    assert [] == list(run.holds.list(on_damage=damaged.append))
    assert all("got the hold record of" in str(error) for error in damaged)
    run.delete(4)
    assert "hold record" in refused(lambda: run.purge(4))


def test_exchanged_records_of_uploads_commit_nothing(
    root: Path, serve: Callable[..., InProcessServer]
) -> None:
    address = serve(root).address
    writers = [Writer(address, str(ONE), step, writers=2) for step in (7, 8)]
    for writer in writers:
        writer.begin()
        for number, chunks in enumerate(((0, 1), (2,))):
            writer.write(frame(*chunks), writer=number)
            writer.finish(sums(*chunks), writer=number)
    places = RunPaths(ONE)
    one, other = (writer.name.rpartition("/")[2] for writer in writers)

    for place, second in (
        (places.upload(one), places.upload(other)),
        (places.receipt(one, 0), places.receipt(other, 0)),
        (places.receipt(one, 0), places.receipt(one, 1)),
        (places.checkpoint(7), places.checkpoint(8)),
    ):
        exchange(root, place, second)
        # a server keeps the records of the uploads that it has read
        other_server = grpc.insecure_channel(serve(root).address)
        for writer in writers:
            writer.stub = UploadServiceStub(other_server)
            with pytest.raises(grpc.RpcError) as caught:
                writer.commit()
            assert grpc.StatusCode.DATA_LOSS == caught.value.code()
            if second == places.receipt(one, 1):
                break  # the other upload is whole
        exchange(root, place, second)
    with store.connect(address) as client:
        assert [4, 3, 2, 1] == [c.step for c in client.run(str(ONE)).checkpoints()]
        for writer in writers:
            writer.commit()
        assert [8, 7] == [c.step for c in client.run(str(ONE)).checkpoints()][:2]


def test_exchanged_announcements_are_damage_and_the_watch_continues_after_them(
    root: Path, client: store.Client
) -> None:
    run = client.run(str(ONE))
    with closing(run.watch()) as events:
        run.tags.set("prod", 2)
        token = next(events).resume_token
        for step in (3, 4, 1):
            run.tags.set("prod", step)
    numbers = sorted((root / layout.journal("tests")).iterdir())[-3:]
    exchange(root, *(n.relative_to(root).as_posix() for n in numbers[:2]))

    for number in numbers[:2]:
        with (
            closing(run.watch(token)) as events,
            pytest.raises(store.DataLossError, match=number.name) as caught,
        ):
            next(events)
        token = caught.value.metadata["resume_token"]
    with closing(run.watch(token)) as events:
        assert ("tagged", 1) == ((event := next(events)).kind, event.step)


def test_a_store_whose_record_is_another_kind_is_rejected(root: Path) -> None:
    shutil.copyfile(root / layout.run_record(ONE), root / layout.STORE)
    with pytest.raises(store.DataLossError, match="expected the store record of this"):
        store.connect(root.as_uri())


def test_a_store_that_was_copied_as_a_whole_is_whole(
    root: Path, tmp_path: Path
) -> None:
    shutil.copytree(root, tmp_path / "elsewhere" / "deeper")
    with store.connect((tmp_path / "elsewhere" / "deeper").as_uri()) as client:
        for name in (ONE, OTHER):
            assert 3 == client.run(str(name)).restore("canary")["x"][0]
            assert client.run(str(name)).verify("latest").ok
