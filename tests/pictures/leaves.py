"""Makes leaves of checkpoints that do not exist."""

import math
from collections.abc import Sequence

from storesvc.format.trees import SavedSharding
from storesvc_client._values.models import LeafInfo

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "uint8": 1}


def leaf(
    key: str,
    shape: Sequence[int] = (1,),
    dtype: str = "uint8",
    *,
    sharding: SavedSharding | None = None,
) -> LeafInfo:
    """Returns a leaf of one chunk."""
    return LeafInfo(
        key=key,
        path=tuple(key.split("/")),
        path_kinds="",
        kind="array",
        dtype=dtype,
        shape=tuple(shape),
        chunk_shape=tuple(max(n, 1) for n in shape),
        chunk_count=int(0 not in shape),
        size_bytes=math.prod(shape) * ITEM_BYTES[dtype],
        sharding=sharding,
        prng_impl=None,
    )


def transformer(layers: int, width: int = 64) -> list[LeafInfo]:
    """Returns parameters and moments of a small language model."""
    return [
        leaf(f"{top}/{key}", shape, dtype)
        for top, dtype in (("params", "bfloat16"), ("mu", "float32"), ("nu", "float32"))
        for key, shape in _keys(layers, width)
    ]


def _keys(layers: int, width: int) -> list[tuple[str, tuple[int, ...]]]:
    found = [("embed/embedding", (500, width)), ("norm/scale", (width,))]
    for layer in range(layers):
        found += [
            (f"layers/{layer}/attn/q/kernel", (width, width)),
            (f"layers/{layer}/attn/o/kernel", (width, width)),
            (f"layers/{layer}/mlp/up/kernel", (width, 4 * width)),
            (f"layers/{layer}/mlp/down/kernel", (4 * width, width)),
            (f"layers/{layer}/norm/scale", (width,)),
        ]
    return found
