"""Frames that are serialised by hand are those of the generated classes."""

from hypothesis import given
from hypothesis import strategies as st

from storesvc_client._channel import MAX_FRAME_BYTES
from storesvc_client._framing import Frame, requests_of_large
from storesvc_proto.v1 import upload_service_pb2 as api

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
    frame = Frame()
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


@given(st.integers(-3, 3), st.integers(1, 3))
def test_a_large_chunk_comes_in_frames_of_the_largest_size(by: int, times: int) -> None:
    data, tail = bytes(range(256)) * (times * MAX_FRAME_BYTES // 256), b"tail"
    data = data[:by] if by < 0 else data + bytes(by)

    sent = [
        api.WriteChunksRequest.FromString(request).frame
        for request in requests_of_large(7, memoryview(data), tail)
    ]

    assert data + tail == b"".join(frame.data for frame in sent)
    assert {(7,)} == {tuple(frame.chunk) for frame in sent}
    at = 0
    for frame in sent:
        assert [at] == list(frame.offset)
        assert [len(frame.data)] == list(frame.length)
        assert 0 < len(frame.data) <= MAX_FRAME_BYTES
        at += len(frame.data)
    assert all(len(frame.data) == MAX_FRAME_BYTES for frame in sent[:-1])
