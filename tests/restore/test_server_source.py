"""The streams of a restore request equal shares, and no chunk twice."""

from hypothesis import given
from hypothesis import strategies as st

from storesvc_client._restore.sources import CHUNKS_A_CALL, cut_shares

MIB = 1 << 20


@given(st.lists(st.integers(1, 32 * MIB), max_size=200), st.integers(1, 4))
def test_streams_share_the_chunks_by_their_bytes(sizes: list[int], count: int) -> None:
    ordinals = range(7, 7 + len(sizes))

    found = list(cut_shares(ordinals, sizes, count))

    assert list(ordinals) == [ordinal for share in found for ordinal in share]
    assert len(found) <= count
    for share in found:
        assert share
        size = sum(sizes[ordinal - 7] for ordinal in share)
        assert size < sum(sizes) / count + max(sizes) + 1


def test_a_call_requests_at_most_the_allowed_chunks() -> None:
    count = 3 * CHUNKS_A_CALL + 5

    found = list(cut_shares(range(count), [1] * count, 2))

    assert CHUNKS_A_CALL == max(map(len, found))
    assert count == sum(map(len, found))
