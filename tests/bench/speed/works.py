"""The states that are saved and restored.

A state is a flat mapping of keys to ``jax.Array``, spread over eight devices; its bits
are drawn, so that nothing of it can be compressed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

State: TypeAlias = dict[str, jax.Array]

LAYERS: Final = 8
WIDTH: Final = 1024
HIDDEN: Final = 4096
WORDS: Final = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is saved, and onto what it is restored."""

    saved: Callable[[], State]
    small: Callable[[], State]
    """The like of it, to warm up with."""
    restored_on: Callable[[Mapping[str, Any]], "dict[str, NamedSharding]"]
    """Where each leaf shall lie after the restore, by the shape of each."""


def _fsdp(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """The first dimension that eight devices divide, over all of them."""
    size = mesh.devices.size
    at = next((i for i, n in enumerate(shape) if n % size == 0 and n), None)
    axes = [None] * len(shape) if at is None else [None] * at + ["fsdp"]
    return NamedSharding(mesh, PartitionSpec(*axes))


def fsdp(shapes: Mapping[str, tuple[int, ...]]) -> "dict[str, NamedSharding]":
    """Returns the sharding of each leaf over all devices."""
    mesh = jax.make_mesh((len(jax.devices()),), ("fsdp",))
    return {key: _fsdp(mesh, shape) for key, shape in shapes.items()}


def tensor_parallel(
    shapes: Mapping[str, tuple[int, ...]],
) -> "dict[str, NamedSharding]":
    """Returns the sharding over four devices by the last dimension, twice over."""
    mesh = jax.make_mesh((2, 4), ("dp", "tp"))
    found = {}
    for key, shape in shapes.items():
        splits = bool(shape) and shape[-1] % 4 == 0
        axes = [None] * (len(shape) - 1) + ["tp"] if splits else []
        found[key] = NamedSharding(mesh, PartitionSpec(*axes))
    return found


def one_device(shapes: Mapping[str, tuple[int, ...]]) -> "dict[str, NamedSharding]":
    """Returns the sharding that keeps each leaf whole on the first device."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("one",))
    return {key: NamedSharding(mesh, PartitionSpec()) for key in shapes}


def _model(
    layers: int, width: int, hidden: int, words: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of a decoder's parameters."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (words, width),
        "norm": (width,),
        "head": (width, words),
    }
    for layer in range(layers):
        for name in ("q", "k", "v", "o"):
            shapes[f"layers/{layer}/attention/{name}"] = (width, width)
        shapes[f"layers/{layer}/mlp/up"] = (width, hidden)
        shapes[f"layers/{layer}/mlp/gate"] = (width, hidden)
        shapes[f"layers/{layer}/mlp/down"] = (hidden, width)
        for name in ("attention", "mlp"):
            shapes[f"layers/{layer}/{name}/norm"] = (width,)
    return shapes


def _training_state(shapes: Mapping[str, tuple[int, ...]]) -> State:
    """Parameters in float32, and both moments of Adam in bfloat16."""
    rng = np.random.default_rng(0)
    parts = {"params": np.float32, "mu": ml_dtypes.bfloat16, "nu": ml_dtypes.bfloat16}
    drawn = {
        f"{part}/{key}": _drawn(rng, shape, np.dtype(dtype))
        for part, dtype in parts.items()
        for key, shape in shapes.items()
    }
    placed = fsdp({key: leaf.shape for key, leaf in drawn.items()})
    return _placed(drawn, placed)


def _drawn(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: "np.dtype[Any]"
) -> Any:
    """An array of drawn bits, all of them finite numbers."""
    drawn = rng.bytes(int(np.prod(shape)) * dtype.itemsize)
    bits = np.frombuffer(drawn, f"u{dtype.itemsize}").copy()
    # one bit of the exponent is 0: no NaN, which some compare unequal to itself
    bits &= np.array(~np.int64(1 << (8 * dtype.itemsize - 3))).astype(bits.dtype)
    return bits.view(dtype).reshape(shape)


def _placed(drawn: Mapping[str, Any], placed: "Mapping[str, NamedSharding]") -> State:
    state = {key: jax.device_put(leaf, placed[key]) for key, leaf in drawn.items()}
    jax.block_until_ready(state)
    return state


def _many(leaves: int) -> State:
    rng, dtype = np.random.default_rng(0), np.dtype(np.float32)
    drawn = {f"leaf/{i}": _drawn(rng, (64,), dtype) for i in range(leaves)}
    return _placed(drawn, fsdp({key: leaf.shape for key, leaf in drawn.items()}))


def _lm() -> State:
    return _training_state(_model(LAYERS, WIDTH, HIDDEN, WORDS))


def _small_lm() -> State:
    return _training_state(_model(1, 128, 512, 1000))


WORKS: Final[Mapping[str, Work]] = {
    "lm": Work(saved=_lm, small=_small_lm, restored_on=fsdp),
    "reshard": Work(saved=_lm, small=_small_lm, restored_on=tensor_parallel),
    "whole": Work(saved=_lm, small=_small_lm, restored_on=one_device),
    "many": Work(
        saved=lambda: _many(50_000), small=lambda: _many(50), restored_on=fsdp
    ),
}
"""By name."""
