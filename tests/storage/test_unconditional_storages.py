"""Storages that violate their API are rejected, or do no harm."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import requests

import storesvc_client as store
from storesvc.errors import StorageUnavailableError
from storesvc.storage.object_bucket import TensorStoreBucket
from tests.fake_gcs import FakeGcs
from tests.support.gcs_calls import BUCKET
from tests.support.other_emulators import (
    ARE_INSTALLED,
    CONDITIONS,
    fake_gcs_server,
    gcp_storage_emulator,
    listening,
    names,
)

TREE = {"w": np.arange(4)}


@contextmanager
def emulated(*ignored: str) -> Iterator[tuple[FakeGcs, str]]:
    """Yields an emulator that ignores parameters, and the root of a store there."""
    with FakeGcs(buckets=[BUCKET], ignored=list(ignored)) as emulator:
        yield emulator, f"gs://{BUCKET}/store?endpoint={emulator.url}"


@pytest.fixture(autouse=True)
def no_other_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORSTORE_GCS_HTTP_URL", raising=False)
    # that of the other tests: TensorStore keeps the first one that it sees in a process
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "any")


# --- conditions -------------------------------------------------------------------


@pytest.mark.parametrize("what", CONDITIONS)
def test_no_store_is_created_if_a_condition_is_ignored(what: str) -> None:
    with emulated(CONDITIONS[what]) as (emulator, root):
        with pytest.raises(
            store.InvalidRequestError, match=f"ignores the condition on the {what}"
        ):
            store.connect(root)

        assert [] == names(emulator.url)


@pytest.mark.parametrize("what", CONDITIONS)
def test_a_store_is_not_opened_if_a_condition_is_ignored(what: str) -> None:
    ignored: list[str] = []
    with FakeGcs(buckets=[BUCKET], ignored=ignored) as emulator:
        root = f"gs://{BUCKET}/store?endpoint={emulator.url}"
        with store.connect(root) as client:
            client.run("a/b").save(1, TREE).result()
        before = names(emulator.url)
        ignored.append(CONDITIONS[what])

        with pytest.raises(
            store.InvalidRequestError, match=f"ignores the condition on the {what}"
        ):
            store.connect(root)

        assert before == names(emulator.url)


# --- lists ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("parameter", ["startOffset", "prefix"])
def test_a_list_that_ignores_its_start_is_harmless(parameter: str) -> None:
    with (
        emulated(f"GET {parameter}=") as (_, root),
        store.connect(root) as client,
        store.connect(root) as other,
    ):
        # each save makes the other client's view of the journal stale
        for step in range(4):
            (client, other)[step % 2].run("a/b").save(step, TREE).result()

        assert [3, 2, 1, 0] == [c.step for c in other.run("a/b").checkpoints()]


@pytest.mark.slow
def test_a_list_that_never_ends_is_an_error() -> None:
    with emulated("GET pageToken=", "GET maxResults=") as (emulator, root):
        with store.connect(root) as client:
            client.run("a/b").save(0, TREE).result()
        for number in range(1001):  # a page has a thousand
            requests.post(
                f"{emulator.url}/upload/storage/v1/b/{BUCKET}/o",
                params={"uploadType": "media", "name": f"store/runs/a/x{number:04}"},
                data=b"",
                timeout=10,
            ).raise_for_status()

        async def listed() -> list[str]:
            return await (await TensorStoreBucket.open(root)).list("runs/")

        with pytest.raises(
            StorageUnavailableError, match="repeats names of the previous"
        ):
            asyncio.run(listed())


# --- emulators that others wrote --------------------------------------------------


@pytest.mark.skipif(not ARE_INSTALLED, reason="they are in the dependency group dev")
@pytest.mark.parametrize(
    "emulator",
    [fake_gcs_server, gcp_storage_emulator],
    ids=lambda each: str(each.__name__),
)
def test_no_store_is_created_in_an_emulator_that_ignores_conditions(
    tmp_path: Path, emulator: Callable[[Path], Callable[[int], list[str]]]
) -> None:
    with listening(emulator(tmp_path)) as url:
        with pytest.raises(
            store.InvalidRequestError, match="ignores the condition on the creation"
        ):
            store.connect(f"gs://{BUCKET}/store?endpoint={url}")

        assert [] == names(url)


# --- endpoints --------------------------------------------------------------------


def test_two_endpoints_are_two_stores_in_one_process() -> None:
    with (
        emulated() as (_, one),
        emulated() as (_, other),
        store.connect(one) as client,
        store.connect(other) as second,
    ):
        client.run("a/b").save(1, TREE).result()
        second.run("a/b").save(2, TREE).result()

        assert 1 == client.run("a/b").latest().step
        assert 2 == second.run("a/b").latest().step


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ("endpoint=localhost:9000", r"expected endpoint=http\[s\]://HOST"),
        ("grpc_endpoint=localhost:9000", "expected grpc_endpoint= with driver=gcs_g"),
        ("driver=gcs_grpc&grpc_endpoint=localhost:1", "expected both endpoint= "),
        ("driver=gcs_grpc&endpoint=http://localhost:1", "expected both endpoint= "),
    ],
)
def test_an_invalid_endpoint_is_rejected(options: str, match: str) -> None:
    with pytest.raises(store.InvalidRequestError, match=match):
        store.connect(f"gs://{BUCKET}/store?{options}")


@pytest.mark.parametrize("host", ["minio.example", "127.attacker.example", "[::2]"])
def test_credentials_are_not_sent_to_other_machines_in_plaintext(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.delenv("GOOGLE_AUTH_TOKEN_FOR_TESTING")

    with pytest.raises(store.InvalidRequestError, match="would go over plaintext"):
        store.connect(f"gs://{BUCKET}/store?endpoint=http://{host}:9000")
