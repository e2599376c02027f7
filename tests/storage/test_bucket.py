"""Tests of the `Bucket` protocol, run on every storage.

A class per storage inherits ``BucketTests``, and ``SharedBucketTests`` if several
processes can open the storage.
"""

import asyncio
import errno
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Awaitable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from storesvc.errors import (
    CorruptDataError,
    InvalidFieldError,
    StorageFullError,
    StorageUnavailableError,
    StoreError,
)
from storesvc.format.wire import Part
from storesvc.storage.bucket import (
    IF_ABSENT,
    UNLISTED,
    Generation,
    PreconditionError,
    list_pages,
    translate_errors,
)
from storesvc.storage.file_bucket import TICK_SECONDS
from storesvc.storage.location import (
    CONCURRENCY,
    is_this_machine,
    shows_plaintext,
    storage_at,
)
from storesvc.storage.object_bucket import TensorStoreBucket
from tests.conftest import GIVEN_BUCKET, gcs_root, s3_root
from tests.fake_s3 import FakeS3
from tests.support.small_disk import small_disk

ODD_PLACES = (
    "%2e%2e/%2F",
    "..",
    "/a",
    "a//b",
    "a/../b",
    "a/./b",
    "a/",
    "a\0b",
    "a\\b",
    "a\nb",
    "a b?c#d*e:f|g",
    "a.__lock",
    "con",
    "e\u0301",
    "é/\u202e/\U0001f600",
    "k" * 300,
    "k/" * 300 + "k",
)
"""Names that each storage either stores like any other, or rejects."""


async def read_data(bucket: TensorStoreBucket, place: str) -> bytes:
    """Returns the contents of an object that is there."""
    stored = await bucket.read(place)
    assert stored is not None
    return stored.data


class BucketTests:
    """Tests of every storage; a subclass for each storage returns the root."""

    def root(self, directory: Path) -> str:
        """Returns the root of a fresh store."""
        raise NotImplementedError

    def refuses(self, place: str) -> bool:
        """Returns whether the storage cannot store an object at a place."""
        raise NotImplementedError

    def rounds(self, most: int) -> int:
        """Returns the number of consecutive writes of a place."""
        return most

    @pytest.fixture
    def bucket(self, tmp_path: Path) -> Awaitable[TensorStoreBucket]:
        """A fresh bucket."""
        return TensorStoreBucket.open(self.root(tmp_path))

    async def test_what_is_written_is_read(self, bucket: TensorStoreBucket) -> None:
        assert await bucket.read("a/b") is None
        generation = await bucket.write("a/b", b"one")
        stored = await bucket.read("a/b")
        assert stored is not None
        assert (b"one", generation) == (stored.data, stored.generation)

    async def test_a_list_has_the_generations_of_its_objects_or_none(
        self, bucket: TensorStoreBucket
    ) -> None:
        written = {f"l/{n}": await bucket.write(f"l/{n}", b"%d" % n) for n in range(4)}
        written["l/2"] = await bucket.write("l/2", b"changed")
        listed = await bucket.list_versions("l/", after="l/0")
        del written["l/0"]
        if not bucket.lists_pages:
            written = dict.fromkeys(written, UNLISTED)
        assert [*written.items()] == [*listed.items()]
        first = await bucket.list_versions("l/", after="l/0", limit=1)
        assert {"l/1"} == {*first} or not bucket.lists_pages
        assert {} == await bucket.list_versions("m/", limit=1)

    async def test_a_range_is_read_as_asked_or_not_at_all(
        self, bucket: TensorStoreBucket
    ) -> None:
        await bucket.write("a", b"0123456789")
        assert b"234" == await bucket.read_range("a", 2, 5)
        assert b"0123456789" == await bucket.read_range("a", 0, 10)
        for place, start, stop in (("a", 5, 11), ("a", 10, 12), ("b", 0, 1)):
            with pytest.raises(CorruptDataError, match=place):
                await bucket.read_range(place, start, stop)

    async def test_parts_of_messages_are_read_as_asked_or_not_at_all(
        self, bucket: TensorStoreBucket
    ) -> None:
        await bucket.write("a", b"0123456789")
        parts = [Part(b"x", 2, 5), Part(b"", 5, 10)]
        assert [b"x234", b"56789"] == await bucket.read_parts("a", 2, 10, parts)
        for place, start, stop in (("a", 5, 11), ("a", 10, 12), ("b", 0, 1)):
            with pytest.raises(CorruptDataError, match=place):
                await bucket.read_parts(place, start, stop, [Part(b"x", start, stop)])

    async def test_a_conditional_write_happens_on_its_condition_only(
        self, bucket: TensorStoreBucket
    ) -> None:
        first = await bucket.write("a", b"1", condition=IF_ABSENT)
        with pytest.raises(PreconditionError):
            await bucket.write("a", b"2", condition=IF_ABSENT)
        second = await bucket.write("a", b"2", condition=first)
        with pytest.raises(PreconditionError):
            await bucket.write("a", b"3", condition=first)
        with pytest.raises(PreconditionError):
            await bucket.write("b", b"3", condition=second)
        assert b"2" == await read_data(bucket, "a")

    async def test_of_many_creators_one_wins(self, bucket: TensorStoreBucket) -> None:
        async def create(number: int) -> Generation | None:
            try:
                return await bucket.write(
                    "a", str(number).encode(), condition=IF_ABSENT
                )
            except PreconditionError:
                return None

        for _ in range(self.rounds(5)):
            won = await asyncio.gather(*map(create, range(16)))
            assert 1 == sum(generation is not None for generation in won)
            await bucket.delete("a")

    async def test_a_counter_loses_no_increment(
        self, bucket: TensorStoreBucket
    ) -> None:
        await bucket.write("n", b"0")

        async def increment() -> None:
            while True:
                stored = await bucket.read("n")
                assert stored is not None
                following = str(int(stored.data) + 1).encode()
                try:
                    await bucket.write("n", following, condition=stored.generation)
                except PreconditionError:
                    continue
                return

        count = self.rounds(20)
        await asyncio.gather(*(increment() for _ in range(count)))
        assert str(count).encode() == await read_data(bucket, "n")

    async def test_a_conditional_delete_happens_on_its_condition_only(
        self, bucket: TensorStoreBucket
    ) -> None:
        first = await bucket.write("a", b"1")
        second = await bucket.write("a", b"2")
        with pytest.raises(PreconditionError):
            await bucket.delete("a", generation=first)
        await bucket.delete("a", generation=second)
        assert await bucket.read("a") is None
        await bucket.delete("a")

    async def test_a_list_is_the_places_of_a_prefix_in_order(
        self, bucket: TensorStoreBucket
    ) -> None:
        for place in ("a/2", "a/10", "a/1/x", "ab", "b/1", "a.b"):
            await bucket.write(place, b"")
        assert ["a/1/x", "a/10", "a/2"] == await bucket.list("a/")
        assert [] == await bucket.list("c/")
        assert [["a/1/x", "a/10", "a/2"]] == [p async for p in list_pages(bucket, "a/")]
        await bucket.delete_below("a/")
        assert [] == await bucket.list("a/")
        assert ["a.b", "ab"] == await bucket.list("a")

    async def test_the_sizes_below_a_folder_are_those_of_its_objects(
        self, bucket: TensorStoreBucket
    ) -> None:
        for place in ("a/2", "a/10/x/y", "ab/1", "a.b", "b/a/1"):
            await bucket.write(place, place.encode())
        assert {"a/2": 3, "a/10/x/y": 8} == await bucket.sizes("a/")
        assert {"a/10/x/y": 8} == await bucket.sizes("a/10/")
        assert {} == await bucket.sizes("c/")

    async def test_a_list_continues_after_a_path(
        self, bucket: TensorStoreBucket
    ) -> None:
        for place in ("a/1", "a/2", "a/2.x", "a/3", "b"):
            await bucket.write(place, b"")
        assert ["a/2", "a/2.x", "a/3"] == await bucket.list("a/", after="a/1")
        assert ["a/2.x", "a/3"] == await bucket.list("a/", after="a/2")
        assert ["a/3"] == await bucket.list("a/", after="a/2.y")
        assert [] == await bucket.list("a/", after="a/3")
        assert ["a/1", "a/2"] == (await bucket.list("a/", after="a"))[:2]
        assert ["a/1", "a/2"] == (await bucket.list("a/", limit=2))[:2]
        assert ["a/3"] == await bucket.list("a/", after="a/2.x", limit=2)

    @pytest.mark.slow
    async def test_a_list_of_thousands_is_whole(
        self, bucket: TensorStoreBucket
    ) -> None:
        places = [f"n/{number:05d}" for number in range(3000)]
        for some in range(0, 3000, 200):
            await asyncio.gather(
                *(bucket.write(p, b"") for p in places[some : some + 200])
            )
        assert places == await bucket.list("n/")
        assert dict.fromkeys(places, 0) == await bucket.sizes("n/")
        pages = [page async for page in list_pages(bucket, "n/")]
        assert places == [path for page in pages for path in page]
        assert places[1500:] == await bucket.list("n/", after=places[1499])
        assert (
            places[1500:2600]
            == (await bucket.list("n/", after=places[1499], limit=1100))[:1100]
        )
        assert places[1000:2000] == await bucket.list("n/01")
        await bucket.delete_below("n/01")
        assert places[:1000] + places[2000:] == await bucket.list("n/")

    async def test_what_was_just_written_or_deleted_is_seen_by_every_call(
        self, bucket: TensorStoreBucket
    ) -> None:
        async def live(name: str) -> None:
            for turn in range(self.rounds(10)):
                data = f"{name} {turn}".encode()
                generation = await bucket.write(f"w/{name}", data)
                stored = await bucket.read(f"w/{name}")
                assert stored is not None
                assert (data, generation) == (stored.data, stored.generation)
                assert f"w/{name}" in await bucket.list("w/")
                await bucket.delete(f"w/{name}", generation=generation)
                assert await bucket.read(f"w/{name}") is None
                assert f"w/{name}" not in await bucket.list("w/")

        await asyncio.gather(*map(live, "abcdefgh"))

    async def test_of_a_write_and_a_delete_of_one_generation_one_wins(
        self, bucket: TensorStoreBucket
    ) -> None:
        async def succeeds(change: Coroutine[Any, Any, object]) -> bool:
            try:
                await change
            except PreconditionError:
                return False
            return True

        for _ in range(self.rounds(20)):
            first = await bucket.write("a", b"1")
            wrote, deleted = await asyncio.gather(
                succeeds(bucket.write("a", b"2", condition=first)),
                succeeds(bucket.delete("a", generation=first)),
            )
            assert (wrote, deleted) in {(True, False), (False, True)}
            assert wrote == (await bucket.read("a") is not None)

    async def test_of_many_threads_one_wins(self, bucket: TensorStoreBucket) -> None:
        rounds = 30
        winners: list[int] = []
        start = threading.Barrier(4)

        async def create(number: int) -> None:
            for turn in range(rounds):
                try:
                    await bucket.write(
                        f"t/{turn}", str(number).encode(), condition=IF_ABSENT
                    )
                except PreconditionError:
                    continue
                winners.append(turn)

        def run(number: int) -> None:
            start.wait()
            asyncio.run(create(number))

        await asyncio.gather(*(asyncio.to_thread(run, n) for n in range(4)))
        assert list(range(rounds)) == sorted(winners)

    @pytest.mark.slow
    async def test_a_big_value_is_read_as_a_whole_and_in_parts(
        self, bucket: TensorStoreBucket
    ) -> None:
        data = bytes(range(256)) * (1 << 18)  # 64 MiB
        await bucket.write("big", data)
        stored = await bucket.read("big")
        assert stored is not None
        assert stored.data == data
        size = len(data)
        for start, stop in ((0, 1), (1, 70_001), (size - 3, size), (0, size)):
            found = await bucket.read_range("big", start, stop)
            assert found == data[start:stop]

    @pytest.mark.parametrize("place", ODD_PLACES, ids=ascii)
    async def test_an_odd_place_is_kept_as_any_other_or_rejected(
        self, bucket: TensorStoreBucket, place: str
    ) -> None:
        await bucket.write("x", b"other")
        try:
            first = await bucket.write(place, b"1", condition=IF_ABSENT)
        except StoreError:
            assert self.refuses(place)
            with pytest.raises(StoreError):
                await bucket.read(place)
        else:
            assert not self.refuses(place)
            await bucket.write(place, b"2", condition=first)
            assert b"2" == await read_data(bucket, place)
            assert [place] == await bucket.list(place)
            await bucket.delete(place)
            assert await bucket.read(place) is None
        assert ["x"] == await bucket.list("x")

    async def test_a_new_place_holds_its_parts_one_after_another(
        self, bucket: TensorStoreBucket
    ) -> None:
        parts = [bytes([i % 251]) * i for i in range(2000)]
        await bucket.write_new("pool/x/y", [memoryview(part) for part in parts])

        assert b"".join(parts) == await read_data(bucket, "pool/x/y")


RACING = """
import asyncio, sys
from storesvc.storage.bucket import IF_ABSENT, PreconditionError
from storesvc.storage.object_bucket import TensorStoreBucket

async def race(root, name, rounds):
    bucket = await TensorStoreBucket.open(root)
    print("ready", flush=True)
    sys.stdin.readline()
    for turn in range(rounds):
        try:
            await bucket.write(f"r/{turn}", name.encode(), condition=IF_ABSENT)
            print(turn)
        except PreconditionError:
            pass
        while True:
            count = await bucket.read("count")
            following = str(int(count.data) + 1).encode()
            try:
                await bucket.write("count", following, condition=count.generation)
                break
            except PreconditionError:
                pass

asyncio.run(race(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


class SharedBucketTests(BucketTests):
    """Tests of a storage that several processes can open."""

    @pytest.mark.slow
    def test_of_two_processes_one_wins_and_no_increment_is_lost(
        self, tmp_path: Path
    ) -> None:
        root, rounds = self.root(tmp_path), self.rounds(100)

        bucket = asyncio.run(TensorStoreBucket.open(root))
        asyncio.run(bucket.write("count", b"0"))
        racers = {
            name: subprocess.Popen(
                [sys.executable, "-c", RACING, root, name, str(rounds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in ("one", "two")
        }
        for racer in racers.values():
            assert racer.stdout is not None
            assert "ready\n" == racer.stdout.readline()
        won: dict[int, str] = {}
        for racer in racers.values():
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        for name, racer in racers.items():
            output, _ = racer.communicate(timeout=60)
            assert 0 == racer.returncode
            for turn in map(int, output.split()):
                assert turn not in won
                won[turn] = name
        assert list(range(rounds)) == sorted(won)
        for turn in (0, rounds - 1):
            assert won[turn].encode() == asyncio.run(read_data(bucket, f"r/{turn}"))
        assert str(2 * rounds).encode() == asyncio.run(read_data(bucket, "count"))


class CountedBucketTests(BucketTests):
    """Tests of a storage with a new generation per write; on S3 a generation is a
    checksum of the contents."""

    async def test_the_same_bytes_written_again_are_another_generation(
        self, bucket: TensorStoreBucket
    ) -> None:
        first = await bucket.write("a", b"1")
        await bucket.write("a", b"1")
        with pytest.raises(PreconditionError):
            await bucket.write("a", b"2", condition=first)

    async def test_an_object_created_again_has_another_generation(
        self, bucket: TensorStoreBucket
    ) -> None:
        seen, rounds = set(), self.rounds(50)
        for _ in range(rounds):
            generation = await bucket.write("a", b"1", condition=IF_ABSENT)
            seen.add(generation)
            await bucket.delete("a", generation=generation)
            with pytest.raises(PreconditionError):
                await bucket.write("a", b"1", condition=generation)
        assert rounds == len(seen)


class TestFileBucket(SharedBucketTests, CountedBucketTests):
    """On local disk."""

    def root(self, directory: Path) -> str:
        return (directory / "dir with %20 and é").as_uri()

    def refuses(self, place: str) -> bool:
        # What leads elsewhere, what a file system cannot hold, and the names of the
        # driver's own lock files. No place that ``format.layout`` makes is such.
        parts = place.split("/")
        return (
            not {"", ".", ".."}.isdisjoint(parts)
            or "\0" in place
            or any(len(p) > 200 or p.endswith(".__lock") for p in parts)
        )

    def test_a_full_disk_is_reported_and_can_be_read_and_emptied(
        self, tmp_path: Path
    ) -> None:
        async def test(root: Path) -> None:
            bucket = await TensorStoreBucket.open(root.as_uri())
            await bucket.write("old", b"old")
            first = await bucket.write("record", b"1")
            written: list[str] = []

            async def fill() -> None:
                while True:
                    place = f"fill/{len(written)}"
                    await bucket.write(place, bytes(1 << 20))
                    written.append(place)

            with pytest.raises(StorageFullError, match="storage is full"):
                await fill()
            assert written
            with pytest.raises(StorageFullError):
                await bucket.write("record", bytes(2 << 20), condition=first)
            stored = await bucket.read("record")
            assert stored is not None
            assert (b"1", first) == (stored.data, stored.generation)
            assert written == await bucket.list("fill/")
            await bucket.delete_below("fill/")
            await bucket.write("record", b"2", condition=first)

        with small_disk(tmp_path / "disk", size_bytes=4 << 20) as disk:
            asyncio.run(test(disk))


@pytest.mark.usefixtures("bucket_storage")
class TestGcsBucket(SharedBucketTests, CountedBucketTests):
    """On Google Cloud Storage, emulated where no bucket is given."""

    def root(self, directory: Path) -> str:
        del directory
        return gcs_root()

    def rounds(self, most: int) -> int:
        # real buckets take about one write of a name a second
        return min(most, 3) if GIVEN_BUCKET else most

    def refuses(self, place: str) -> bool:
        return not {"\0", "\n"}.isdisjoint(place)

    def test_a_bucket_that_is_not_there_is_reported(self) -> None:
        root = f"gs://storesvc-{uuid.uuid4().hex}/x"
        with pytest.raises(InvalidFieldError, match=f"{root}: expected an existing"):
            asyncio.run(TensorStoreBucket.open(root))


class TestS3Bucket(SharedBucketTests):
    """On S3, emulated."""

    @pytest.fixture(autouse=True)
    def opened(self, s3: FakeS3) -> None:
        """Its root."""
        s3.clear()
        self._root = s3_root(s3)

    def root(self, directory: Path) -> str:
        del directory
        return self._root

    def refuses(self, place: str) -> bool:
        # paths of addresses, which clients and servers make others of
        dots = not {".", ".."}.isdisjoint(place.split("/"))
        return dots or not {"\0", "\n"}.isdisjoint(place)


class TestMemoryBucket(CountedBucketTests):
    """In memory."""

    def root(self, directory: Path) -> str:
        del directory
        return "memory://"

    def refuses(self, place: str) -> bool:
        del place
        return False


@pytest.mark.parametrize(
    ("root", "spec"),
    [
        ("file:///a/b", {"driver": "file", "path": "/a/b/"}),
        ("file:///a%20b/", {"driver": "file", "path": "/a b/"}),
        ("memory://", {"driver": "memory"}),
        ("gs://bkt", {"driver": "gcs", "bucket": "bkt", "path": ""}),
        ("gs://bkt/x/y/", {"driver": "gcs", "bucket": "bkt", "path": "x/y/"}),
        (
            "gs://bkt/x?driver=gcs_grpc",
            {"driver": "gcs_grpc", "bucket": "bkt", "path": "x/"},
        ),
        (
            "s3://bkt/x?endpoint=http://a:1/&region=eu-1",
            {
                "driver": "s3",
                "bucket": "bkt",
                "path": "x/",
                "endpoint": "http://a:1",
                "aws_region": "eu-1",
                "use_conditional_write": True,
            },
        ),
    ],
)
def test_roots_are_uris_of_storages(root: str, spec: dict[str, Any]) -> None:
    assert spec == storage_at(root).spec


def test_this_machine_is_localhost_and_loopback_addresses() -> None:
    own = ["localhost", "LOCALHOST", "127.0.0.1", "127.9.9.9", "::1", "[::1]"]
    assert all(map(is_this_machine, [*own, "::ffff:127.0.0.1", "[::ffff:127.0.0.1]"]))
    names = ["127.evil.example", "localhost.evil.example", "localhost.", "127.0.0.1."]
    addresses = ["0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1", "127.1", "127.0.0.1:1"]
    assert not any(map(is_this_machine, [*names, *addresses, "example.com", ""]))


def test_plaintext_is_all_but_https_and_http_on_this_machine() -> None:
    assert not any(map(shows_plaintext, ["https://a.example", "http://[::1]:9000/x"]))
    others = [
        "http://127.evil.example",
        "http://localhost@a.example",
        "ftp://localhost",
    ]
    assert all(map(shows_plaintext, [*others, "localhost:9000", ""]))


@pytest.mark.parametrize(
    "root",
    [
        *("", "/a", "a/b", "file://a/b", "file://", "file:///a?b=c"),
        *("memory://x", "gs://", "gs://ab/x", "s3://", "http://x"),
    ],
)
def test_other_roots_are_rejected(root: str) -> None:
    with pytest.raises(InvalidFieldError, match="expected file:///PATH"):
        storage_at(root)


@pytest.mark.parametrize("root", ["file:///a#b", "memory://#", "gs://bkt/x#b"])
def test_a_root_with_a_fragment_is_rejected(root: str) -> None:
    fragment = root.partition("#")[2]
    with pytest.raises(
        InvalidFieldError, match=f"expected no fragment, got '#{fragment}'"
    ):
        storage_at(root)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("driver=s3", "driver=gcs or driver=gcs_grpc"),
        ("concurrency=0", "concurrency=1 to 4096"),
        ("concurrency=many", "concurrency=1 to 4096"),
        ("userProject=", "userProject=PROJECT, got ''"),
        (
            "concurency=9",
            "driver, endpoint, grpc_endpoint and userProject, got concurency",
        ),
        ("concurrency=3&concurrency=4", "each option once, got 'concurrency=3&con"),
    ],
)
def test_unknown_options_of_a_bucket_are_rejected(options: str, expected: str) -> None:
    with pytest.raises(InvalidFieldError, match=expected):
        storage_at(f"gs://bucket/prefix?{options}")


def test_the_root_sets_the_number_of_concurrent_requests() -> None:
    assert CONCURRENCY == storage_at("gs://bucket/prefix").concurrency
    assert 9 == storage_at("gs://bucket/prefix?concurrency=9").concurrency


async def test_a_storage_that_fails_is_unavailable() -> None:
    bucket = await TensorStoreBucket.open("file:///proc/nowhere")
    with pytest.raises(StorageUnavailableError, match="a: the storage failed"):
        await bucket.write("a", b"")


def test_an_error_of_a_file_does_not_name_the_folder_of_the_store(
    tmp_path: Path,
) -> None:
    storage = storage_at((tmp_path / "secret").as_uri())
    full = OSError(errno.EMFILE, "Too many open files", f"{tmp_path}/secret/a/b")
    with (
        pytest.raises(StorageUnavailableError, match="Too many open files") as caught,
        translate_errors(storage, "a/b"),
    ):
        raise full

    assert "secret" not in str(caught.value)


def test_a_conditional_write_waits_for_the_next_tick_of_the_file_clock(
    tmp_path: Path,
) -> None:
    """Their time stamps must differ, also with a coarse kernel clock."""

    async def main() -> tuple[list[int], list[int]]:
        bucket = await TensorStoreBucket.open(tmp_path.as_uri())
        generation = await bucket.write("a", b"0", condition=IF_ABSENT)
        stamps, ages = [(tmp_path / "a").stat().st_mtime_ns], []
        for number in range(3):
            data = str(number).encode()
            generation = await bucket.write("a", data, condition=generation)
            ages.append(time.time_ns() - stamps[-1])
            stamps.append((tmp_path / "a").stat().st_mtime_ns)
        return stamps, ages

    stamps, ages = asyncio.run(main())
    assert len(set(stamps)) == len(stamps)
    # By the clock, not by the stamps: a coarse clock stamps a write up to a tick early.
    assert min(ages) >= TICK_SECONDS * 1e9 * 0.99
