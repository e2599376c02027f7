"""The leftovers of a killed write do not affect later writes."""

import asyncio
import threading
from pathlib import Path

import pytest
import tensorstore as ts

from storesvc.storage import rooted_files
from storesvc.storage.object_bucket import TensorStoreBucket


def write(root: Path, place: str, data: bytes) -> None:
    async def main() -> None:
        await (await TensorStoreBucket.open(root.as_uri())).write(place, data)

    asyncio.run(main())


def test_a_write_ignores_the_leftovers_of_a_killed_write(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b.__lock").write_bytes(b"long" * 100)

    write(tmp_path, "a/b", b"short")

    assert b"short" == (tmp_path / "a/b").read_bytes()
    assert ["b"] == [path.name for path in (tmp_path / "a").iterdir()]


@pytest.mark.slow
def test_temporary_files_of_running_writes_are_kept(tmp_path: Path) -> None:
    store = ts.KvStore.open({"driver": "file", "path": f"{tmp_path}/"}).result()
    stop = threading.Event()

    def clear() -> None:
        while not stop.is_set():
            rooted_files.clear_interrupted_write(tmp_path / "a")

    clearing = threading.Thread(target=clear)
    clearing.start()
    try:
        for number in range(300):
            data = str(number).encode() * (1 + number % 50) * 100
            store.write("a", data).result()
            assert data == store.read("a").result().value
    finally:
        stop.set()
        clearing.join()
