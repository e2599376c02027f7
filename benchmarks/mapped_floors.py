"""Measures what a restore costs at least where its bytes are not one range of memory.

    python -m benchmarks mapped_floors [--rounds 8]

Loops of two threads over a file on tmpfs, with nothing else: no plan, no buffers to
allocate, no devices. Each reads 400 MiB in pieces of 4 MiB into touched memory and sums
all bytes. The speed of a loop is divided by the first one's; the median over rounds, in
which the loops take turns, is printed.
"""

import argparse
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.speed.rounds import PLACES
from storesvc.format.checksums import crc32c
from storesvc.format.dtypes import DTYPES
from storesvc_client._chunks.memory import allocate
from storesvc_client._restore.data_file_reads import PIECE_BYTES
from storesvc_client._values.places import copy_elements

COUNT: Final = 100
"""Pieces: a multiple of 4, so that they are whole matrices."""

THREADS: Final = 2

_Bytes = NDArray[np.uint8]
_Read = Callable[[int, int, _Bytes, _Bytes], None]
"""Reads a piece of a file, by its number, into its part of the memory; may use scratch
memory of the thread."""


def _fill(into: _Bytes, file: int, number: int) -> _Bytes:
    assert os.preadv(file, [into.data], number * PIECE_BYTES) == PIECE_BYTES
    crc32c(into.data)
    return into


def _whole(memory: _Bytes, number: int) -> _Bytes:
    return memory[number * PIECE_BYTES :][:PIECE_BYTES]


def _rows(memory: _Bytes, number: int, size: int) -> _Bytes:
    """Returns rows that alternate with rows of two other pieces, as in joined
    projections."""
    group = memory[number // 3 * 3 * PIECE_BYTES :][: 3 * PIECE_BYTES]
    return group.reshape(-1, 3, size)[:, number % 3]


def _read_whole(file: int, number: int, memory: _Bytes, scratch: _Bytes) -> None:
    _fill(_whole(memory, number), file, number)


def _read_unaligned(file: int, number: int, memory: _Bytes, scratch: _Bytes) -> None:
    """To an address whose last bits differ from the offset's, as of a chunk that begins
    anywhere in a file."""
    _fill(_whole(memory[16:], number), file, number)


def _copy_whole(file: int, number: int, memory: _Bytes, scratch: _Bytes) -> None:
    np.copyto(_whole(memory, number), _fill(scratch, file, number))


def _copy_rows(size: int) -> _Read:
    def read(file: int, number: int, memory: _Bytes, scratch: _Bytes) -> None:
        found = _fill(scratch, file, number)
        np.copyto(_rows(memory, number, size), found.reshape(-1, size))

    return read


def _scatter_rows(size: int) -> _Read:
    """The kernel fills the rows, and each is summed."""

    def read(file: int, number: int, memory: _Bytes, scratch: _Bytes) -> None:
        rows = [row.data for row in _rows(memory, number, size)]
        for at in range(0, len(rows), 512):
            os.preadv(file, rows[at : at + 512], number * PIECE_BYTES + at * size)
        checksum = 0
        for row in rows:
            checksum = crc32c(row, checksum)

    return read


def _map_rows(size: int) -> _Read:
    """No read: the pages of the file are copied. Where the storage fails or the file is
    cut, that kills the process, so it can be no more than a measure."""

    def read(file: int, number: int, memory: _Bytes, scratch: _Bytes) -> None:
        flags, at = mmap.MAP_SHARED | mmap.MAP_POPULATE, number * PIECE_BYTES
        pages = mmap.mmap(file, PIECE_BYTES, flags, mmap.PROT_READ, offset=at)
        found = np.frombuffer(pages, np.uint8)
        crc32c(found.data)
        np.copyto(_rows(memory, number, size), found.reshape(-1, size))

    return read


def _transpose(
    copy: Callable[[Any, Any], None], dtype: type[Any] = np.float32
) -> _Read:
    """512 rows become columns: a quarter of a matrix of 8 KiB wide rows of float32, of
    which 2-byte elements have twice as many."""

    def read(file: int, number: int, memory: _Bytes, scratch: _Bytes) -> None:
        found = _fill(scratch, file, number).view(dtype).reshape(512, -1)
        matrix = memory[number // 4 * 4 * PIECE_BYTES :][: 4 * PIECE_BYTES]
        columns = matrix.view(dtype).reshape(-1, 4, 512)[:, number % 4]
        copy(columns, found.T)

    return read


def _copy_columns(columns: NDArray[Any], transposed: NDArray[Any]) -> None:
    """Transposes words of the elements of 2 columns, and takes their halves."""
    rows = transposed.T
    words = rows.view(np.uint32).T
    found = _keep(rows.size // 2).view(np.uint32).reshape(words.shape)
    copy_elements(found, words)
    _halve_words(columns[0::2], columns[1::2], found)


def _copy_xla(columns: NDArray[Any], transposed: NDArray[Any]) -> None:
    """XLA transposes into memory of its own."""
    import jax

    np.copyto(columns, np.asarray(jax.device_put(transposed)))


def _halve_words(low: NDArray[Any], high: NDArray[Any], words: NDArray[Any]) -> None:
    np.copyto(low, words, casting="unsafe")
    np.right_shift(words, 8 * low.itemsize, out=high, casting="unsafe")


def _copy_words(columns: NDArray[Any], transposed: NDArray[Any]) -> None:
    """Makes words of the elements of 4 rows, and transposes these."""
    rows = transposed.T
    height, width = rows.shape
    size = height * (width + 4)
    packed = _keep(size).reshape(height // 4, width + 4, 4)[:, :width]
    for each in range(4):
        np.copyto(packed[..., each], rows[each::4])
    words = packed.view(np.complex128)[..., 0]
    np.copyto(columns.view(np.complex128), words.T)


def _copy_lines(columns: NDArray[Any], transposed: NDArray[Any]) -> None:
    """Transposes lines of 16 elements, then the elements of each."""
    rows = transposed.T
    height, width = rows.shape
    found = _keep(height * width)
    np.copyto(found.view("V64").reshape(width // 16, height), rows.view("V64").T)
    elements = found.reshape(width // 16, height, 16).transpose(0, 2, 1)
    np.copyto(columns.reshape(width // 16, 16, height), elements)


_kept = threading.local()


def _keep(size: int) -> NDArray[np.float32]:
    """Returns memory that the thread touched before, if it did."""
    if not hasattr(_kept, "memory"):
        _kept.memory = allocate(2 * PIECE_BYTES).view(np.float32)
    memory: NDArray[np.float32] = _kept.memory[:size]
    return memory


def _interleave(dtype: type[Any]) -> _Read:
    """The halves of each head of 128 elements become pairs."""

    def read(file: int, number: int, memory: _Bytes, scratch: _Bytes) -> None:
        found = _fill(scratch, file, number).view(dtype).reshape(-1, 2, 64)
        pairs = _whole(memory, number).view(dtype).reshape(-1, 64, 2)
        for half in range(2):
            np.copyto(pairs[..., half], found[:, half])

    return read


def _make_words(file: int, number: int, memory: _Bytes, scratch: _Bytes) -> None:
    """The halves of each head of 128 elements of 2 bytes become pairs, as words."""
    found = _fill(scratch, file, number).view(np.uint16).reshape(-1, 2, 64)
    words = _whole(memory, number).view(np.uint32).reshape(-1, 64)
    for at in range(0, len(words), 256):
        low, high = np.moveaxis(found[at : at + 256], 1, 0).astype(np.uint32)
        high <<= 16
        np.bitwise_or(low, high, out=words[at : at + 256])


def _skip(dtype: type[Any]) -> _Read:
    """The first elements of all pairs, and then the second ones."""

    def read(file: int, number: int, memory: _Bytes, scratch: _Bytes) -> None:
        found = _fill(scratch, file, number).view(dtype).reshape(-1, 2)
        np.copyto(_whole(memory, number).view(dtype).reshape(2, -1), found.T)

    return read


def _halve(dtype: type[Any], word: type[Any]) -> _Read:
    """The same, as halves of words."""

    def read(file: int, number: int, memory: _Bytes, scratch: _Bytes) -> None:
        found = _fill(scratch, file, number).view(word)
        low, high = _whole(memory, number).view(dtype).reshape(2, -1)
        _halve_words(low, high, found)

    return read


def _cast(file: int, number: int, memory: _Bytes, scratch: _Bytes) -> None:
    """float32 become bfloat16."""
    found = _fill(scratch, file, number).view(np.float32)
    half = _whole(memory, number)[: PIECE_BYTES // 2]
    with np.errstate(invalid="ignore"):  # some of the bytes are signalling NaNs
        np.copyto(half.view(DTYPES["bfloat16"]), found, casting="unsafe")


def _round_words(file: int, number: int, memory: _Bytes, scratch: _Bytes) -> None:
    """The same for numbers, by arithmetic of integers: to the nearest, ties to even."""
    found = _fill(scratch, file, number).view(np.uint32)
    half, kept = _whole(memory, number).view(np.uint16), _keep(len(found))
    rounded = kept.view(np.uint32)
    np.right_shift(found, 16, out=rounded)
    rounded &= 1
    rounded += 0x7FFF
    rounded += found
    np.right_shift(rounded, 16, out=half[: len(found)], casting="unsafe")


LOOPS: Final[Mapping[str, _Read]] = {
    "into place": _read_whole,
    "into place, 16 bytes off": _read_unaligned,
    "to a cache, copied": _copy_whole,
    "to a cache, copied in rows of 8 KiB": _copy_rows(8192),
    "to a cache, copied in rows of 2 KiB": _copy_rows(2048),
    "scattered in rows of 8 KiB": _scatter_rows(8192),
    "scattered in rows of 2 KiB": _scatter_rows(2048),
    "mmap, copied in rows of 2 KiB": _map_rows(2048),
    "halves of heads as pairs": _interleave(np.float32),
    "halves of heads as pairs, 2 bytes": _interleave(np.uint16),
    "as words, 2 bytes": _make_words,
    "every second element": _skip(np.float32),
    "every second element, 2 bytes": _skip(np.uint16),
    "halves of words": _halve(np.uint32, np.uint64),
    "halves of words, 2 bytes": _halve(np.uint16, np.uint32),
    "cast to bfloat16": _cast,
    "rounded by integers": _round_words,
    "transposed by NumPy": _transpose(np.copyto),
    "transposed as this store does": _transpose(copy_elements),
    "transposed in words of 4 elements": _transpose(_copy_words),
    "transposed in lines, then elements": _transpose(_copy_lines),
    "transposed by XLA": _transpose(_copy_xla),
    "transposed as this store does, 2 bytes": _transpose(copy_elements, np.uint16),
    "words of 2 columns, then halves, 2 bytes": _transpose(_copy_columns, np.uint16),
    "transposed by XLA, 2 bytes": _transpose(_copy_xla, np.uint16),
}


def main() -> None:
    """Prints a line for each loop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    memory = allocate(PIECE_BYTES * (COUNT + 2))
    memory[...] = np.random.default_rng(0).integers(0, 255, len(memory), np.uint8)
    found: dict[str, list[float]] = {name: [] for name in LOOPS}
    with (
        tempfile.TemporaryFile(dir=PLACES["tmpfs"]) as file,
        ThreadPoolExecutor(THREADS) as threads,
    ):
        file.write(memory.data)
        file.flush()
        for _ in range(rounds):
            for name, read in LOOPS.items():
                began = time.perf_counter()
                done = [
                    threads.submit(_perform, read, file.fileno(), memory, first)
                    for first in range(THREADS)
                ]
                for each in done:
                    each.result()
                found[name].append(time.perf_counter() - began)
    plain = found["into place"]
    print(f"{'a loop / the first one':40}{'speed':>8}{'GB/s':>8}")
    for name, seconds in found.items():
        speed = median(p / s for p, s in zip(plain, seconds, strict=True))
        rate = COUNT * PIECE_BYTES / median(seconds) / 1e9
        print(f"{name:40}{speed:8.2f}{rate:8.1f}")


def _perform(read: _Read, file: int, memory: _Bytes, first: int) -> None:
    """Reads the pieces of one thread."""
    scratch = allocate(PIECE_BYTES)
    for number in range(first, COUNT, THREADS):
        read(file, number, memory, scratch)
