"""Frames encoded and decoded by hand equal the frames of the generated classes."""

import itertools

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from storesvc.errors import InvalidFieldError
from storesvc.format.checksums import crc32c, digest
from storesvc.format.dtypes import CHECKSUM_BYTES
from storesvc.format.wire import FRAME_BYTES, Frame, cut, cut_parts
from storesvc.rpc.upload_service import parse_part
from storesvc_client._chunks.slabs import (
    FilledSlab,
    SentFrame,
    Slab,
    SumsInProgress,
    frames,
    parse_frame,
)
from storesvc_client._rpc.connection import MAX_FRAME_BYTES
from storesvc_client._telemetry.progress import Meter
from storesvc_proto.v1 import chunk_service_pb2 as chunk_api
from storesvc_proto.v1 import tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as api

METER = Meter("save", "tests/framing@0")

pieces = st.lists(
    st.tuples(
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**64 - 1),
        st.lists(st.binary(max_size=300), max_size=3),
    ),
    max_size=20,
)


@given(pieces)
def test_a_frame_is_what_the_generated_classes_write(
    pieces: list[tuple[int, int, list[bytes]]],
) -> None:
    frame = SentFrame()
    for chunk, offset, parts in pieces:
        frame.add(chunk, offset, *(memoryview(part) for part in parts))
    joined = [b"".join(parts) for _, _, parts in pieces]
    expected = api.WriteChunksRequest(
        frame=api.ChunkFrame(
            chunk=[chunk for chunk, _, _ in pieces],
            offset=[offset for _, offset, _ in pieces],
            length=list(map(len, joined)),
            data=b"".join(joined),
        )
    )

    assert frame.size == len(expected.frame.data)
    assert expected == api.WriteChunksRequest.FromString(frame.request())
    if frame.size:
        assert expected.SerializeToString() == frame.request()


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 3)), max_size=4))
def test_chunks_come_in_frames_that_are_full_or_hold_small_ones(
    sizes: list[tuple[int, int]],
) -> None:
    lengths = [max(5, times * MAX_FRAME_BYTES + by) for by, times in sizes]
    slab = Slab(7, tuple(length - CHECKSUM_BYTES for length in lengths))
    sums = SumsInProgress(7 + len(lengths))
    buffer = np.arange(slab.size, dtype=np.uint64).astype(np.uint8)
    wanted = range(7, 7 + len(lengths))

    sent = [
        api.WriteChunksRequest.FromString(request).frame
        for request in frames([FilledSlab(slab, wanted, buffer)], sums, METER)
    ]

    received = dict.fromkeys(wanted, b"")
    for frame in sent:
        assert 0 < len(frame.data) <= MAX_FRAME_BYTES
        at = 0
        for chunk, offset, length in zip(
            frame.chunk, frame.offset, frame.length, strict=True
        ):
            assert len(received[chunk]) == offset
            received[chunk] += frame.data[at : at + length]
            at += length
        assert len(frame.data) == at
    stored = {}
    for ordinal, at, size in slab.rows():
        elements = buffer[at : at + size].tobytes()
        stored[ordinal] = elements + crc32c(elements).to_bytes(4, "little")
        assert digest(elements) == sums.result().digests[ordinal].tobytes()
    assert stored == received


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(-5, 5)).map(
            lambda drawn: max(0, drawn[0] * MAX_FRAME_BYTES + drawn[1])
        ),
        max_size=4,
    )
)
def test_a_chunk_that_is_lent_is_sent_as_one_that_is_staged(sizes: list[int]) -> None:
    size = sum(sizes)
    slab = Slab(3, (size,))
    buffer = np.arange(size, dtype=np.uint64).astype(np.uint8)
    ends = np.cumsum([0, *sizes]).tolist()
    runs = [buffer[a:b].copy() for a, b in itertools.pairwise(ends)]
    known = SumsInProgress(4)
    FilledSlab(slab, [3], buffer).sum_up(known, METER, [3])
    sent = [
        list(frames([filled], sums, METER))
        for filled in (
            FilledSlab(slab, [3], buffer),
            FilledSlab(slab, [3], None, [runs]),
        )
        for sums in (SumsInProgress(4), known)
    ]

    assert [sent[0]] * 4 == sent


sizes = st.integers(-2, 2).map(lambda by: FRAME_BYTES + by) | st.integers(1, 300)


@given(
    st.integers(0, 999), st.lists(st.tuples(st.integers(0, 2**40), sizes), min_size=1)
)
def test_responses_are_what_the_generated_classes_write(
    start: int, chunks: list[tuple[int, int]]
) -> None:
    numbers, lengths = zip(*chunks, strict=True)
    stop = start + sum(lengths)
    data = bytes(range(251)) * (stop // 251 + 1)
    parts = list(cut_parts(start, numbers, lengths))

    messages = cut(data[start:stop], start, parts)
    expected = [chunk_api.ReadChunksResponse.FromString(m) for m in messages]

    assert [m.SerializeToString() for m in expected] == messages
    found: list[tuple[int, bytes]] = []
    for frame in (response.frame for response in expected):
        at = 0
        for number, offset, length in zip(
            frame.chunk, frame.offset, frame.length, strict=True
        ):
            if offset:
                assert (number, offset) == (found[-1][0], len(found[-1][1]))
                found[-1] = (number, found[-1][1] + frame.data[at : at + length])
            else:
                found.append((number, frame.data[at : at + length]))
            at += length
        assert 0 < at == len(frame.data) <= FRAME_BYTES
    assert list(numbers) == [number for number, _ in found]
    assert list(lengths) == [len(stored) for _, stored in found]
    assert data[start:stop] == b"".join(stored for _, stored in found)


def frame(data: bytes = b"abcdef") -> api.ChunkFrame:
    return api.ChunkFrame(chunk=[3, 4], offset=[0, 9], length=[2, 4], data=data)


@given(st.binary(max_size=300))
def test_a_response_is_read_as_the_generated_classes_do(data: bytes) -> None:
    response = chunk_api.ReadChunksResponse(frame=frame(data))

    columns, found = parse_frame(response.SerializeToString())

    columns.data = bytes(found)
    assert response.frame == columns


def delimited(field: int, data: bytes) -> bytes:
    return bytes([field << 3 | 2, len(data)]) + data


COLUMNS = frame(b"").SerializeToString()
DATA = delimited(15, b"abcdef")


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(delimited(1, DATA + COLUMNS), id="the bytes first"),
        pytest.param(delimited(1, COLUMNS + DATA + b"\x48\x07"), id="a number behind"),
        pytest.param(delimited(1, b"\x48\x07" + COLUMNS + DATA), id="a number before"),
        pytest.param(delimited(1, delimited(9, b"x") + COLUMNS + DATA), id="a text"),
        pytest.param(
            delimited(1, delimited(15, b"x") + COLUMNS + DATA), id="bytes twice"
        ),
        pytest.param(delimited(1, COLUMNS) + delimited(1, DATA), id="in two parts"),
        pytest.param(delimited(2, b"x") + delimited(1, COLUMNS + DATA), id="before it"),
        pytest.param(delimited(1, COLUMNS + DATA) + delimited(2, b"x"), id="behind it"),
    ],
)
def test_a_response_may_be_written_otherwise_and_hold_what_is_not_known(
    written: bytes,
) -> None:
    columns, found = parse_frame(written)

    assert b"abcdef" == bytes(found)
    assert [3, 4, 0, 9, 2, 4] == [*columns.chunk, *columns.offset, *columns.length]


def test_a_response_without_a_frame_is_an_empty_one() -> None:
    columns, found = parse_frame(b"")

    assert b"" == bytes(found)
    assert not columns.chunk


@given(st.binary(max_size=40) | st.binary().map(lambda b: delimited(1, COLUMNS + b)))
@example(b"\x0a" + b"\x80" * 30)
@example(delimited(1, COLUMNS + DATA)[:-1])
def test_what_is_no_response_is_rejected_as_the_generated_classes_do(
    written: bytes,
) -> None:
    try:
        expected = chunk_api.ReadChunksResponse.FromString(written).frame
    except DecodeError:
        with pytest.raises(DecodeError):
            parse_frame(written)
    else:
        columns, found = parse_frame(written)
        assert expected.data == bytes(found)
        assert expected.chunk == columns.chunk


@given(st.binary(max_size=300))
def test_a_request_is_read_as_the_generated_classes_do(data: bytes) -> None:
    request = api.WriteChunksRequest(frame=frame(data))

    found = parse_part(request.SerializeToString())

    assert isinstance(found, Frame)
    found.columns.data = bytes(found.data)
    assert request.frame == found.columns


@pytest.mark.parametrize(
    "request_",
    [
        api.WriteChunksRequest(),
        api.WriteChunksRequest(open=api.WriterRef(upload="x", epoch=3)),
        api.WriteChunksRequest(placed=tree_pb2.ChunkTable(ordinal=[1, 2])),
    ],
    ids=["nothing", "open", "placed"],
)
def test_a_request_without_a_frame_is_left_to_the_generated_classes(
    request_: api.WriteChunksRequest,
) -> None:
    assert request_ == parse_part(request_.SerializeToString())


@given(st.binary(max_size=40) | st.binary().map(lambda b: delimited(2, COLUMNS + b)))
@example(b"\x12" + b"\x80" * 30)
@example(delimited(2, COLUMNS + DATA)[:-1])
def test_what_is_no_request_is_rejected_as_the_generated_classes_do(
    written: bytes,
) -> None:
    try:
        expected = api.WriteChunksRequest.FromString(written)
    except DecodeError:
        with pytest.raises(InvalidFieldError, match="expected a serialized"):
            parse_part(written)
    else:
        found = parse_part(written)
        assert expected.HasField("frame") == isinstance(found, Frame)
        if isinstance(found, Frame):
            assert expected.frame.data == bytes(found.data)
            assert expected.frame.chunk == found.columns.chunk
