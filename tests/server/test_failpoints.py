"""A server that fails at any failpoint: stored data stay, an operation is done whole or
not at all, and may be retried.

The tests iterate over the registry, so a new failpoint is tested from the start; a
failpoint that no operation here reaches fails them.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

import storesvc_client as store
from storesvc import failpoints
from storesvc.errors import InvalidFieldError
from storesvc.failpoints import Action, Failpoint, Fault
from storesvc.server.embedded import EmbeddedServer
from storesvc_proto.v1 import checkpoint_service_pb2 as checkpoints
from storesvc_proto.v1 import maintenance_service_pb2 as maintenance
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from storesvc_proto.v1.maintenance_service_pb2_grpc import MaintenanceServiceStub
from tests.support.contract import Writer, elements, frame
from tests.support.examples import sampled, soaked
from tests.support.server_process import EndedError, ServerProcess

RUN = "tests/points"
PARENT = "namespaces/tests/runs/points"
WHOLE = elements(0) + elements(1) + elements(2)
KEPT, DELETED, PURGED, SAVED, ABORTED, FORGOTTEN, COLLECTED = range(7)
"""Steps, by the operations on them below. KEPT and DELETED are committed before, PURGED
is deleted, COLLECTED is purged, and FORGOTTEN was aborted a day ago."""


@dataclass
class Caller:
    """Sends the operations to a server, and retries."""

    address: str

    def save(self) -> None:
        """Saves a step."""
        Writer(self.address, RUN, SAVED).save()

    def abort(self, step: int = ABORTED) -> None:
        """Aborts an upload that has stored chunks."""
        writer = Writer(self.address, RUN, step)
        writer.begin()
        writer.write(frame(0, 1))
        writer.abort()

    def delete(self) -> None:
        """Deletes a checkpoint."""
        request = checkpoints.DeleteCheckpointRequest(
            name=f"{PARENT}/checkpoints/{DELETED}", request_id=new_id()
        )
        self._checkpoints.DeleteCheckpoint(request, timeout=30)

    def purge(self) -> None:
        """Purges a deleted checkpoint."""
        request = checkpoints.PurgeCheckpointRequest(
            name=f"{PARENT}/checkpoints/{PURGED}"
        )
        self._checkpoints.PurgeCheckpoint(request, timeout=30)

    def collect(self) -> None:
        """Collects garbage."""
        request = maintenance.CollectGarbageRequest(parent=PARENT)
        request.grace.FromTimedelta(timedelta())
        stub = MaintenanceServiceStub(grpc.insecure_channel(self.address))
        for _ in stub.CollectGarbage(request, timeout=30):
            pass

    @property
    def _checkpoints(self) -> CheckpointServiceStub:
        return CheckpointServiceStub(grpc.insecure_channel(self.address))


def new_id() -> str:
    return Writer("unused:1", RUN, 0).request_id


OPERATIONS: dict[str, Callable[[Caller], None]] = {
    "begin": Caller.save,
    "write": Caller.save,
    "finish": Caller.save,
    "commit": Caller.save,
    "abort": Caller.abort,
    "delete": Caller.delete,
    "purge": Caller.purge,
    "collect": Caller.collect,
}
"""The call that reaches the failpoints of each prefix."""


def operation(point: Failpoint) -> Callable[[Caller], None]:
    return OPERATIONS[point.partition(".")[0]]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which each operation has work to do."""
    root = tmp_path_factory.mktemp("template") / "store"
    with embedded(root) as address:
        for step in (KEPT, DELETED, PURGED, COLLECTED):
            Writer(address, RUN, step).save()
        Caller(address).abort(FORGOTTEN)
        forget_uploads(root)
        Caller(address).abort()
    with store.connect(root.as_uri()) as client:
        client.run(RUN).delete(PURGED, purge_delay=timedelta(days=1))
        client.run(RUN).delete(COLLECTED)
        client.run(RUN).purge(COLLECTED)
    return root


def forget_uploads(root: Path) -> None:
    """Removes the records of uploads, as garbage collection does after a day: only then
    does it empty their freed slots."""
    for record in (root / "data/tests/points/uploads").glob("*.binpb"):
        record.unlink()


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Iterator[Path]:
    copy = tmp_path / "store"
    shutil.copytree(template, copy)
    yield copy
    shutil.rmtree(copy)


@contextmanager
def embedded(root: Path) -> Iterator[str]:
    """Serves a root in this process; yields the address."""
    server = EmbeddedServer(root.as_uri(), timeout=60)
    try:
        yield server.address
    finally:
        server.close()


def succeeds(call: Callable[[Caller], None], address: str) -> bool:
    """Returns whether the server responded; False: it died, or its storage failed."""
    try:
        call(Caller(address))
    except grpc.RpcError as e:
        assert isinstance(e, grpc.Call)
        assert e.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED), e
        return False
    return True


def check(root: Path, call: Callable[[Caller], None], *, acknowledged: bool) -> None:
    """Checks a store after a failure, and that a retry completes the operation."""
    with store.connect(root.as_uri()) as client:
        run = client.run(RUN)
        found = {c.step for c in run.checkpoints()}
        deleted = {c.step for c in run.checkpoints(deleted=True)}
        whole = {step for step in found if content(run, step) == WHOLE}
        assert found == whole
        assert run.latest().step == max(found)
        assert KEPT in found
        assert (DELETED in found) != (DELETED in deleted)
        assert found <= {KEPT, DELETED, SAVED}
        assert deleted <= {DELETED, PURGED}
        if acknowledged:
            assert call is not Caller.save or SAVED in found
            assert call is not Caller.delete or DELETED in deleted
            assert call is not Caller.purge or PURGED not in deleted
    with embedded(root) as address:
        if call in (Caller.save, Caller.purge):
            with suppress(grpc.RpcError):  # it is there, or purged, already
                call(Caller(address))
        else:
            call(Caller(address))
        Caller(address).collect()
        Caller(address).collect()
    with store.connect(root.as_uri()) as client:
        run = client.run(RUN)
        for step in {c.step for c in run.checkpoints()}:
            assert WHOLE == content(run, step)
            assert () == run.verify(step).damages
        (collected,) = client.collect(RUN, grace=timedelta())
        assert 0 == collected.deleted_object_count


def content(run: store.Run, step: int) -> bytes:
    ((_, array),) = run.open(step).read(["x"])
    return array.tobytes()


def in_process(
    root: Path, call: Callable[[Caller], None], faults: dict[Failpoint, Fault]
) -> bool:
    """Runs an operation with armed failpoints; returns whether it was answered."""
    failpoints.arm(faults)
    try:
        with embedded(root) as address:
            answered = succeeds(call, address)
        for point in faults:
            assert failpoints.times_reached(point), f"nothing reaches {point}"
    finally:
        failpoints.arm({})
    return answered


@pytest.mark.parametrize("point", sampled(Failpoint, every=6, checked_every=2))
def test_a_storage_that_fails_at_a_step(root: Path, point: Failpoint) -> None:
    fault = Fault(action=Action.RAISE, delay_seconds=0, time=None)
    answered = in_process(root, operation(point), {point: fault})

    check(root, operation(point), acknowledged=answered)


@pytest.mark.parametrize("prefix", sampled(OPERATIONS, every=3))
def test_a_delay_at_a_step(root: Path, prefix: str) -> None:
    """Arms all failpoints of an operation at once, as delays are alike at all."""
    points = [point for point in Failpoint if point.partition(".")[0] == prefix]
    fault = Fault(action=Action.DELAY, delay_seconds=0.01, time=None)
    call = OPERATIONS[prefix]
    assert in_process(root, call, dict.fromkeys(points, fault))

    check(root, call, acknowledged=True)


@pytest.mark.parametrize(
    "point", sampled(filter(failpoints.drops_reply, Failpoint), every=2)
)
def test_a_lost_reply(root: Path, point: Failpoint) -> None:
    fault = Fault(action=Action.DROP_REPLY, delay_seconds=0, time=1)
    assert not in_process(root, operation(point), {point: fault})

    check(root, operation(point), acknowledged=point.startswith(("delete", "purge")))


@pytest.fixture(scope="module")
def doomed(
    template: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Failpoint], ServerProcess]]:
    """Yields a server for each failpoint to be killed at. The next one starts in the
    background, as starting takes longer than the rest of a test."""
    points = [*Failpoint]
    launched: dict[Failpoint, ServerProcess] = {}

    def launch(point: Failpoint) -> None:
        directory = tmp_path_factory.mktemp("doomed")
        root = shutil.copytree(template, directory / "store")
        launched[point] = ServerProcess(root, directory)
        launched[point].environment[failpoints.VARIABLE] = f"{point}=kill"
        launched[point].launch()

    def bring(point: Failpoint) -> ServerProcess:
        if point not in launched:
            launch(point)
        with suppress(EndedError):
            launched[point].await_ready()
        for following in points[points.index(point) + 1 :][:1]:
            if following not in launched:
                launch(following)
        return launched[point]

    yield bring
    for server in launched.values():
        server.kill()


@pytest.mark.parametrize("point", soaked(Failpoint, every=3))
def test_a_server_killed_at_a_step(
    doomed: Callable[[Failpoint], ServerProcess], point: Failpoint
) -> None:
    server = doomed(point)

    assert not succeeds(operation(point), server.address)
    assert -9 == server.wait()

    check(server.root, operation(point), acknowledged=False)
    shutil.rmtree(server.root)


def test_every_prefix_has_an_operation() -> None:
    assert set(OPERATIONS) == {point.partition(".")[0] for point in Failpoint}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("nowhere=kill", "expected a point of begin.before_record, .*got 'nowhere'"),
        ("commit.before_record", "expected POINT=ACTION"),
        ("commit.before_record=explode", "expected kill, raise, delay:SECONDS or drop"),
        ("commit.before_record=delay", "expected kill, raise, delay:SECONDS"),
        ("commit.before_record=kill:3", "expected kill, raise, delay:SECONDS"),
        ("commit.before_record=kill@0", "expected POINT=ACTION"),
        ("commit.before_record=drop_reply", "nothing is answered there"),
    ],
)
def test_an_unknown_failpoint_is_rejected(text: str, what: str) -> None:
    with pytest.raises(InvalidFieldError, match=what):
        failpoints.parse(text)


def test_failpoints_are_parsed_from_text() -> None:
    text = "commit.before_record=kill, begin.before_slot=delay:0.5@2"
    kill = Fault(action=Action.KILL, delay_seconds=0, time=None)
    delay = Fault(action=Action.DELAY, delay_seconds=0.5, time=2)

    expected = {
        Failpoint.COMMIT_BEFORE_RECORD: kill,
        Failpoint.BEGIN_BEFORE_SLOT: delay,
    }
    assert expected == failpoints.parse(text)
    assert {} == failpoints.parse(" ")


@pytest.mark.parametrize("version", ["0.2.0", "1.0", "1.0rc1", "1.0.post1"])
def test_a_release_does_not_start_with_armed_failpoints(version: str) -> None:
    environment = {failpoints.VARIABLE: "commit.before_record=kill"}

    with pytest.raises(InvalidFieldError, match=f"storesvc {version} is a release"):
        failpoints.arm_from(environment, version=version)
    failpoints.arm_from({}, version=version)


@pytest.mark.parametrize("version", ["0.2.0.dev0", "0.2.0.dev3+g1234"])
def test_a_development_version_starts_with_armed_failpoints(version: str) -> None:
    environment = {failpoints.VARIABLE: "commit.before_record=kill"}
    try:
        failpoints.arm_from(environment, version=version)
    finally:
        failpoints.arm({})


@pytest.mark.slow
def test_a_server_with_an_unknown_failpoint_exits_with_one_sentence(
    tmp_path: Path,
) -> None:
    server = ServerProcess(tmp_path / "store", tmp_path)
    server.environment[failpoints.VARIABLE] = "nowhere=kill"

    with pytest.raises(EndedError, match="STORESVC_FAILPOINTS: expected a point of"):
        server.start()
    assert 1 == server.wait()
