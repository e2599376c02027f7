"""The chunks of zarr arrays that overlap a region: their keys and their parts."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from storesvc.format.grids import Region


def chunk_keys(
    metadata: Mapping[str, Any], chunk: Sequence[int], region: Region
) -> Iterator[str]:
    """Yields the keys of the chunks that overlap a region, in row-major order.

    >>> list(chunk_keys({"dimension_separator": "."}, (4, 4), ((0, 4), (2, 6))))
    ['0.0', '0.1']

    Args:
        metadata: Metadata of zarr 2 or 3, as TensorStore describes it.
        chunk: Shape of a chunk.
        region: The region.
    """
    encoding = metadata.get("chunk_key_encoding", {"name": "v2"})  # zarr 2 has none
    is_v2 = encoding["name"] == "v2"
    separator = encoding.get("configuration", {}).get("separator")
    separator = separator or metadata.get("dimension_separator")
    separator = separator or ("." if is_v2 else "/")
    for index in product(*_spans(chunk, region)):
        parts = [str(number) for number in index]
        yield separator.join(parts or ["0"] if is_v2 else ["c", *parts])


def chunk_regions(
    chunk: Sequence[int], region: Region
) -> Iterator[tuple[Region, Region]]:
    """Yields the part of a region in each chunk, in the order of ``chunk_keys``: within
    the array, and within the chunk.

    >>> list(chunk_regions((4,), ((2, 6),)))
    [(((2, 4),), ((2, 4),)), (((4, 6),), ((0, 2),))]
    """
    for index in product(*_spans(chunk, region)):
        inside = tuple(
            (max(start, at * n), min(stop, (at + 1) * n))
            for at, n, (start, stop) in zip(index, chunk, region, strict=True)
        )
        within = tuple(
            (start - at * n, stop - at * n)
            for at, n, (start, stop) in zip(index, chunk, inside, strict=True)
        )
        yield inside, within


def _spans(chunk: Sequence[int], region: Region) -> list[range]:
    """Returns the numbers of the chunks along each dimension."""
    return [
        range(start // size, -(-stop // size))
        for (start, stop), size in zip(region, chunk, strict=True)
    ]
