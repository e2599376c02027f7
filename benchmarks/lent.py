"""Compares the clients of buckets: TensorStore, which cannot use lent credentials, and
obstore, which can.

    python -m benchmarks lent [--mib 1024] [--rounds 3]

Each writes objects of 8 MiB, as a direct save does, and reads ranges of 4 MiB, as a
direct restore does, 16 in flight, from an emulator in another process on this machine.
CPU seconds are of the client.
"""

import argparse
import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Coroutine
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Final, Protocol

import obstore
import tensorstore as ts
from obstore.store import GCSStore, S3Store

from tests.fake_gcs import FakeGcs
from tests.fake_s3 import FakeS3

MIB: Final = 1 << 20
OBJECT_BYTES: Final = 8 * MIB
RANGE_BYTES: Final = 4 * MIB
IN_FLIGHT: Final = 16
BUCKET: Final = "bench"
REGION: Final = "us-east-1"


class Contender(Protocol):
    """A client of a bucket."""

    async def read(self, name: str, start: int) -> Any:
        """Reads a range."""

    async def write(self, name: str, data: bytes) -> None:
        """Writes an object."""


class TensorStore:
    """TensorStore's driver."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._store = ts.KvStore.open({**spec, "bucket": BUCKET}).result()

    async def read(self, name: str, start: int) -> Any:
        span = slice(start, start + RANGE_BYTES)
        return (await self._store.read(name, byte_range=span)).value

    async def write(self, name: str, data: bytes) -> None:
        await self._store.write(name, data)


class Obstore:
    """obstore, with credentials of its own."""

    def __init__(self, store: GCSStore | S3Store) -> None:
        self._store = store

    async def read(self, name: str, start: int) -> Any:
        return await obstore.get_range_async(
            self._store, name, start=start, length=RANGE_BYTES
        )

    async def write(self, name: str, data: bytes) -> None:
        await obstore.put_async(
            self._store, name, data, mode="create", use_multipart=False
        )


def _serve(kind: type[FakeGcs] | type[FakeS3], to: Connection) -> None:
    with kind(buckets=[BUCKET]) as emulator:
        to.send(emulator.url)
        to.recv()


def _contenders(provider: str, url: str) -> dict[str, Contender]:
    plain: Any = {"allow_http": True}
    if provider == "gs":
        os.environ["TENSORSTORE_GCS_HTTP_URL"] = url
        os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "any"
        token: Any = {"token": "any", "expires_at": None}
        options: Any = {"base_url": url, "client_options": plain}
        google = GCSStore(BUCKET, credential_provider=lambda: token, **options)
        return {
            "TensorStore": TensorStore({"driver": "gcs"}),
            "obstore": Obstore(google),
        }
    os.environ |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
    amazon = S3Store(
        BUCKET,
        endpoint=url,
        region=REGION,
        access_key_id="any",
        secret_access_key="any",
        client_options=plain,
    )
    spec = {"driver": "s3", "endpoint": url, "aws_region": REGION}
    return {"TensorStore": TensorStore(spec), "obstore": Obstore(amazon)}


async def _all(calls: list[Callable[[], Coroutine[Any, Any, Any]]]) -> None:
    async def work() -> None:
        while calls:
            await calls.pop()()

    async with asyncio.TaskGroup() as workers:
        for _ in range(IN_FLIGHT):
            workers.create_task(work())


def _measured(
    calls: list[Callable[[], Coroutine[Any, Any, Any]]], size: int
) -> tuple[float, float]:
    """Returns GB/s, and CPU seconds for each GB."""
    began, cpu = time.monotonic(), time.process_time()
    asyncio.run(_all(calls))
    gigabytes = size / 1e9
    seconds = time.monotonic() - began
    return gigabytes / seconds, (time.process_time() - cpu) / gigabytes


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks lent")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    count, data = options.mib * MIB // OBJECT_BYTES, os.urandom(OBJECT_BYTES)
    print(f"{'':12}{'':14}{'GB/s':>8}{'CPU s/GB':>10}")
    spawn = multiprocessing.get_context("spawn")
    for provider, kind in (("gs", FakeGcs), ("s3", FakeS3)):
        ours, theirs = spawn.Pipe()
        server = spawn.Process(target=_serve, args=(kind, theirs))
        server.start()
        contenders = _contenders(provider, ours.recv())
        found: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for each in range(options.rounds):
            for name, one in contenders.items():
                names = [f"{name}/{each}/{n}" for n in range(count)]
                writes = [partial(one.write, n, data) for n in names]
                reads = [
                    partial(one.read, n, at)
                    for n in names
                    for at in range(0, OBJECT_BYTES, RANGE_BYTES)
                ]
                for verb, calls in (("write", writes), ("read", reads)):
                    figures = _measured(list(calls), count * OBJECT_BYTES)
                    found.setdefault((verb, name), []).append(figures)
        for (verb, name), rows in sorted(found.items()):
            speed = median(each for each, _ in rows)
            cpu = median(each for _, each in rows)
            print(f"{provider} {verb:9}{name:14}{speed:8.2f}{cpu:10.2f}")
        ours.send(None)
        server.join()


if __name__ == "__main__":
    main()
