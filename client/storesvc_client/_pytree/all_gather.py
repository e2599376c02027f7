"""Exchanges bytes between the processes of a job over their devices."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from storesvc_client._chunks.buffers import Bytes
from storesvc_client.errors import UnavailableError


def all_gather(own: Bytes, processes: Sequence[int]) -> Sequence[Bytes]:
    """Implements ``spread.Gather`` with the first device of each process.

    Raises:
        UnavailableError: A process died during the exchange, or cannot be reached.
    """
    mesh, together = _program(tuple(processes))
    here = mesh.devices[processes.index(jax.process_index())]
    try:
        brought = jax.make_array_from_single_device_arrays(
            (len(processes), len(own)),
            NamedSharding(mesh, PartitionSpec("process")),
            [jax.device_put(own[None], here)],
        )
        rows: Bytes = np.asarray(together(brought).addressable_data(0))
    except (JaxRuntimeError, ValueError) as e:  # the type depends on the cause
        cause = str(e).partition("\n")[0]
        raise UnavailableError(
            f"the exchange of bytes between {len(processes)} processes of this "
            f"jax.distributed job failed: {cause}; start the job again"
        ) from e
    return list(rows)


@lru_cache(maxsize=64)
def _program(processes: tuple[int, ...]) -> tuple[Mesh, Any]:
    """Returns the mesh of the devices that take part, and the program that they run."""
    first: dict[int, Any] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    mesh = Mesh(np.array([first[process] for process in processes]), ("process",))
    # Not device_put, which synchronizes all processes of the job, not only these.
    replicated = NamedSharding(mesh, PartitionSpec())
    return mesh, jax.jit(lambda rows: rows, out_shardings=replicated)
