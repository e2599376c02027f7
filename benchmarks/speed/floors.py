"""The floors: times that no store on this machine can beat."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
from numpy.typing import NDArray

from benchmarks.speed import raw_grpc
from benchmarks.speed.changing import State
from benchmarks.speed.contenders import Maker, Target
from benchmarks.speed.files import sync
from storesvc.format.checksums import ChunkHasher, crc32c
from storesvc_client._restore.sources import STREAMS
from tests.support.certificates import Authority

PART_BYTES: Final = 64 << 20
"""Of a file."""

PIECE_BYTES: Final = 1 << 20
"""Bytes that are summed and written, or read and summed, while a cache holds them."""


class RawFiles:
    """The floor for files: writes and reads the bytes of each shard, nothing else."""

    pids: Sequence[int] = ()

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def save(self, step: int, state: State) -> None:
        number, held, file = 0, PART_BYTES, None
        for shard in _shards(state):
            if held >= PART_BYTES:
                if file is not None:
                    _close(file)
                file = (self._directory / f"{step}-{number}").open("wb", buffering=0)
                number, held = number + 1, 0
            data = shard
            held += len(data)
            while data and file is not None:
                data = data[self._write(file, data) :]
        if file is not None:
            _close(file)
        sync(self._directory)

    def restore(self, step: int, target: Target) -> Any:
        return list(map(self._read_whole, sorted(self._directory.glob(f"{step}-*"))))

    def _read_whole(self, path: Path) -> "NDArray[np.uint8]":
        size = path.stat().st_size
        buffer, at = np.empty(size, np.uint8), 0
        with path.open("rb", buffering=0) as file:
            while at < size:
                at += self._read(file, _bytes_of(buffer)[at:])
        return buffer

    def remove(self, *steps: int) -> None:
        """Removes steps."""
        for step in steps:
            for path in self._directory.glob(f"{step}-*"):
                path.unlink()

    def close(self) -> None:
        pass

    def _write(self, file: Any, data: memoryview) -> int:
        return int(file.write(data))

    def _read(self, file: Any, into: memoryview) -> int:
        return int(file.readinto(into))


class SummedFiles(RawFiles):
    """The floor of a store that checks: the same files, with the checksum and the
    digest of each chunk when it is written, and the checksum when it is read."""

    def _write(self, file: Any, data: memoryview) -> int:
        piece = data[:PIECE_BYTES]
        ChunkHasher().add(piece)
        return super()._write(file, piece)

    def _read(self, file: Any, into: memoryview) -> int:
        size = super()._read(file, into[:PIECE_BYTES])
        crc32c(into[:size])
        return size


class SummedByThreads(SummedFiles):
    """The floor of a store that checks and uses all cores: a file for each of them."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._threads = ThreadPoolExecutor(os.cpu_count())

    def save(self, step: int, state: State) -> None:
        shards, count = list(_shards(state)), os.cpu_count() or 1
        shares = _shares(shards, -(-sum(map(len, shards)) // count))
        steps = (f"{step}-{number}" for number in range(count))
        list(self._threads.map(self._write_share, steps, shares))
        sync(self._directory)

    def _write_share(self, name: str, pieces: list[memoryview]) -> None:
        file = (self._directory / name).open("wb", buffering=0)
        for piece in pieces:
            data = piece
            while data:
                data = data[self._write(file, data) :]
        _close(file)

    def restore(self, step: int, target: Target) -> Any:
        paths = sorted(self._directory.glob(f"{step}-*"))
        return list(self._threads.map(self._read_whole, paths))

    def close(self) -> None:
        self._threads.shutdown()


class CopiedByThreads(SummedByThreads):
    """The floor of a save that gives back control before it writes: all cores copy the
    bytes, into memory that is kept, then sum and write the copy."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._copies: list[NDArray[np.uint8]] = []
        self.returned = 0.0

    def save(self, step: int, state: State) -> None:
        shards, count = list(_shards(state)), os.cpu_count() or 1
        size = -(-sum(map(len, shards)) // count)
        if not self._copies:
            self._copies = [np.empty(size, np.uint8) for _ in range(count)]
        copies = list(self._threads.map(_copy, _shares(shards, size), self._copies))
        self.returned = time.perf_counter()
        steps = (f"{step}-{number}" for number in range(count))
        list(self._threads.map(self._write_share, steps, copies))
        sync(self._directory)


def _copy(pieces: list[memoryview], into: "NDArray[np.uint8]") -> list[memoryview]:
    at = 0
    for piece in pieces:
        into[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    return [_bytes_of(into)[:at]]


class RawGrpc:
    """The floor for sockets: sends and receives the bytes of each shard, no more."""

    def __init__(self, directory: Path) -> None:
        self._server, address = _served(directory)
        self.pids: Sequence[int] = [self._server.pid]
        self._channel = grpc.insecure_channel(address)
        self._sizes: dict[int, int] = {}

    def save(self, step: int, state: State) -> None:
        take: Any = self._channel.stream_unary(f"/{raw_grpc.SERVICE}/Take")
        answer = take(_messages(state))
        self._sizes[step] = int.from_bytes(answer, "little")

    def restore(self, step: int, target: Target) -> Any:
        send: Any = self._channel.unary_stream(f"/{raw_grpc.SERVICE}/Send")
        size = self._sizes[step]
        buffer, at = np.empty(size, np.uint8), 0
        for message in send(size.to_bytes(8, "little")):
            buffer[at : at + len(message)] = np.frombuffer(message, np.uint8)
            at += len(message)
        return buffer

    def close(self) -> None:
        self._channel.close()
        self._server.kill()
        self._server.wait()


def _served(directory: Path, *pair: Path) -> "tuple[subprocess.Popen[bytes], str]":
    """Starts the server, with TLS if it gets a certificate and its key; returns it and
    its address."""
    ready = directory / "address"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.speed.raw_grpc", str(ready)]
    server = subprocess.Popen([*command, *map(str, pair)])
    while not ready.exists():
        assert server.poll() is None, "the server ended"
        time.sleep(0.01)
    return server, ready.read_text()


def _messages(state: State) -> Iterator[bytes]:
    for data in _shards(state):
        for at in range(0, len(data), raw_grpc.MESSAGE_BYTES):
            yield bytes(data[at : at + raw_grpc.MESSAGE_BYTES])


def _shards(state: State) -> Iterator[memoryview]:
    """Yields the bytes of each shard once."""
    for leaf in state.values():
        for shard in leaf.addressable_shards:
            if not shard.replica_id:
                yield _bytes_of(np.asarray(shard.data))


class GrpcFiles:
    """The floor for a server: bytes over as many sockets as this store uses, in
    messages of the same size, into one file a socket, and back."""

    def __init__(self, directory: Path, *pair: Path, ca: Path | None = None) -> None:
        self._directory = directory
        self._server, address = _served(directory, *pair)
        self.pids: Sequence[int] = [self._server.pid]
        self._channels = [self._dialed(address, ca) for _ in range(STREAMS)]
        self._threads = ThreadPoolExecutor(STREAMS)
        self._sizes: dict[str, int] = {}

    def save(self, step: int, state: State) -> None:
        shards = list(_shards(state))
        share = -(-sum(map(len, shards)) // STREAMS)
        futures = [
            self._threads.submit(self._put, f"{step}-{number}", channel, pieces)
            for number, (channel, pieces) in enumerate(
                zip(self._channels, _shares(shards, share), strict=False)
            )
        ]
        for future in futures:
            future.result()
        sync(self._directory)

    def restore(self, step: int, target: Target) -> Any:
        del target
        return list(self._threads.map(self._got, self._names(step), self._channels))

    def remove(self, *steps: int) -> None:
        """Removes steps."""
        for name in [name for step in steps for name in self._names(step)]:
            (self._directory / name).unlink()
            del self._sizes[name]

    def close(self) -> None:
        self._threads.shutdown()
        for channel in self._channels:
            channel.close()
        self._server.kill()
        self._server.wait()

    def _names(self, step: int) -> list[str]:
        return sorted(name for name in self._sizes if name.startswith(f"{step}-"))

    def _dialed(self, address: str, ca: Path | None) -> grpc.Channel:
        options = [("grpc.use_local_subchannel_pool", 1)]  # a socket each
        if ca is None:
            return grpc.insecure_channel(address, options)
        credentials = grpc.ssl_channel_credentials(ca.read_bytes())
        return grpc.secure_channel(address, credentials, options)

    def _put(self, name: str, channel: grpc.Channel, pieces: list[memoryview]) -> None:
        put: Any = channel.stream_unary(f"/{raw_grpc.SERVICE}/Put")
        answer = put(chain([name.encode()], _packed(pieces)))
        self._sizes[name] = int.from_bytes(answer, "little")

    def _got(self, name: str, channel: grpc.Channel) -> "NDArray[np.uint8]":
        get: Any = channel.unary_stream(f"/{raw_grpc.SERVICE}/Get")
        buffer, at = np.empty(self._sizes[name], np.uint8), 0
        for message in get(name.encode()):
            buffer[at : at + len(message)] = np.frombuffer(message, np.uint8)
            at += len(message)
        assert at == len(buffer)
        return buffer


class GrpcFilesTls(GrpcFiles):
    """The same over TLS."""

    def __init__(self, directory: Path) -> None:
        authority = Authority(directory)
        pair = authority.issue("server", "127.0.0.1", "localhost")
        super().__init__(
            directory, pair.certificate, pair.key, ca=authority.certificate
        )


def _shares(shards: list[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Cuts the concatenation of shards into shares of a size."""
    share: list[memoryview] = []
    left = size
    for shard in shards:
        while len(shard) > left:
            yield [*share, shard[:left]]
            shard, share, left = shard[left:], [], size  # noqa: PLW2901 - the rest
        share.append(shard)
        left -= len(shard)
    yield share


def _packed(pieces: list[memoryview]) -> Iterator[bytes]:
    """Yields full messages; small pieces share one."""
    for message in _shares(pieces, raw_grpc.MESSAGE_BYTES):
        yield b"".join(message)


class Memory:
    """The floor for memory: one copy, into memory that was touched by the first save of
    as many bytes."""

    pids: Sequence[int] = ()

    def __init__(self, directory: Path) -> None:
        del directory
        self._held = np.empty((2, 0), np.uint8)

    def save(self, step: int, state: State) -> None:
        del step
        shards = list(_shards(state))
        size = sum(map(len, shards))
        if self._held.shape[1] != size:
            self._held = np.ones((2, size), np.uint8)
        at = 0
        for shard in shards:
            self._held[0, at : at + len(shard)] = shard
            at += len(shard)

    def restore(self, step: int, target: Target) -> Any:
        del step, target
        self._held[1] = self._held[0]
        return self._held[1]

    def remove(self, *steps: int) -> None:
        """Does nothing: a save replaces the one before."""

    def close(self) -> None:
        pass


class NewMemory(Memory):
    """The floor for a copy into memory that the process has not touched before."""

    def save(self, step: int, state: State) -> None:
        self._held = np.empty((2, 0), np.uint8)
        size = sum(map(len, _shards(state)))
        self._held = np.empty((2, size), np.uint8)
        super().save(step, state)


def _bytes_of(array: "NDArray[Any]") -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _close(file: Any) -> None:
    os.fsync(file.fileno())
    file.close()


FLOORS: Final[Mapping[str, Maker]] = {
    "memcpy": Memory,
    "memcpy-new": NewMemory,
    "files": RawFiles,
    "sums": SummedFiles,
    "sums-threads": SummedByThreads,
    "copies-threads": CopiedByThreads,
    "grpc": RawGrpc,
    "grpc-files": GrpcFiles,
    "grpc-files-tls": GrpcFilesTls,
}
"""Floors by name."""
