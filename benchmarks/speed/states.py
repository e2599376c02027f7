"""The states that are saved and restored.

A state is a flat mapping of keys to ``jax.Array``, sharded over eight devices if they
divide it evenly. Its bits are random, so it cannot be compressed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.speed.changing import Changing

LAYERS: Final = 8
WIDTH: Final = 1024
HIDDEN: Final = 4096
WORDS: Final = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Makes the state; each call returns the same bits."""

    whole: Callable[[], Changing]
    small: Callable[[], Changing]
    """Makes a small state of the same kind, to warm up."""


def _fsdp(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Returns a sharding of the first dimension that eight devices divide evenly."""
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
    """Returns the sharding of the last dimension over four devices, in two replicas."""
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


def _training_state(shapes: Mapping[str, tuple[int, ...]]) -> Changing:
    """Parameters in float32, and both moments of Adam in bfloat16."""
    rng = np.random.default_rng(0)
    parts = {"params": np.float32, "mu": ml_dtypes.bfloat16, "nu": ml_dtypes.bfloat16}
    drawn = {
        f"{part}/{key}": random_bits(rng, shape, np.dtype(dtype))
        for part, dtype in parts.items()
        for key, shape in shapes.items()
    }
    placed = fsdp({key: leaf.shape for key, leaf in drawn.items()})
    return _placed(drawn, placed)


def random_bits(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: "np.dtype[Any]"
) -> Any:
    """Returns an array of random bits that are finite numbers."""
    drawn = rng.bytes(int(np.prod(shape)) * dtype.itemsize)
    bits = np.frombuffer(drawn, f"u{dtype.itemsize}").copy()
    # one bit of the exponent is 0: no NaN, which some compare unequal to itself
    bits &= np.array(~np.int64(1 << (8 * dtype.itemsize - 3))).astype(bits.dtype)
    return bits.view(dtype).reshape(shape)


def _placed(drawn: dict[str, Any], placed: "Mapping[str, NamedSharding]") -> Changing:
    return Changing((key, drawn.pop(key), placed[key]) for key in list(drawn))


def _many(leaves: int) -> Changing:
    rng, dtype = np.random.default_rng(0), np.dtype(np.float32)
    drawn = {f"leaf/{i}": random_bits(rng, (64,), dtype) for i in range(leaves)}
    return _placed(drawn, fsdp({key: leaf.shape for key, leaf in drawn.items()}))


def _lm() -> Changing:
    return _training_state(_model(LAYERS, WIDTH, HIDDEN, WORDS))


def _tiny() -> Changing:
    return _training_state(_model(1, 128, 512, 1000))


def _half() -> Changing:
    return _training_state(_model(3, WIDTH, HIDDEN, 6000))


def _middle() -> Changing:
    return _training_state(_model(2, 512, 2048, 4000))


def _experts(layers: int, width: int) -> Changing:
    """A mixture of experts: three tensors [E, d, h] a layer, and a router."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        for name in ("up", "gate", "down"):
            shapes[f"layers/{layer}/{name}"] = (16, width, 2 * width)
        shapes[f"layers/{layer}/router"] = (width, 16)
    rng, dtype = np.random.default_rng(0), np.dtype(ml_dtypes.bfloat16)
    drawn = {key: random_bits(rng, shape, dtype) for key, shape in shapes.items()}
    return _placed(drawn, fsdp(shapes))


def _uneven(words: int, width: int) -> Changing:
    """Leaves of odd dimensions, from a few KiB to 200 MB for 50,257 words."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (words, 1001), "head": (1001, words)}
    shapes |= {"table": (width - 2, 9999), "bias": (1025,), "scale": (33, 31)}
    for block in range(8):
        shapes[f"blocks/{block}/in"] = (width, 4097)
        shapes[f"blocks/{block}/out"] = (4095, width)
        shapes[f"blocks/{block}/norm"] = (4095,)
    rng = np.random.default_rng(0)
    dtypes = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]
    drawn = {
        key: random_bits(rng, shape, dtypes[i % 2])
        for i, (key, shape) in enumerate(shapes.items())
    }
    return _placed(drawn, {key: _fewer(shape) for key, shape in shapes.items()})


def _fewer(shape: tuple[int, ...]) -> NamedSharding:
    """Returns a sharding of the first dimension over as many devices as divide it."""
    count = next(n for n in (7, 5, 3, 1) if shape[0] % n == 0)
    mesh = Mesh(np.array(jax.devices()[:count]), ("some",))
    return NamedSharding(mesh, PartitionSpec("some"))


STATES: Final[Mapping[str, States]] = {
    "lm": States(whole=_lm, small=_tiny),
    "half": States(whole=_half, small=_tiny),
    "middle": States(whole=_middle, small=_tiny),
    "tiny": States(whole=_tiny, small=_tiny),
    "many": States(whole=lambda: _many(50_000), small=lambda: _many(50)),
    "moe": States(whole=lambda: _experts(20, 512), small=lambda: _experts(1, 64)),
    "uneven": States(
        whole=lambda: _uneven(50_257, 3003), small=lambda: _uneven(101, 21)
    ),
}
"""States by name."""
