"""Several servers of one store behind one name: each accepts every call, and work that
is interrupted at one of them continues at another."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

import storesvc_client as store
from storesvc import failpoints
from storesvc.failpoints import Failpoint
from storesvc.rpc.maintenance_service import MaintenanceService
from storesvc.rpc.registry import HealthCalls, make_handler
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.store import Store
from storesvc_client import Progress
from storesvc_client._telemetry import progress as _progress
from storesvc_proto.v1 import maintenance_service_pb2 as api
from storesvc_proto.v1.maintenance_service_pb2_grpc import MaintenanceServiceStub
from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub
from tests.conftest import gcs_root
from tests.fake_gcs import FakeGcs
from tests.support.contract import Writer, elements, frame, sums
from tests.support.examples import soaked
from tests.support.server_process import ServerProcess

COUNT = 3
MIB = 1 << 20


@pytest.fixture(scope="module", params=["files", "bucket"])
def replicas(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    gcs: FakeGcs,
) -> Iterator[list[ServerProcess]]:
    """Servers of one store, which all tests share."""
    del gcs
    directory = tmp_path_factory.mktemp("replicas")
    root = directory / "store"
    uri = gcs_root() if request.param == "bucket" else root.as_uri()
    started = []
    for number in range(COUNT):
        home = directory / f"replica-{number}"
        home.mkdir()
        started.append(ServerProcess(root, home, uri=uri))
        started[-1].launch()
    for replica in started:
        replica.await_ready()
    yield started
    for replica in started:
        replica.kill()


in_a_bucket = pytest.mark.parametrize("replicas", ["bucket"], indirect=True)


def one_name(replicas: list[ServerProcess]) -> str:
    return ",".join(replica.address for replica in replicas)


def tree_of_step(step: int) -> dict[str, Any]:
    return {str(i): np.full(MIB, step * 100 + i, np.int32) for i in range(4)}


def assert_saved(run: store.Run, steps: int) -> None:
    """Checks that steps are restored as saved, and verify as undamaged."""
    assert [*range(steps)][::-1] == [c.step for c in run.checkpoints()]
    for step in range(steps):
        found = run.restore(step)
        for key, leaf in tree_of_step(step).items():
            assert np.array_equal(leaf, found[key])
        assert run.verify(step).ok


def test_replicas_continue_an_upload_that_another_began(
    replicas: list[ServerProcess],
) -> None:
    writer = Writer(replicas[0].address, "tests/pinned", 5)
    stubs = [
        UploadServiceStub(grpc.insecure_channel(replica.address))
        for replica in replicas
    ]

    begun = writer.begin()
    writer.stub = stubs[1]
    assert 2 == writer.write(frame(0), frame(1))[-1]
    assert begun.epoch == writer.get().epoch
    writer.stub = stubs[2]
    writer.write(frame(2))
    writer.keep_alive()
    writer.stub = stubs[1]
    writer.finish(sums(0, 1, 2))
    writer.stub = stubs[0]
    committed = writer.commit().checkpoint.uid

    for replica in replicas:
        writer.stub = UploadServiceStub(grpc.insecure_channel(replica.address))
        assert committed == writer.commit().checkpoint.uid
        with store.connect(replica.address) as client:
            ((_, array),) = client.run("tests/pinned").open("latest").read(["x"])
            assert b"".join(map(elements, range(3))) == array.tobytes()


@pytest.mark.slow
def test_each_save_outlasts_a_kill_of_all_replicas_but_one(
    replicas: list[ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_progress, "INTERVAL_SECONDS", 0)
    with store.connect(one_name(replicas)) as client:
        run = client.run("tests/saves")
        for step in range(COUNT):
            left = [r for r in replicas if r is not replicas[step]]

            def kill_the_next(progress: Progress, left: Any = left) -> None:
                part = progress.total_bytes * (COUNT - len(left)) / (2 * COUNT)
                if left and progress.done_bytes > part:
                    replica = left.pop()
                    replica.kill()
                    replica.launch()

            run.save(step, tree_of_step(step), progress=kill_the_next).result()
            assert [] == left
            for replica in replicas:
                replica.await_ready()
        assert_saved(run, COUNT)


POINTS = [
    point
    for point in Failpoint
    if point.startswith(("begin.", "write.", "finish.", "commit."))
]


@in_a_bucket
@pytest.mark.parametrize("point", soaked(POINTS, every=4))
def test_a_save_outlasts_replicas_that_are_killed_at_a_step_of_it(
    replicas: list[ServerProcess], point: Failpoint
) -> None:
    """Whatever was done, and never answered, is continued by the last one."""
    for replica in replicas[:2]:
        replica.kill()
        replica.environment[failpoints.VARIABLE] = f"{point}=kill"
        replica.launch()
    try:
        for replica in replicas[:2]:
            replica.await_ready()
        with store.connect(one_name(replicas)) as client:
            run = client.run(f"tests/{point.name.lower().replace('_', '-')}")
            for step in range(2):
                run.save(step, {"x": np.arange(step, 9)}).result()
            assert np.array_equal(np.arange(1, 9), run.restore(1)["x"])
    finally:
        for replica in replicas[:2]:
            replica.environment.clear()
            replica.kill()
            replica.start()


@pytest.mark.slow
@in_a_bucket
def test_a_restore_outlasts_a_kill_of_every_replica(
    replicas: list[ServerProcess],
) -> None:
    with store.connect(one_name(replicas)) as client:
        run = client.run("tests/restore")
        tree = tree_of_step(0)
        run.save(0, tree).result()
        leaves = run.open(0).read(tree)
        for replica in replicas:
            key, array = next(leaves)
            assert np.array_equal(tree[key.key], array)
            replica.kill()
            replica.launch()
        for key, array in leaves:
            assert np.array_equal(tree[key.key], array)
    for replica in replicas:
        replica.await_ready()


@pytest.mark.slow
@in_a_bucket
def test_no_call_fails_because_a_replica_is_killed(
    replicas: list[ServerProcess],
) -> None:
    with store.connect(one_name(replicas)) as client:
        run = client.run("tests/calls")
        run.save(0, {"x": 1}).result()
        watch = run.watch()

        def call_all(number: int) -> None:
            run.update(0, labels={"number": str(number)})
            assert {"number": str(number)} == dict(run.latest().labels)
            run.tags.set("best", 0)
            assert ["best"] == [tag.name for tag in run.tags.list()]
            assert [0] == [checkpoint.step for checkpoint in run.checkpoints()]
            assert "tests/calls" in [found.name for found in client.runs()]
            assert {"x"} == set(run.open("best").leaves)
            assert run.verify(0).ok
            assert not run.diff(0, "best").differences
            assert ["tests/calls"] == [c.run for c in client.collect("tests/calls")]
            assert 1 == run.usage().checkpoint_count
            with run.holds.create("best") as hold:
                assert {"x": 1} == hold.open().restore()
            run.save(number, {"x": number}).result()
            run.delete(number)
            run.undelete(number)
            run.delete(number)
            run.purge(number)

        killed = iter(replicas)
        with ThreadPoolExecutor(1) as pool:
            for number in range(1, 10):
                done = pool.submit(call_all, number)
                if number % 3 == 0:
                    replica = next(killed)
                    replica.kill()
                    replica.start()
                done.result()
        run.save(10, {"x": 10}).result()
        events = takewhile(lambda event: event.step != 10, watch)
        committed = [event.step for event in events if event.kind == "committed"]
        assert sorted(set(committed)) == committed


@pytest.mark.slow
@in_a_bucket
def test_rolling_drains_fail_no_call(replicas: list[ServerProcess]) -> None:
    with store.connect(one_name(replicas)) as client:
        run = client.run("tests/drained")
        tree = tree_of_step(0)
        run.save(0, tree).result()
        leaves = run.open(0).read(tree)
        for step, replica in enumerate(replicas, start=1):
            save = run.save(step, tree_of_step(step))
            key, array = next(leaves)
            assert np.array_equal(tree[key.key], array)
            with ThreadPoolExecutor(1) as pool:
                ended = pool.submit(replica.stop)
                while not ended.done():
                    assert step > run.latest().step - 1
            assert 0 == ended.result()
            save.result()
            replica.start()
        for key, array in leaves:
            assert np.array_equal(tree[key.key], array)
        assert_saved(run, COUNT + 1)


class Serving:
    """A server in this process, whose health a test sets."""

    def __init__(self, host: str = "127.0.0.1", port: str = "0") -> None:
        """Makes a server that does not serve yet."""
        self.address = f"{host}:{port}"
        self.uid = ""
        """UUID of its store, by which tests recognise the replica that responded."""
        self._health: HealthCalls
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._serve(),)
        )

    @property
    def port(self) -> str:
        """The port of the server."""
        return self.address.rpartition(":")[2]

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._loop.close()

    def drain(self) -> None:
        """Reports NOT_SERVING, and continues to serve."""
        self._loop.call_soon_threadsafe(self._health.drain)

    async def _serve(self) -> None:
        opened = await Store.open(await TensorStoreBucket.open("memory://"))
        self.uid, self._health = opened.uid, HealthCalls([])
        server = grpc.aio.server()
        (service,) = api.DESCRIPTOR.services_by_name.values()
        handler = make_handler(service, MaintenanceService(opened))
        server.add_generic_rpc_handlers((handler,))
        add_HealthServicer_to_server(self._health, server)
        host = self.address.rpartition(":")[0]
        self.address = f"{host}:{server.add_insecure_port(self.address)}"
        await server.start()
        self._ready.set()
        await self._ended.wait()
        await server.stop(None)


def await_answers(client: store.Client, *servers: Serving) -> None:
    """Waits until all calls go to these servers."""
    expected = {server.uid for server in servers}
    deadline = time.monotonic() + 30
    while expected != {client.info().store_uid for _ in range(20)}:
        assert time.monotonic() < deadline


@pytest.mark.slow
def test_a_replica_that_reports_not_serving_gets_no_calls() -> None:
    with Serving() as one, Serving() as other:
        address = f"{one.address},{other.address}"
        with store.connect(address) as client:
            await_answers(client, one, other)
            store.connect(address).close()  # its going must not silence the news

            one.drain()
            await_answers(client, other)

        with grpc.insecure_channel(one.address) as channel:  # which asks for no health
            request = api.GetServerInfoRequest()
            answer = MaintenanceServiceStub(channel).GetServerInfo(request)
            assert one.uid == answer.store_uid
        with pytest.raises(store.UnavailableError, match="backend unhealthy"):
            store.connect(one.address)


ASKING = """
import sys, storesvc_client as store
with store.connect(sys.argv[1], insecure=True) as client:
    print(*{client.info().store_uid for _ in range(20)})
"""


def test_one_dns_name_resolves_to_all_its_addresses(tmp_path: Path) -> None:
    with Serving("127.0.0.2") as one, Serving("127.0.0.3", one.port) as other:
        hosts = tmp_path / "hosts"
        hosts.write_text("127.0.0.2 ckpt.example\n127.0.0.3 ckpt.example\n")
        # a mount that this process alone sees
        bound = 'mount --bind "$0" /etc/hosts && exec "$@"'
        ran = subprocess.run(
            [
                *("unshare", "--map-root-user", "--mount", "sh", "-c", bound, hosts),
                *(sys.executable, "-c", ASKING, f"ckpt.example:{one.port}"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if "unshare" in ran.stderr or "mount" in ran.stderr:
            pytest.skip(f"this machine lends no mounts: {ran.stderr}")
        assert ran.stdout, ran.stderr
        assert {one.uid, other.uid} == set(ran.stdout.split())


def test_a_list_may_be_written_in_several_ways() -> None:
    with Serving() as one, Serving() as other:
        for target in (
            f"{one.address},{other.address}",
            f"localhost:{one.port},127.0.0.1:{other.port}",
            f"ipv4:{one.address},{other.address}",
            f"[::1]:{one.port},{other.address},{one.address}",
        ):
            with store.connect(target) as client:
                await_answers(client, one, other)
        with store.connect(f"dns:///{one.address}") as client:
            await_answers(client, one)


@pytest.mark.slow
def test_a_list_is_plaintext_only_if_all_addresses_are_loopback() -> None:
    with (
        Serving() as one,
        pytest.raises(store.UnavailableError, match="does not speak TLS"),
    ):
        store.connect(f"{one.address},192.0.2.1:7070")


@pytest.mark.parametrize(
    "target", ["", ",", "here:7070,", "here", "here:7070,there", "a:1,b:x", "a:1;b:2"]
)
def test_an_invalid_server_address_is_rejected(target: str) -> None:
    with pytest.raises(store.InvalidRequestError, match="expected HOST:PORT, several"):
        store.connect(target)


@pytest.mark.slow
def test_an_unresolved_name_in_a_list_is_reported() -> None:
    with pytest.raises(
        store.UnavailableError, match=r"cannot resolve nowhere\.invalid"
    ):
        store.connect("127.0.0.1:1,nowhere.invalid:7070", insecure=True)
