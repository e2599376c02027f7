"""Saves and restores of a client that has lent credentials only."""

import asyncio
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import storesvc_client as store
from storesvc.auth.policy_file import Lending
from storesvc_client._restore.open_tree import get_reader
from storesvc_client._save import direct as data_files
from storesvc_client._storage import objects
from storesvc_proto.v1 import access_service_pb2 as access_api
from storesvc_proto.v1.access_service_pb2_grpc import AccessServiceStub
from tests.fake_gcs import ALWAYS, Delay, Tokens
from tests.lending.lending import CONFIG, OWN, Cloud, emulated, served
from tests.support.contract import Writer
from tests.support.jax_job import run_job

pytestmark = pytest.mark.emulated

MIB = 1 << 20
HOLD = f"namespaces/prod/runs/a/holds/{'0' * 32}"


def drawn(mib: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).random((mib, MIB // 4), np.float32)


@pytest.mark.slow
def test_what_is_saved_is_restored_bit_by_bit(cloud: Cloud) -> None:
    tree = {"x": drawn(20), "small": drawn(1)[0, :3]}
    with cloud.client() as client:
        run = client.run("prod/a")
        run.save(1, tree).result()

        back = run.restore(1)

        assert all(tree[key].tobytes() == back[key].tobytes() for key in tree)
        assert run.verify(1).ok


def test_a_save_and_a_restore_have_a_credential_each(cloud: Cloud) -> None:
    with cloud.client() as client:
        run = client.run("prod/a")
        run.save(1, {"x": drawn(20)}).result()
        run.restore(1)

    to_write, to_read = cloud.secrets
    written = [line for who, line in cloud.rights.uses if who == to_write]
    read = [line for who, line in cloud.rights.uses if who == to_read]
    assert {"PUT"} == {line.split()[0] for line in written}
    assert {"GET"} == {line.split()[0] for line in read}
    assert all("/data/prod/a/pool/" in line for line in written + read)


def test_threads_that_send_the_first_requests_share_an_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loops: dict[int, asyncio.AbstractEventLoop] = {}
    new_loop = asyncio.new_event_loop

    def slowly() -> asyncio.AbstractEventLoop:
        time.sleep(0.05)  # as long as a switch of threads may take
        return new_loop()

    monkeypatch.setattr(objects, "_loops", loops)
    monkeypatch.setattr(asyncio, "new_event_loop", slowly)

    async def request() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    with ThreadPoolExecutor(8) as pool:
        calls = pool.map(lambda _: objects.start_request(request()), range(8))
        found = [call.result() for call in calls]
    for loop in loops.values():
        loop.call_soon_threadsafe(loop.stop)
        while loop.is_running():
            time.sleep(0.001)
        loop.close()

    assert [*loops.values()] * 8 == found


def test_a_leaf_that_is_read_alone_is_read_with_a_lent_credential(cloud: Cloud) -> None:
    x = drawn(2)
    with cloud.client() as client:
        run = client.run("prod/a")
        run.save(1, {"x": x, "y": drawn(1)}).result()
        opened = run.open(1)
        cloud.rights.uses.clear()

        ((_, found),) = opened.read(["x"])

        assert x.tobytes() == found.tobytes()

    assert cloud.secrets[-1] in {who for who, _ in cloud.uses("/pool/")}
    assert OWN not in {who for who, _ in cloud.uses("/pool/")}


@pytest.mark.slow
def test_a_copy_to_another_run_lends_for_both(cloud: Cloud) -> None:
    x = drawn(2)
    with cloud.client() as client:
        client.run("prod/a").save(1, {"x": x}).result()
        before = len(cloud.secrets)

        client.run("prod/a").copy_to(client.run("prod/b"))

        assert x.tobytes() == client.run("prod/b").restore(1)["x"].tobytes()
        assert len(cloud.secrets) >= before + 2


@pytest.mark.slow
def test_credentials_of_a_short_life_are_renewed_during_a_save(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "OBJECT_THREADS", 1)
    cloud.lend_for(2.0)
    cloud.emulator.fault("PUT /bucket/.*/pool/", Delay(0.4), times=ALWAYS)
    tree = {f"{n:02}": drawn(8, seed=n) for n in range(12)}
    with cloud.client() as client:
        run = client.run("prod/a")
        run.save(1, tree).result()
        used = len(cloud.secrets)

        back = run.restore(1)

    assert all(tree[key].tobytes() == back[key].tobytes() for key in tree)
    assert used >= 3


def test_a_credential_that_ends_too_early_is_replaced(cloud: Cloud) -> None:
    with cloud.client() as client:
        run = client.run("prod/a")
        run.save(1, {"x": drawn(4)}).result()
        opened = run.open(1)
        list(opened.read(["x"]))
        end_all(cloud)

        back = opened.restore()

    assert drawn(4).tobytes() == back["x"].tobytes()
    assert 3 == len(cloud.secrets)


def end_all(cloud: Cloud) -> None:
    """Ends all credentials that were lent, without notice to their clients."""
    rights = cloud.rights
    if isinstance(rights, Tokens):
        for token in rights.lent:
            rights.end(token)
    else:
        for session in rights.sessions.values():
            session.until = 0.0


def test_a_source_without_rights_fails_the_save_with_the_reason(cloud: Cloud) -> None:
    with cloud.client() as client:
        run = client.run("prod/a")
        run.save(1, {"x": drawn(1)}).result()
        cloud.rights.freeze()

        with pytest.raises(store.PreconditionError, match="the storage denies") as e:
            run.save(2, {"x": drawn(1, seed=2)}).result()

    assert "STORAGE_DENIED" == e.value.reason


def refused_save(cloud: Cloud, match: str) -> store.StoreError:
    """Returns the error of a save for which the server lends nothing."""
    with (
        cloud.client() as client,
        pytest.raises(store.PreconditionError, match=match) as e,
    ):
        client.run("prod/a").save(1, {"x": drawn(1)}).result()
    return e.value


def test_a_server_that_does_not_lend_is_named(cloud: Cloud) -> None:
    cloud.config[0] = None

    assert "LENDING_UNSUPPORTED" == refused_save(cloud, r"\[lending\]").reason


def test_the_root_of_another_store_is_rejected(cloud: Cloud) -> None:
    other = cloud.root.replace("/store?", "/other?")
    with (
        store.connect(cloud.address, direct=other, lend_credentials=True) as client,
        pytest.raises(store.InvalidRequestError, match="lends for"),
    ):
        client.run("prod/a").save(1, {"x": drawn(1)}).result()


@pytest.mark.parametrize(
    ("target", "direct", "says"),
    [
        ("HOST", None, "expected direct="),
        ("HOST", "file:///tmp", "expected a root in a bucket"),
        ("HOST", "gs://bucket/x?driver=gcs_grpc", "expected no driver="),
        ("HOST", "s3://bucket/x?endpoint=http://minio:9000", "over plaintext"),
        ("HOST", "gs://bucket/x?endpoint=http://127.evil.example", "over plaintext"),
        ("memory://", "gs://bucket/x", "expected the address of a server"),
    ],
)
def test_options_that_contradict_lending_are_rejected(
    server_address: str, target: str, direct: str | None, says: str
) -> None:
    address = server_address if target == "HOST" else target
    with pytest.raises(store.InvalidRequestError, match=says):
        store.connect(address, direct=direct, lend_credentials=True)


CHILD = """
import sys, numpy as np, storesvc_client as store
address, root = sys.argv[1:]
x = np.arange(1 << 20)
with store.connect(address, direct=root, lend_credentials=True) as client:
    run = client.run("prod/child")
    run.save(1, {"x": x}).result()
    assert x.tobytes() == run.restore(1)["x"].tobytes()
print("restored", "tensorstore" in sys.modules)
"""


@pytest.mark.slow
def test_a_process_without_any_credentials_saves_and_restores(cloud: Cloud) -> None:
    gone = ("GOOGLE_", "AWS_", "TENSORSTORE_", "CLOUDSDK_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(gone)}
    env |= {"HOME": "/nonexistent", "JAX_PLATFORMS": "cpu", "NO_GCE_CHECK": "true"}

    child = subprocess.run(
        [sys.executable, "-c", CHILD, cloud.address, cloud.root],
        capture_output=True,
        text=True,
        env=env,
        timeout=120,
        check=False,
    )

    assert "restored" in child.stdout, child.stderr
    assert {*cloud.secrets} < {who for who, _ in cloud.uses("/pool/")}


def test_a_lifetime_bounds_when_clients_renew() -> None:
    with emulated("gs") as cloud:
        cloud.config[0] = Lending(lifetime=timedelta(minutes=5), gcs=True)
        with cloud.client() as client:
            client.run("prod/a").save(1, {"x": drawn(1)}).result()
            reader: Any = get_reader(client.run("prod/a").open(1))
            with reader.hold():
                lent = cloud.lent(hold=reader._hold_name())

    left = lent.expire_time.ToSeconds() - reader.info.create_time.timestamp()
    assert 200 < left <= 302


def test_s3_lends_for_no_less_than_its_minimum() -> None:
    with emulated("s3") as cloud:
        cloud.config[0] = Lending(
            lifetime=timedelta(minutes=5),
            s3_role_arn="arn:aws:iam::1:role/x",
            s3_sts_endpoint=cloud.emulator.url,
        )
        refused_save(cloud, "at least 15m")


def test_a_role_that_does_not_trust_the_server_is_named() -> None:
    with emulated("s3") as cloud:
        cloud.config[0] = Lending(
            s3_role_arn="arn:aws:iam::1:role/other", s3_sts_endpoint=cloud.emulator.url
        )
        refused_save(cloud, "role/other")


def test_a_token_service_that_does_not_answer_is_unavailable() -> None:
    with emulated("gs") as cloud:
        writer = Writer(cloud.address, "prod/a", 1)
        writer.begin()
        options: Any = {"gcs_sts_url": "http://127.0.0.1:9/v1/token"}
        with (
            served(cloud.root, lambda: cloud.config[0], **options) as address,
            pytest.raises(grpc.RpcError, match="token service failed") as e,
        ):
            replace(cloud, address=address).lent(upload=writer.ref())

    assert grpc.StatusCode.UNAVAILABLE == e.value.code()


def test_nothing_is_lent_for_a_store_of_files(tmp_path: Path) -> None:
    with served(tmp_path.as_uri(), lambda: CONFIG) as address:
        writer = Writer(address, "prod/a", 1)
        writer.begin()
        with grpc.insecure_channel(address) as channel:
            stub = AccessServiceStub(channel)
            request = access_api.LendCredentialsRequest(upload=writer.ref())
            with pytest.raises(grpc.RpcError, match="no credentials to lend") as e:
                stub.LendCredentials(request, timeout=30)

    assert grpc.StatusCode.FAILED_PRECONDITION == e.value.code()


def test_a_server_without_a_policy_lends_nothing(server_address: str) -> None:
    request = access_api.LendCredentialsRequest(hold=HOLD)
    with (
        grpc.insecure_channel(server_address) as channel,
        pytest.raises(grpc.RpcError, match=r"\[lending\]") as e,
    ):
        AccessServiceStub(channel).LendCredentials(request, timeout=30)

    assert grpc.StatusCode.FAILED_PRECONDITION == e.value.code()


@pytest.mark.slow
def test_each_process_of_a_job_lends_for_itself(cloud: Cloud) -> None:
    results = run_job(
        "tests.lending.lending_job:saves_and_restores",
        2,
        devices=1,
        target=cloud.address,
        root=cloud.root,
    )

    assert [[], []] == results
    assert len(cloud.secrets) >= 2 + 2
