"""Who saves and restores: this store, its peers, and the floors below them all."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
import jax
import numpy as np
from numpy.typing import NDArray

import storesvc_client as store
from tests.bench.speed import raw_grpc
from tests.bench.speed.works import State
from tests.server_process import ServerProcess

Target = Mapping[str, jax.ShapeDtypeStruct]

PART_BYTES: Final = 64 << 20
"""Of a file of the floor."""


class Contender(Protocol):
    """Saves and restores states below a directory of its own."""

    pids: Sequence[int]
    """Its other processes."""

    def save(self, step: int, state: State) -> None:
        """Saves a state; returns once it would survive a power cut."""

    def restore(self, step: int, target: Target) -> Any:
        """Returns a state, where the target says."""

    def close(self) -> None:
        """Ends its processes."""


class _Ours:
    """This store, by its client."""

    def __init__(self, target: str) -> None:
        self._client = store.connect(target)
        self._run = self._client.run("bench/speed")

    def save(self, step: int, state: State) -> None:
        self._run.save(step, state, base=None).result()

    def restore(self, step: int, target: Target) -> Any:
        return self._run.restore(step, like=target)

    def close(self) -> None:
        self._client.close()


class Streamed(_Ours):
    """This store: a server, and a client over a socket."""

    def __init__(self, directory: Path) -> None:
        self._server = ServerProcess(directory / "store", directory)
        self._server.start()
        self.pids: Sequence[int] = [self._server.pid]
        super().__init__(self._server.address)

    def close(self) -> None:
        super().close()
        self._server.stop()


class Embedded(_Ours):
    """This store, inside the process."""

    pids: Sequence[int] = ()

    def __init__(self, directory: Path) -> None:
        super().__init__((directory / "store").as_uri())


class Orbax:
    """Orbax as it comes."""

    pids: Sequence[int] = ()
    options: Mapping[str, Any] = {}

    def __init__(self, directory: Path) -> None:
        import orbax.checkpoint as ocp

        self._ocp, self._directory = ocp, directory
        handler = ocp.PyTreeCheckpointHandler(**self.options)
        self._checkpointer = ocp.AsyncCheckpointer(handler)

    def save(self, step: int, state: State) -> None:
        args = self._ocp.args.PyTreeSave(state)
        self._checkpointer.save(self._directory / str(step), args=args)
        self._checkpointer.wait_until_finished()

    def restore(self, step: int, target: Target) -> Any:
        item = dict(target)
        how = self._ocp.checkpoint_utils.construct_restore_args(item)
        args = self._ocp.args.PyTreeRestore(item=item, restore_args=how)
        return self._checkpointer.restore(self._directory / str(step), args=args)

    def close(self) -> None:
        self._checkpointer.close()


class OrbaxUncompressed(Orbax):
    """Orbax with zarr3 and without compression."""

    options = {"use_zarr3": True, "use_compression": False}  # noqa: RUF012 - as its base


class Safetensors:
    """safetensors: one file, the leaves gathered."""

    pids: Sequence[int] = ()

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def save(self, step: int, state: State) -> None:
        from safetensors.numpy import save_file

        path = self._directory / f"{step}.safetensors"
        save_file({key: np.asarray(leaf) for key, leaf in state.items()}, path)
        _sync(path)

    def restore(self, step: int, target: Target) -> Any:
        from safetensors.numpy import load_file

        found = load_file(self._directory / f"{step}.safetensors")
        placed = {k: jax.device_put(v, target[k].sharding) for k, v in found.items()}
        return jax.block_until_ready(placed)

    def close(self) -> None:
        pass


class RawFiles:
    """The floor of files: the bytes of each shard, written and read, no more."""

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
        _sync(self._directory)

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
    """The floor of sockets: the bytes of each shard, sent and received, no more."""

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
    """The floor of memory: one copy."""

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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


OURS: Final[Mapping[str, Callable[[Path], Contender]]] = {
    "streamed": Streamed,
    "embedded": Embedded,
}
PEERS: Final[Mapping[str, Callable[[Path], Contender]]] = {
    "orbax": Orbax,
    "orbax-raw": OrbaxUncompressed,
    "safetensors": Safetensors,
}
FLOORS: Final[Mapping[str, Callable[[Path], Contender]]] = {
    "memcpy": Memory,
    "files": RawFiles,
    "grpc": RawGrpc,
}
CONTENDERS: Final[Mapping[str, Callable[[Path], Contender]]] = {
    **FLOORS,
    **OURS,
    **PEERS,
}
"""By name."""
