"""Clients that receive every byte of a checkpoint, verify it, and drop it.

    python -m benchmarks.speed.reading HOST:PORT STEP CLIENTS

Prints "ready", waits for a line, and prints the bytes that all clients received. They
need no jax and little CPU, so that one machine can run many.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import grpc

import storesvc_client as store
from storesvc.format.checksums import crc32c
from storesvc.format.names import CheckpointName, RunName
from storesvc_proto.v1 import chunk_service_pb2 as api
from storesvc_proto.v1.chunk_service_pb2_grpc import ChunkServiceStub
from storesvc_proto.v1.upload_service_pb2 import ChunkFrame

CHUNKS_A_CALL: Final = 4096

RESIDUE: Final = crc32c(bytes(4))
"""CRC-32C of any data followed by its own checksum."""


def read(address: str, info: store.Checkpoint) -> int:
    """Reads a checkpoint on a new connection; returns the bytes received.

    Raises:
        ValueError: The checksum of a chunk is wrong.
    """
    name = CheckpointName(RunName.parse(info.run), info.step).resource
    options = [("grpc.use_local_subchannel_pool", 1)]
    received = 0
    with grpc.insecure_channel(address, options=options) as channel:
        stub = ChunkServiceStub(channel)
        for first in range(0, info.chunk_count, CHUNKS_A_CALL):
            chunks = range(first, min(first + CHUNKS_A_CALL, info.chunk_count))
            sums = dict.fromkeys(chunks, 0)
            request = api.ReadChunksRequest(name=name, uid=info.uid, chunk=chunks)
            for response in stub.ReadChunks(request):
                _take(response.frame.data, response.frame, sums)
                received += len(response.frame.data)
            if wrong := [chunk for chunk, end in sums.items() if end != RESIDUE]:
                raise ValueError(f"{name}: chunks {wrong[:3]} are damaged or missing")
    return received


def _take(data: bytes, frame: ChunkFrame, sums: dict[int, int]) -> None:
    """Adds the pieces of a frame to the checksums of their chunks."""
    view, at = memoryview(data), 0
    for chunk, length in zip(frame.chunk, frame.length, strict=True):
        sums[chunk] = crc32c(view[at : at + length], sums[chunk])
        at += length


def main() -> None:
    """Runs the clients in threads."""
    address, step, clients = sys.argv[1:4]
    with store.connect(address) as client:
        info = client.run("bench/speed").checkpoint(int(step))
    print("ready", flush=True)
    sys.stdin.readline()
    with ThreadPoolExecutor(int(clients)) as pool:
        found = pool.map(lambda _: read(address, info), range(int(clients)))
        print(sum(found))


if __name__ == "__main__":
    main()
