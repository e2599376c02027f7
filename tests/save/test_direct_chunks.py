"""Chunks that a writer puts into the pool itself: believed as far as they can be."""

import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import storesvc_client as store
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc_proto.v1 import tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as api
from tests.support.contract import (
    LENGTH,
    WHOLE,
    Writer,
    frame,
    placed_table,
    refused,
    stored,
    sums,
)
from tests.support.faulty_bucket import Call, Fault
from tests.support.faulty_server import serving
from tests.support.server_process import ServerProcess

_names = itertools.count()
FILE = "a" * 32


@dataclass
class Placer:
    """A writer that reaches the files of the store."""

    address: str
    root: Path
    """Root of the store at that address."""
    name: str = field(init=False)
    writer: Writer = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"tests/placed-{next(_names)}"
        self.writer = Writer(self.address, self.name, 1)
        self.writer.begin()

    @property
    def prefix(self) -> str:
        return self.writer.name.rpartition("/")[2] + "/"

    @property
    def pool(self) -> Path:
        return self.root / RunPaths(RunName.parse(self.name)).pool

    def put(self, *chunks: int, file: str = FILE) -> Path:
        """Writes a data file of whole chunks."""
        path = self.pool / self.prefix / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(map(stored, chunks)))
        return path

    def table(self, *chunks: int, file: str = FILE) -> tree_pb2.ChunkTable:
        """Returns the table of chunks."""
        name = self.prefix + file
        return placed_table(*((name, at, chunk) for at, chunk in enumerate(chunks)))

    def report(self, *tables: tree_pb2.ChunkTable) -> list[int]:
        requests = [
            api.WriteChunksRequest(open=self.writer.ref()),
            *(api.WriteChunksRequest(placed=table) for table in tables),
        ]
        answers = self.writer.stub.WriteChunks(iter(requests), timeout=30)
        return [answer.durable_count for answer in answers]


@pytest.fixture
def placer(server: ServerProcess) -> Placer:
    return Placer(server.address, server.root)


def test_chunks_in_the_pool_are_acknowledged_found_and_committed(
    placer: Placer, client: store.Client
) -> None:
    placer.put(0, 2)
    placer.put(1, file="b" * 32)
    counts = placer.report(placer.table(0, 2), placer.table(1, file="b" * 32))
    assert 3 == counts[-1]
    assert [0, 1, 2] == placer.writer.find(sums(0, 1, 2))
    placer.writer.finish(sums(0, 1, 2))
    placer.writer.commit()

    run = client.run(placer.name)
    ((_, array),) = run.open(1).read(["x"])
    assert WHOLE == array.tobytes()
    assert run.verify(1).ok


def test_several_bad_tables_of_a_stream_are_one_error_and_none_of_asyncio(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path / "store") as address:
        placer = Placer(address, tmp_path / "store")
        tables = [placer.table(at, file=f"{at}" * 32) for at in range(3)]
        with refused("INVALID_CHUNK", match="missing or shorter"):
            placer.report(*tables)
    gc.collect()

    assert "never retrieved" not in caplog.text


def test_a_stream_holds_frames_or_tables_in_any_order(placer: Placer) -> None:
    placer.put(1)
    requests = [
        api.WriteChunksRequest(open=placer.writer.ref()),
        api.WriteChunksRequest(frame=frame(0)),
        api.WriteChunksRequest(placed=placer.table(1)),
        api.WriteChunksRequest(frame=frame(2)),
    ]
    answers = list(placer.writer.stub.WriteChunks(iter(requests), timeout=30))
    assert 3 == answers[-1].durable_count
    placer.writer.finish(sums(0, 1, 2))
    placer.writer.commit()


def test_an_upload_that_takes_over_claims_direct_chunks(placer: Placer) -> None:
    placer.put(0, 1)
    placer.report(placer.table(0, 1))
    second = Writer(placer.address, placer.name, 1)
    assert second.begin().resumes
    assert [0, 1] == second.find(sums(0, 1, 2))


def test_a_data_file_that_is_missing_or_short_is_rejected(placer: Placer) -> None:
    with refused("INVALID_CHUNK", match="expected 2008 bytes or more in the data file"):
        placer.report(placer.table(0, 1))
    path = placer.put(0, 1)
    path.write_bytes(path.read_bytes()[:-1])
    with refused("INVALID_CHUNK", match="missing or shorter"):
        placer.report(placer.table(0, 1))
    with refused("CHUNKS_INCOMPLETE"):
        placer.writer.finish(sums(0, 1, 2))


def moved(by: int) -> Callable[[tree_pb2.ChunkTable], Any]:
    return lambda table: table.offset.__setitem__(1, LENGTH + by)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.files.__setitem__(0, f"../{FILE}"), "expected UPLOAD/ID"),
        (lambda table: table.files.__setitem__(0, f"{'b' * 32}/{FILE}"), "called"),
        (
            lambda table: table.files.__setitem__(0, table.files[0] + "x"),
            "hexadecimal digits",
        ),
        (lambda table: table.files.append(table.files[0] + "x"), "32 lower-case"),
        (lambda table: table.files.append(table.files[0][:-1] + "b"), "no chunk"),
        (lambda table: table.length.__setitem__(1, 1003), "expected 1004 bytes, got"),
        (lambda table: table.ordinal.__setitem__(1, 3), "the tree has 3 chunks"),
        (lambda table: table.ordinal.__setitem__(1, 0), "strictly ascending"),
        (lambda table: table.offset.pop(), "differ in length"),
        (lambda table: table.digests.append(b"x"), "bytes of digests"),
        (lambda table: table.file.__setitem__(1, 1), "names a file"),
        (lambda table: table.offset.__setitem__(1, 2**63), "too large"),
        (moved(-1), "overlap at byte 1003"),
        (moved(-LENGTH), "overlap at byte 0"),
        (moved(1), "missing or shorter"),
    ],
)
def test_a_table_that_breaks_a_rule_is_rejected(
    placer: Placer, change: Callable[[tree_pb2.ChunkTable], Any], message: str
) -> None:
    placer.put(0, 1)
    table = placer.table(0, 1)
    change(table)

    with refused("INVALID_CHUNK", match=message):
        placer.report(table)
    assert [] == placer.writer.find(sums(0, 1, 2))


def test_bytes_that_are_not_what_the_table_says_are_found_by_their_reader(
    placer: Placer, client: store.Client
) -> None:
    path = placer.put(0, 1, 2)
    data = bytearray(path.read_bytes())
    data[1500] ^= 1
    path.write_bytes(data)
    placer.report(placer.table(0, 1, 2))
    placer.writer.finish(sums(0, 1, 2))
    placer.writer.commit()

    with pytest.raises(store.DataLossError, match="leaf 'x' chunk 1"):
        list(client.run(placer.name).open(1).read(["x"]))
    assert not client.run(placer.name).verify(1).ok


def test_what_is_placed_is_made_durable_before_it_is_written_down(
    tmp_path: Path,
) -> None:
    """Its folder was not: only the file was synced by its writer."""
    calls: list[tuple[str, str]] = []

    def plan(call: Call) -> Fault:
        calls.append((call.operation, call.path))
        return Fault.NONE

    with serving(tmp_path, plan) as address:
        placer = Placer(address, tmp_path)
        placer.put(0)
        placer.report(placer.table(0))

    (adopted,) = [n for n, (operation, _) in enumerate(calls) if operation == "adopt"]
    (staged,) = [n for n, (_, place) in enumerate(calls) if "/staging/" in place]
    assert calls[adopted][1].endswith(FILE)
    assert adopted < staged
