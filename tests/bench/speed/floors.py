"""The floors: times that no store on this machine can beat."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
from numpy.typing import NDArray

from tests.bench.speed import raw_grpc
from tests.bench.speed.contenders import Maker, Target
from tests.bench.speed.files import sync
from tests.bench.speed.states import State

PART_BYTES: Final = 64 << 20
"""Of a file."""


class RawFiles:
    """The floor for files: writes and reads the bytes of each shard, nothing else."""

    pids: Sequence[int] = ()

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def save(self, step: int, state: State) -> None:
        number, held, file = 0, PART_BYTES, None
        for leaf in state.values():
            for shard in leaf.addressable_shards:
                if shard.replica_id:
                    continue
                if held >= PART_BYTES:
                    if file is not None:
                        _close(file)
                    file = (self._directory / f"{step}-{number}").open(
                        "wb", buffering=0
                    )
                    number, held = number + 1, 0
                data = _bytes_of(np.asarray(shard.data))
                held += len(data)
                while data:
                    data = data[file.write(data) :] if file else data[:0]
        if file is not None:
            _close(file)
        sync(self._directory)

    def restore(self, step: int, target: Target) -> Any:
        found = []
        for path in sorted(self._directory.glob(f"{step}-*")):
            size = path.stat().st_size
            buffer = np.empty(size, np.uint8)
            with path.open("rb", buffering=0) as file:
                at = 0
                while at < size:
                    at += file.readinto(_bytes_of(buffer)[at:]) or 0
            found.append(buffer)
        return found

    def close(self) -> None:
        pass


class RawGrpc:
    """The floor for sockets: sends and receives the bytes of each shard, no more."""

    def __init__(self, directory: Path) -> None:
        ready = directory / "address"
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.speed.raw_grpc", str(ready)]
        )
        while not ready.exists():
            time.sleep(0.01)
        self.pids: Sequence[int] = [self._server.pid]
        self._channel = grpc.insecure_channel(ready.read_text())
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


def _messages(state: State) -> Iterator[bytes]:
    for leaf in state.values():
        for shard in leaf.addressable_shards:
            if shard.replica_id:
                continue
            data = _bytes_of(np.asarray(shard.data))
            for at in range(0, len(data), raw_grpc.MESSAGE_BYTES):
                yield bytes(data[at : at + raw_grpc.MESSAGE_BYTES])


class Memory:
    """The floor for memory: one copy."""

    pids: Sequence[int] = ()

    def __init__(self, directory: Path) -> None:
        del directory
        self._held: list[Any] = []

    def save(self, step: int, state: State) -> None:
        del step
        shards = [
            np.asarray(shard.data)
            for leaf in state.values()
            for shard in leaf.addressable_shards
            if not shard.replica_id
        ]
        self._held = [shard.copy() for shard in shards]

    def restore(self, step: int, target: Target) -> Any:
        del step, target
        return [shard.copy() for shard in self._held]

    def close(self) -> None:
        self._held = []


def _bytes_of(array: "NDArray[Any]") -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _close(file: Any) -> None:
    os.fsync(file.fileno())
    file.close()


FLOORS: Final[Mapping[str, Maker]] = {
    "memcpy": Memory,
    "files": RawFiles,
    "grpc": RawGrpc,
}
"""Floors by name."""
