"""What the service asks of a storage, of every storage that it runs on."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from storesvc.bucket import IF_ABSENT, Generation, PreconditionError
from storesvc.errors import CorruptDataError, InvalidFieldError, StorageUnavailableError
from storesvc.kvbucket import KvBucket, root_spec


class BucketTests:
    """Inherited by a class for each storage, which says where its root is."""

    def root(self, directory: Path) -> str:
        """Returns the root of a fresh store."""
        raise NotImplementedError

    @pytest.fixture
    def within(self, tmp_path: Path) -> Callable[..., None]:
        """Runs a test within an event loop, on a fresh bucket."""

        def run(test: Callable[[KvBucket], Coroutine[Any, Any, None]]) -> None:
            async def main() -> None:
                await test(await KvBucket.open(self.root(tmp_path)))

            asyncio.run(main())

        return run

    def test_what_is_written_is_read(self, within: Callable[..., None]) -> None:
        async def test(bucket: KvBucket) -> None:
            assert await bucket.read("a/b") is None
            generation = await bucket.write("a/b", b"one")
            stored = await bucket.read("a/b")
            assert stored is not None
            assert (b"one", generation) == (stored.data, stored.generation)

        within(test)

    def test_a_range_is_read_as_asked_or_not_at_all(
        self, within: Callable[..., None]
    ) -> None:
        async def test(bucket: KvBucket) -> None:
            await bucket.write("a", b"0123456789")
            assert b"234" == await bucket.read_range("a", 2, 5)
            assert b"0123456789" == await bucket.read_range("a", 0, 10)
            for place, start, stop in (("a", 5, 11), ("a", 10, 12), ("b", 0, 1)):
                with pytest.raises(CorruptDataError, match=place):
                    await bucket.read_range(place, start, stop)

        within(test)

    def test_a_conditional_write_happens_on_its_condition_only(
        self, within: Callable[..., None]
    ) -> None:
        async def test(bucket: KvBucket) -> None:
            first = await bucket.write("a", b"1", condition=IF_ABSENT)
            with pytest.raises(PreconditionError):
                await bucket.write("a", b"2", condition=IF_ABSENT)
            second = await bucket.write("a", b"2", condition=first)
            with pytest.raises(PreconditionError):
                await bucket.write("a", b"3", condition=first)
            with pytest.raises(PreconditionError):
                await bucket.write("b", b"3", condition=second)
            stored = await bucket.read("a")
            assert stored is not None
            assert b"2" == stored.data

        within(test)

    def test_the_same_bytes_written_again_are_another_generation(
        self, within: Callable[..., None]
    ) -> None:
        async def test(bucket: KvBucket) -> None:
            first = await bucket.write("a", b"1")
            await bucket.write("a", b"1")
            with pytest.raises(PreconditionError):
                await bucket.write("a", b"2", condition=first)

        within(test)

    def test_of_many_creators_one_wins(self, within: Callable[..., None]) -> None:
        async def test(bucket: KvBucket) -> None:
            async def create(number: int) -> Generation | None:
                try:
                    return await bucket.write(
                        "a", str(number).encode(), condition=IF_ABSENT
                    )
                except PreconditionError:
                    return None

            for _ in range(5):
                won = await asyncio.gather(*map(create, range(16)))
                assert 1 == sum(generation is not None for generation in won)
                await bucket.delete("a")

        within(test)

    def test_a_counter_loses_no_increment(self, within: Callable[..., None]) -> None:
        async def test(bucket: KvBucket) -> None:
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

            await asyncio.gather(*(increment() for _ in range(20)))
            stored = await bucket.read("n")
            assert stored is not None
            assert b"20" == stored.data

        within(test)

    def test_a_conditional_delete_happens_on_its_condition_only(
        self, within: Callable[..., None]
    ) -> None:
        async def test(bucket: KvBucket) -> None:
            first = await bucket.write("a", b"1")
            second = await bucket.write("a", b"2")
            with pytest.raises(PreconditionError):
                await bucket.delete("a", generation=first)
            await bucket.delete("a", generation=second)
            assert await bucket.read("a") is None
            await bucket.delete("a")

        within(test)

    def test_a_list_is_the_places_of_a_prefix_in_order(
        self, within: Callable[..., None]
    ) -> None:
        async def test(bucket: KvBucket) -> None:
            for place in ("a/2", "a/10", "a/1/x", "ab", "b/1", "a.b"):
                await bucket.write(place, b"")
            assert ["a/1/x", "a/10", "a/2"] == await bucket.list("a/")
            assert [] == await bucket.list("c/")
            await bucket.delete_below("a/")
            assert [] == await bucket.list("a/")
            assert ["a.b", "ab"] == await bucket.list("a")

        within(test)

    def test_key_spaces_share_values_that_one_took_over(
        self, within: Callable[..., None]
    ) -> None:
        async def test(bucket: KvBucket) -> None:
            spaces = [bucket.key_space(place=f"s/{n}/", pool="pool/") for n in range(3)]
            assert not await spaces[0].exists()
            await spaces[0].write({f"a/{i}": b"a" * (i + 1) for i in range(3000)})
            await spaces[1].write({"b": b"bb", "c": b"c"})
            assert await spaces[0].exists()

            await spaces[2].take_over(spaces[:2], {"d": b"dddd"})
            await spaces[2].take_over(spaces[:2], {"d": b"dddd"})
            await bucket.delete_below("s/0/")
            await bucket.delete_below("s/1/")

            merged = await spaces[2].places()
            assert 3003 == len(merged)
            for key, value in (("a/2999", b"a" * 3000), ("b", b"bb"), ("d", b"dddd")):
                file, offset, length = merged[key]
                assert len(value) == length
                assert value == await bucket.read_range(
                    f"pool/{file}", offset, offset + length
                )

        within(test)


class TestFileBucket(BucketTests):
    """On local disk."""

    def root(self, directory: Path) -> str:
        return (directory / "dir with %20 and é").as_uri()


class TestMemoryBucket(BucketTests):
    """In memory."""

    def root(self, directory: Path) -> str:
        del directory
        return "memory://"


@pytest.mark.parametrize(
    ("root", "spec"),
    [
        ("file:///a/b", {"driver": "file", "path": "/a/b/"}),
        ("file:///a%20b/", {"driver": "file", "path": "/a b/"}),
        ("memory://", {"driver": "memory"}),
        ("gs://bkt", {"driver": "gcs", "bucket": "bkt", "path": ""}),
        ("gs://bkt/x/y/", {"driver": "gcs", "bucket": "bkt", "path": "x/y/"}),
    ],
)
def test_roots_are_uris_of_storages(root: str, spec: dict[str, str]) -> None:
    assert spec == root_spec(root)


@pytest.mark.parametrize(
    "root",
    ["", "/a", "a/b", "file://a/b", "file://", "memory://x", "gs://", "http://x"],
)
def test_other_roots_are_refused(root: str) -> None:
    with pytest.raises(InvalidFieldError, match="expected file:///PATH"):
        root_spec(root)


def test_a_storage_that_fails_is_unavailable() -> None:
    @asynccontextmanager
    async def bucket() -> AsyncIterator[KvBucket]:
        yield await KvBucket.open("file:///proc/nowhere")

    async def main() -> None:
        async with bucket() as opened:
            await opened.write("a", b"")

    with pytest.raises(StorageUnavailableError, match="a: the storage failed"):
        asyncio.run(main())
