"""A damaged record is named, and costs only what it recorded."""

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest

import storesvc_client as store
from storesvc.format import layout
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from tests.support.command_line import storectl
from tests.support.contract import Writer
from tests.support.in_process_server import InProcessServer

T = TypeVar("T")

RUN = RunName("tests", "damaged")
PLACES = RunPaths(RUN)
OTHER = "tests/other"


@pytest.fixture
def server(serve: Callable[..., InProcessServer], tmp_path: Path) -> InProcessServer:
    return serve(tmp_path / "store")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def client(server: InProcessServer) -> Iterator[store.Client]:
    with store.connect(server.address) as client:
        for name in (str(RUN), OTHER):
            for step in range(4):
                client.run(name).save(step, tree(step)).result()
        yield client


@pytest.fixture
def run(client: store.Client) -> store.Run:
    return client.run(str(RUN))


def tree(step: int) -> dict[str, Any]:
    return {"same": np.ones(9), "step": np.full(3, step)}


def damage(root: Path, place: str) -> Path:
    """Flips a bit of an object, and returns its file."""
    file = root / place
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file


def reported(
    list_: Callable[..., Iterable[T]], *arguments: Any
) -> tuple[list[T], store.DataLossError]:
    """Returns the sound rows of a list, and the error of its damaged row."""
    errors: list[store.DataLossError] = []
    found = list(list_(*arguments, on_damage=errors.append))
    (error,) = errors
    assert "CORRUPT_DATA" == error.reason
    return found, error


@pytest.mark.slow
def test_a_list_ends_at_a_damaged_checkpoint_or_continues_if_requested(
    root: Path, run: store.Run
) -> None:
    damage(root, PLACES.checkpoint(1))

    found, error = reported(run.checkpoints)
    assert [3, 2, 0] == [checkpoint.step for checkpoint in found]
    assert "the record of tests/damaged@1 is damaged" in str(error)
    assert "restore this object from a copy, or remove it" in str(error)
    damaged = "namespaces/tests/runs/damaged/checkpoints/1"
    assert {"name": damaged} == error.metadata
    newest_first = run.checkpoints()
    assert [3, 2] == [next(newest_first).step, next(newest_first).step]
    with pytest.raises(store.DataLossError, match="tests/damaged@1 is damaged"):
        next(newest_first)
    for step in (0, 2, 3):
        assert step == run.restore(step)["step"][0]
    with pytest.raises(store.DataLossError, match="tests/damaged@1 is damaged"):
        run.restore(1)
    with pytest.raises(store.NotFoundError, match=r"nearest steps .* 0, 2, 3"):
        run.checkpoint(4)


@pytest.mark.slow
def test_a_damaged_latest_checkpoint_is_an_error_and_never_an_older_one(
    root: Path, client: store.Client, run: store.Run
) -> None:
    damage(root, PLACES.checkpoint(3))

    with pytest.raises(store.DataLossError, match="tests/damaged@3 is damaged"):
        run.restore("latest")
    with pytest.raises(store.DataLossError, match="tests/damaged@3 is damaged"):
        next(run.checkpoints())
    found, error = reported(client.runs)
    assert [OTHER] == [other.name for other in found]
    assert "tests/damaged@3 is damaged" in str(error)
    assert [] == list(run.tags.list())  # the run is there

    run.save(4, tree(4)).result()
    assert 4 == run.restore("latest")["step"][0]
    assert [str(RUN), OTHER] == [other.name for other in client.runs()]


def test_pages_join_over_damaged_rows(
    root: Path, server: InProcessServer, run: store.Run
) -> None:
    for step in (0, 1, 3):
        damage(root, PLACES.checkpoint(step))
    names: list[tuple[list[int], list[str]]] = []
    request = api.ListCheckpointsRequest(parent=RUN.resource, page_size=1)
    with grpc.insecure_channel(server.address) as channel:
        stub = CheckpointServiceStub(channel)
        while True:
            page = stub.ListCheckpoints(request)
            damaged = [record.name.rpartition("/")[2] for record in page.damaged]
            names.append(([row.step for row in page.checkpoints], damaged))
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
    assert [([], ["3"]), ([2], []), ([], ["1"]), ([], ["0"])] == names
    met: list[store.DataLossError] = []
    (whole,) = run.checkpoints(on_damage=met.append)
    assert 2 == whole.step
    assert ["3", "1", "0"] == [e.metadata["name"].rpartition("/")[2] for e in met]


def test_storectl_prints_the_sound_rows_and_fails(
    root: Path, server: InProcessServer, run: store.Run
) -> None:
    damage(root, PLACES.checkpoint(1))

    result = storectl(server.address, "ls", str(RUN))
    assert 1 == result.exit_code
    assert ["3", "2", "0"] == [
        line.split()[0] for line in result.stdout.splitlines()[1:]
    ]
    assert result.stderr.startswith("storectl: the record of tests/damaged@1 is dam")
    assert 1 == result.stderr.count("\n")

    damage(root, PLACES.checkpoint(3))
    result = storectl(server.address, "ls", str(RUN), "--limit", "1", "--json")
    assert (1, []) == (result.exit_code, json.loads(result.stdout))
    assert "the record of tests/damaged@3 is damaged" in result.stderr
    result = storectl(server.address, "ls", str(RUN), "--limit", "2")
    assert (1, "2") == (result.exit_code, result.stdout.splitlines()[1].split()[0])
    assert "there are more" in result.stderr
    damage(root, PLACES.checkpoint(3))
    result = storectl(server.address, "ls", str(RUN), "--limit", "2")
    assert (0, 3) == (result.exit_code, len(result.stdout.splitlines()))


@pytest.mark.slow
def test_a_damaged_run_is_reported_after_all_others(
    root: Path, client: store.Client, run: store.Run
) -> None:
    file = damage(root, layout.run_record(RUN))

    found, error = reported(client.runs, "tests")
    assert [OTHER] == [other.name for other in found]
    assert f"{layout.run_record(RUN)} is damaged" in str(error)
    for on_damage in ("raise", "older"):  # no checkpoint is damaged
        with pytest.raises(store.PreconditionError, match=r"without them: run\.open"):
            run.restore("latest", on_damage=on_damage)
    assert 3 == run.open("latest").restore()["step"][0]
    with pytest.raises(store.DataLossError):
        run.save(4, tree(4)).result()
    client.run(OTHER).save(4, tree(4)).result()

    file.unlink()
    run.save(4, tree(4)).result()
    assert [str(RUN), OTHER] == [other.name for other in client.runs()]
    assert [4, 3, 2, 1, 0] == [checkpoint.step for checkpoint in run.checkpoints()]


@pytest.mark.slow
def test_a_damaged_tag_is_named_wherever_it_stands_in_the_way(
    root: Path, run: store.Run
) -> None:
    run.tags.set("best", 1)
    run.tags.set("good", 2)
    file = damage(root, PLACES.tag("best"))

    found, error = reported(run.tags.list)
    assert ["good"] == [tag.name for tag in found]
    named = "the record of tag tests/damaged@best is damaged"
    assert named in str(error)
    with pytest.raises(store.DataLossError, match=named):
        run.restore("best")
    with pytest.raises(store.NotFoundError, match="nearest: good"):
        run.restore("goof")
    with pytest.raises(store.DataLossError, match=named):
        run.delete(0)  # it may be what the tag named
    assert 2 == run.restore("good")["step"][0]

    file.unlink()
    run.delete(0)
    run.tags.set("best", 1)
    assert ["best", "good"] == [tag.name for tag in run.tags.list()]


@pytest.mark.slow
def test_a_damaged_hold_can_be_ended(
    root: Path, server: InProcessServer, run: store.Run
) -> None:
    held = run.holds.create(0, ttl=timedelta(days=1))
    (listed,) = run.holds.list()
    with run.holds.create(1, ttl=timedelta(days=1)):
        damage(root, PLACES.hold(listed.id))
        run.delete(2)

        found, error = reported(run.holds.list)
        assert [1] == [hold.step for hold in found]
        named = f"the record of tests/damaged hold {listed.id} is damaged"
        assert named in str(error)
        with pytest.raises(store.DataLossError, match=named):
            run.purge(2)  # it may be what is held
        result = storectl(server.address, "hold", str(RUN), "--delete", listed.id)
        assert (0, "") == (result.exit_code, result.stderr)
        run.purge(2)
        assert [3, 1, 0] == [checkpoint.step for checkpoint in run.checkpoints()]
    held.close()


def test_a_damaged_upload_is_reported_after_all_others(
    root: Path, server: InProcessServer, run: store.Run
) -> None:
    ids = []
    for step in (7, 8):
        name = Writer(server.address, str(RUN), step).begin().name
        ids.append(name.rpartition("/")[2])
    damage(root, PLACES.upload(ids[0]))

    found, error = reported(run.uploads.list)
    assert [ids[1]] == [upload.id for upload in found]
    assert PLACES.upload(ids[0]) in str(error)


def test_a_damaged_checkpoint_postpones_the_collection_of_its_run_alone(
    root: Path, client: store.Client, run: store.Run
) -> None:
    damage(root, PLACES.checkpoint(1))
    for name in (str(RUN), OTHER):
        client.run(name).delete(0, purge_delay=timedelta(0))

    passes = {made.run: made for made in client.collect(grace=timedelta(0))}
    assert "tests/damaged@1 is damaged" in passes[str(RUN)].postponed
    assert 1 == passes[OTHER].purged_checkpoint_count
    assert not passes[OTHER].postponed


@pytest.mark.slow
def test_a_checkpoint_is_abandoned_by_removing_its_damaged_record(
    root: Path, client: store.Client, run: store.Run
) -> None:
    damage(root, PLACES.checkpoint(1)).unlink()

    assert [3, 2, 0] == [checkpoint.step for checkpoint in run.checkpoints()]
    run.save(1, tree(1)).result()
    (made,) = client.collect(str(RUN), grace=timedelta(0))
    assert made.deleted_object_count
    assert not made.postponed
    for step in range(4):
        assert step == run.restore(step)["step"][0]
        assert run.verify(step).ok
