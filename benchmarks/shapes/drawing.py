"""Draws the leaves of each shape from a seed: dimensions, dtypes, shardings.

Decides only, and does not import jax: ``making.py`` makes arrays of it. The same seed
draws the same leaves; the bytes of a shard are drawn between 0.3 and 8 MB, so that the
logarithm is uniform.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

DEVICES: Final = 8

SHARD_BYTES: Final = (300_000, 8_000_000)
STATE_BYTES: Final = (200_000_000, 300_000_000)
QUICK_SHARD_BYTES: Final = (300_000, 2_000_000)
QUICK_STATE_BYTES: Final = (50_000_000, 75_000_000)

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2}

_PRIMES: Final = [
    n for n in range(101, 4001) if all(n % i for i in range(2, math.isqrt(n) + 1))
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """Shape, dtype and sharding of a leaf."""

    shape: tuple[int, ...]
    dtype: str
    mesh: tuple[int, ...]
    """Shape of the mesh of its devices, which are the first ones."""
    split: tuple[int | None, ...]
    """Axis of the mesh that splits each dimension; None: no axis does."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the leaf, replicas not counted."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def shard_bytes(self) -> int:
        """Bytes of one shard."""
        parts = math.prod(self.mesh[axis] for axis in self.split if axis is not None)
        return self.size_bytes // parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A shape of states that the benchmark draws."""

    says: str
    """One line of description."""
    leaf: Callable[[Random, float], Leaf]
    """Draws a leaf with shards of about so many bytes."""
    judged: Literal["size", "leaves", "saves"] = "size"
    """Bars that judge it."""
    saves: int = 1
    """Saves of a round, in a loop; more than one: a loop of small checkpoints."""
    quick_saves: int = 1


def draw(name: str, seed: int, *, is_quick: bool) -> dict[str, Leaf]:
    """Returns the leaves of a shape by key."""
    rng = Random(f"{seed} {name}")
    shape = SHAPES[name]
    if name == "one":
        return {"leaf": shape.leaf(rng, (1 << 26 if is_quick else 1 << 28) / DEVICES)}
    if name == "leaves":
        count = 500 if is_quick else 2_000
        return {f"part/{i % 100}/leaf/{i}": shape.leaf(rng, 0) for i in range(count)}
    if name == "small":
        return _filled(rng, shape, 300_000, (500, 8_000))
    if name == "three":
        return {f"leaf/{i}": shape.leaf(rng, 100_000) for i in range(3)}
    if is_quick:
        total = rng.uniform(*QUICK_STATE_BYTES)
        return _filled(rng, shape, total, QUICK_SHARD_BYTES)
    return _filled(rng, shape, rng.uniform(*STATE_BYTES), SHARD_BYTES)


def _filled(
    rng: Random, shape: Shape, total: float, shard_bytes: tuple[int, int]
) -> dict[str, Leaf]:
    """Draws leaves until they have so many bytes, the last of them in part."""
    least, most = shard_bytes
    leaves: dict[str, Leaf] = {}
    left = total
    while left > 0:
        # rounding dimensions may add or take a tenth
        size = math.exp(rng.uniform(math.log(least * 1.1), math.log(most * 0.9)))
        leaf = shape.leaf(rng, size)
        if leaves and leaf.size_bytes > 1.2 * left:
            if left < 0.1 * total:
                break
            continue
        leaves[f"layers/{len(leaves)}/kernel"] = leaf
        left -= leaf.size_bytes
    return leaves


def _multiple(value: float, of: int) -> int:
    """Returns the multiple of a number that is nearest to a value, but not 0."""
    return max(1, round(value / of)) * of


def _width(rng: Random, elements: float) -> int:
    """Draws the inner dimension of a shard: a multiple of 8 within a factor of four
    around the square root of its elements."""
    return _multiple(math.sqrt(elements) * 4 ** rng.uniform(-1, 1), 8)


def _rows(rng: Random, size: float, dtype: str = "float32") -> Leaf:
    elements = size / ITEM_BYTES[dtype]
    width = _width(rng, elements)
    rows = _multiple(elements / width, 1) * DEVICES
    return Leaf(shape=(rows, width), dtype=dtype, mesh=(DEVICES,), split=(0, None))


def _mesh(rng: Random, size: float, dtype: str = "float32") -> Leaf:
    mesh = rng.choice([(2, 4), (4, 2)])
    elements = size / ITEM_BYTES[dtype]
    width = _width(rng, elements)
    rows = _multiple(elements / width, 1)
    shape = (rows * mesh[0], width * mesh[1])
    return Leaf(shape=shape, dtype=dtype, mesh=mesh, split=(0, 1))


def _inner(rng: Random, size: float, dtype: str = "float32") -> Leaf:
    elements = size / ITEM_BYTES[dtype]
    width = _width(rng, elements)
    shape = (_multiple(elements / width, 1), width * DEVICES)
    return Leaf(shape=shape, dtype=dtype, mesh=(DEVICES,), split=(None, 0))


def _replicated(rng: Random, size: float) -> Leaf:
    elements = size / ITEM_BYTES["float32"]
    width = _width(rng, elements)
    shape = (_multiple(elements / width, 1), width)
    return Leaf(shape=shape, dtype="float32", mesh=(DEVICES,), split=(None, None))


def _scan(rng: Random, size: float) -> Leaf:
    """A stack [layers, d, h], with d or h sharded."""
    layers = rng.randint(4, 24)
    one = rng.choice([_rows, _inner])(rng, size / layers)
    return Leaf(
        shape=(layers, *one.shape),
        dtype=one.dtype,
        mesh=one.mesh,
        split=(None, *one.split),
    )


def _mixed(rng: Random, size: float) -> Leaf:
    kind = rng.choice([_rows, _mesh, _inner])
    return kind(rng, size, rng.choice(["float32", "bfloat16"]))


def _odd(rng: Random, size: float) -> Leaf:
    """Primes as dimensions; one of them is sharded over 3, 5 or 7 devices."""
    dtype = rng.choice(["float32", "bfloat16"])
    count = rng.choice([3, 5, 7])
    elements = size / ITEM_BYTES[dtype]
    width = _prime(_width(rng, elements))
    sides = [_prime(elements / width), width]
    at = rng.randrange(2)
    sides[at] *= count
    split = (0, None) if at == 0 else (None, 0)
    return Leaf(shape=(*sides,), dtype=dtype, mesh=(count,), split=split)


def _prime(near: float) -> int:
    return min(_PRIMES, key=lambda prime: abs(prime - near))


def _tiny(rng: Random, size: float) -> Leaf:
    """64 to 4,096 bytes on one device: shards would count for more than leaves."""
    del size
    length = rng.randint(16, 1024)
    return Leaf(shape=(length,), dtype="float32", mesh=(1,), split=(None,))


def _whole(rng: Random, size: float) -> Leaf:
    shape = (int(size * rng.uniform(0.8, 1.2)) // ITEM_BYTES["float32"],)
    return Leaf(shape=shape, dtype="float32", mesh=(1,), split=(None,))


SHAPES: Final[Mapping[str, Shape]] = {
    "rows": Shape(says="matrices, their rows sharded over 8 devices", leaf=_rows),
    "mesh": Shape(says="matrices, both sides sharded on a mesh", leaf=_mesh),
    "inner": Shape(says="matrices, the last dimension sharded", leaf=_inner),
    "replicated": Shape(says="matrices, whole on all devices", leaf=_replicated),
    "scan": Shape(says="stacks [layers, d, h], d or h sharded", leaf=_scan),
    "mixed": Shape(says="float32 and bfloat16, sharded in any way", leaf=_mixed),
    "odd": Shape(says="primes, sharded over 3, 5 or 7 devices", leaf=_odd),
    "leaves": Shape(
        says="many small leaves on one device", leaf=_tiny, judged="leaves"
    ),
    "one": Shape(says="one large leaf, its rows sharded", leaf=_rows),
    "small": Shape(
        says="small checkpoints, saved in a loop",
        leaf=_rows,
        judged="saves",
        saves=50,
        quick_saves=20,
    ),
    "three": Shape(
        says="the same on one device",
        leaf=_whole,
        judged="saves",
        saves=50,
        quick_saves=20,
    ),
}
"""Shapes by name."""
