"""The tables in which a direct writer reports the chunks of its durable files."""

import numpy as np
import pytest

from storesvc.format.chunks import MAX_PART_ROWS, ChunkLocations, Sums
from storesvc_client._save.direct import _PlacedChunks
from storesvc_proto.v1 import tree_pb2


def chunks(start: int, stop: int) -> tuple[Sums, ChunkLocations]:
    """Returns chunks of one file, which is named by the first of them."""
    ordinals = range(start, stop)
    places = [(f"file-{start}", at * 100, 100) for at in range(stop - start)]
    return (
        Sums.of_rows([(each, each, bytes(16)) for each in ordinals]),
        ChunkLocations.of_rows(places),
    )


def rows(table: tree_pb2.ChunkTable | None) -> list[tuple[int, str, int]]:
    """Returns the ordinal, file and offset of each chunk of a table."""
    assert table is not None
    files = [table.files[at] for at in table.file]
    return list(zip(table.ordinal, files, table.offset, strict=True))


def test_files_that_wait_are_in_one_table() -> None:
    placed = _PlacedChunks()
    for start, stop in ((4, 6), (0, 2), (2, 4)):
        placed.put(*chunks(start, stop))
    placed.end(None)

    expected = [(n, f"file-{n // 2 * 2}", n % 2 * 100) for n in range(6)]
    # for the call that commits
    assert placed.take() is None
    assert expected == rows(placed.take_rest())
    assert placed.take() is None
    assert placed.take_rest() is None


def test_no_table_has_more_rows_than_its_maximum() -> None:
    placed = _PlacedChunks()
    placed.put(*chunks(0, MAX_PART_ROWS + 5))
    placed.put(*chunks(MAX_PART_ROWS + 5, 2 * MAX_PART_ROWS))
    placed.end(None)

    found = []
    while (table := placed.take()) is not None:
        assert len(table.crc32c) <= MAX_PART_ROWS
        found += list(table.ordinal)
    found += [ordinal for ordinal, _, _ in rows(placed.take_rest())]
    assert np.array_equal(np.arange(2 * MAX_PART_ROWS), np.sort(found))


def test_an_error_comes_after_the_tables_before_it() -> None:
    placed = _PlacedChunks()
    placed.put(*chunks(0, 2))
    placed.end(OSError("full"))

    assert 2 == len(rows(placed.take()))
    with pytest.raises(OSError, match="full"):
        placed.take()
