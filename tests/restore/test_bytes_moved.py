"""A restore reads the bytes of the leaves that it returns, and little else."""

import math
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import storesvc_client as store
from storesvc.format.dtypes import DTYPES


class CountingWire:
    """Forwards connections to a server."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = [self._listening]
        self._threads: list[threading.Thread] = []
        self.received_bytes = 0
        """Bytes that the server sent."""
        self._lock = threading.Lock()
        self._start(self._accept)

    @property
    def address(self) -> str:
        """Address for clients."""
        return f"127.0.0.1:{self._listening.getsockname()[1]}"

    def close(self) -> None:
        """Breaks all connections."""
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(self._target)
                self._ends += [client, server]
                self._start(self._pass_on, client, server)
                self._start(self._pass_on, server, client)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 18):
                if source.getpeername() == self._target:
                    with self._lock:
                        self.received_bytes += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def _start(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()


@contextmanager
def counted(target: str) -> Iterator[CountingWire]:
    """Yields a proxy to a server."""
    wire = CountingWire(target)
    try:
        yield wire
    finally:
        wire.close()


MiB = 1 << 20
SAVED_STEP = 0


def sharded(shape: tuple[int, ...], *axes: str | None) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    values = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    array: jax.Array = jax.device_put(values, NamedSharding(mesh, PartitionSpec(*axes)))
    return array


def the_state() -> dict[str, Any]:
    """Returns 16 MiB of parameters and 16 MiB of other state."""
    return {
        "params": {
            "kernel": sharded((2048, 1024), "fsdp"),
            "embed": sharded((2 * MiB,)),
        },
        "moments": {
            "mu": sharded((2048, 1024), None, "fsdp"),
            "nu": sharded((2 * MiB,)),
        },
    }


@pytest.fixture(scope="module")
def wire(server_address: str) -> Iterator[CountingWire]:
    """A counting proxy to a server that stores ``the_state``."""
    with store.connect(server_address) as client:
        client.run("tests/moved").save(SAVED_STEP, the_state()).result()
    with counted(server_address) as wire:
        yield wire


@pytest.fixture
def wired(wire: CountingWire) -> Iterator[store.Run]:
    """A run behind the proxy."""
    with store.connect(wire.address) as client:
        yield client.run("tests/moved")


def stored_bytes(run: store.Run, prefix: str = "") -> int:
    """Returns the stored bytes of leaves: their chunks, with a checksum each."""
    return sum(
        leaf.chunk_count
        * (math.prod(leaf.chunk_shape) * DTYPES[leaf.dtype].itemsize + 4)
        for key, leaf in run.open(SAVED_STEP).leaves.items()
        if key.startswith(prefix)
    )


def check_moved(wire: CountingWire, run: store.Run, prefix: str, **how: Any) -> Any:
    """Restores; asserts that only the leaves of a prefix are read."""
    expected = stored_bytes(run, prefix)
    before = wire.received_bytes
    back = run.restore(SAVED_STEP, **how)
    moved = wire.received_bytes - before

    assert expected <= moved <= 1.05 * expected
    return back


@pytest.mark.parametrize("select", ["params/**", re.compile("^params/")], ids=str)
def test_unselected_leaves_are_not_read(
    wire: CountingWire, wired: store.Run, select: Any
) -> None:
    back = check_moved(wire, wired, "params/", select=select)

    assert {"params"} == set(back)
    np.testing.assert_array_equal(
        the_state()["params"]["embed"], back["params"]["embed"]
    )


def test_a_cast_restore_reads_the_saved_bytes(
    wire: CountingWire, wired: store.Run
) -> None:
    back = check_moved(wire, wired, "params/", select="params/**", cast="bfloat16")

    assert {jnp.dtype("bfloat16")} == {x.dtype for x in jax.tree.leaves(back)}


def test_initialised_leaves_read_no_bytes(wire: CountingWire, wired: store.Run) -> None:
    like = {"params": the_state()["params"], "lora": sharded((2 * MiB,), "fsdp")}

    back = check_moved(
        wire, wired, "params/", like=like, select="params/**", missing="keep"
    )

    assert back["lora"] is like["lora"]


@pytest.mark.slow
def test_a_sharded_state_is_read_once_for_one_device(
    wire: CountingWire, wired: store.Run
) -> None:
    one = SingleDeviceSharding(jax.devices()[3])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), the_state()
    )

    back = check_moved(wire, wired, "", like=like)

    np.testing.assert_array_equal(the_state()["moments"]["mu"], back["moments"]["mu"])
    assert {one} == {x.sharding for x in jax.tree.leaves(back)}


@pytest.mark.slow
def test_a_replicated_state_is_read_once_for_all_devices(
    wire: CountingWire, wired: store.Run
) -> None:
    mesh = Mesh(np.array(jax.devices()), ("all",))

    back = check_moved(wire, wired, "", mesh=mesh, rules=[("", PartitionSpec())])

    np.testing.assert_array_equal(the_state()["moments"]["nu"], back["moments"]["nu"])
