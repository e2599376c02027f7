"""The peers: other libraries that save states, called as their users do."""

import re
import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import jax
import ml_dtypes
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from benchmarks.speed.changing import State
from benchmarks.speed.contenders import Maker, NotInstalledError, Target
from benchmarks.speed.files import sync


class Orbax:
    """Orbax with its defaults."""

    pids: Sequence[int] = ()
    options: Mapping[str, Any] = {}

    def __init__(self, directory: Path) -> None:
        import orbax.checkpoint as ocp

        self._ocp, self._directory = ocp, directory
        handler = ocp.PyTreeCheckpointHandler(**self.options)
        self._checkpointer = ocp.AsyncCheckpointer(handler)
        self.returned = 0.0

    def save(self, step: int, state: State) -> None:
        args = self._ocp.args.PyTreeSave(state)
        self._checkpointer.save(self._directory / str(step), args=args)
        self.returned = time.perf_counter()
        self._checkpointer.wait_until_finished()

    def restore(self, step: int, target: Target) -> Any:
        item = dict(target)
        how = self._ocp.checkpoint_utils.construct_restore_args(item)
        args = self._ocp.args.PyTreeRestore(item=item, restore_args=how)
        return self._checkpointer.restore(self._directory / str(step), args=args)

    def remove(self, *steps: int) -> None:
        """Removes steps."""
        for step in steps:
            shutil.rmtree(self._directory / str(step))

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
        sync(path)

    def restore(self, step: int, target: Target) -> Any:
        from safetensors.numpy import load_file

        found = load_file(self._directory / f"{step}.safetensors")
        placed = {k: jax.device_put(v, target[k].sharding) for k, v in found.items()}
        return jax.block_until_ready(placed)

    def close(self) -> None:
        pass


class JaxSerialization:
    """jax's ``pytree_serialization``."""

    pids: Sequence[int] = ()

    def __init__(self, directory: Path) -> None:
        _installed("flatbuffers")
        from jax.experimental.array_serialization import pytree_serialization

        self._serialization, self._directory = pytree_serialization, directory

    def save(self, step: int, state: State) -> None:
        self._serialization.save(state, self._directory / str(step))

    def restore(self, step: int, target: Target) -> Any:
        shardings = {key: leaf.sharding for key, leaf in target.items()}
        found = self._serialization.load(self._directory / str(step), shardings)
        return jax.block_until_ready(found)

    def close(self) -> None:
        pass


class TorchDistributed:
    """``torch.distributed.checkpoint``, by one process, the leaves gathered."""

    pids: Sequence[int] = ()

    def __init__(self, directory: Path) -> None:
        self._torch = _installed("torch")
        self._checkpoint = _installed("torch.distributed.checkpoint")
        self._directory = directory
        # jax's arrays are read-only, and torch only reads them
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")

    def save(self, step: int, state: State) -> None:
        tensors = {key: self._tensor(np.asarray(leaf)) for key, leaf in state.items()}
        self._checkpoint.save(tensors, checkpoint_id=self._path(step), no_dist=True)

    def restore(self, step: int, target: Target) -> Any:
        arrays = {key: np.empty(leaf.shape, leaf.dtype) for key, leaf in target.items()}
        tensors = {key: self._tensor(array) for key, array in arrays.items()}
        self._checkpoint.load(tensors, checkpoint_id=self._path(step), no_dist=True)
        placed = {k: jax.device_put(v, target[k].sharding) for k, v in arrays.items()}
        return jax.block_until_ready(placed)

    def close(self) -> None:
        pass

    def _path(self, step: int) -> str:
        return str(self._directory / str(step))

    def _tensor(self, array: Any) -> Any:
        """Returns a tensor that shares the memory of an array."""
        if array.dtype != ml_dtypes.bfloat16:
            return self._torch.from_numpy(array)
        bits = self._torch.from_numpy(array.view(np.int16))
        return bits.view(self._torch.bfloat16)


class EasyDel:
    """EasyDeL's checkpoints, as its states and models write them."""

    pids: Sequence[int] = ()

    def __init__(self, directory: Path) -> None:
        self._checkpointer = _installed("eformer.serialization").Checkpointer
        self._directory = directory

    def save(self, step: int, state: State) -> None:
        leaf: Any = next(iter(state.values()))
        self._at(step).save_pytree(
            unflatten_dict(state, sep="/"), prefix="model", mesh=leaf.sharding.mesh
        )

    def restore(self, step: int, target: Target) -> Any:
        rules = [
            (f"^{re.escape(key)}$", leaf.sharding.spec) for key, leaf in target.items()
        ]
        leaf: Any = next(iter(target.values()))
        found, _ = self._at(step).load_pytree(
            mesh=leaf.sharding.mesh,
            prefix="model",
            partition_rules=rules,
            discover_latest=False,
        )
        return jax.block_until_ready(flatten_dict(found, sep="/"))

    def close(self) -> None:
        pass

    def _at(self, step: int) -> Any:
        path = str(self._directory / str(step))
        return self._checkpointer(path, save_interval=None, step_policies=[])


def _installed(name: str) -> Any:
    """Imports a module that is not in the lock files.

    Raises:
        NotInstalledError: It is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as e:
        raise NotInstalledError(name) from e


PEERS: Final[Mapping[str, Maker]] = {
    "orbax": Orbax,
    "orbax-raw": OrbaxUncompressed,
    "jax": JaxSerialization,
    "safetensors": Safetensors,
    "torch": TorchDistributed,
    "easydel": EasyDel,
}
"""Peers by name."""
