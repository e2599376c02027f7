"""Makes leaves, checkpoints, tags and holds of runs that do not exist."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Grid
from storesvc.format.trees import SavedSharding
from storesvc_client._values.models import Checkpoint, HoldInfo, LeafInfo, Tag

START = datetime(2026, 7, 1, tzinfo=UTC)


def checkpoint(
    step: int,
    *,
    metrics: Mapping[str, float] | None = None,
    pinned: bool = False,
    deleted: bool = False,
    minutes: float | None = None,
) -> Checkpoint:
    """Returns a checkpoint that was committed some minutes after the start."""
    moment = START + timedelta(minutes=step if minutes is None else minutes)
    return Checkpoint(
        run="a/b",
        step=step,
        uid=f"uid-{step}",
        create_time=moment,
        commit_time=moment,
        labels={},
        metrics=metrics or {},
        size_bytes=8,
        stored_bytes=8,
        own_bytes=8,
        leaf_count=1,
        item_count=0,
        chunk_count=1,
        pinned=pinned,
        delete_time=START if deleted else None,
        purge_time=None,
        etag="",
        key_space="",
    )


def tag(name: str, step: int) -> Tag:
    """Returns a tag of the checkpoint at a step."""
    return Tag(
        name=name,
        step=step,
        uid=f"uid-{step}",
        protected=False,
        create_time=START,
        update_time=START,
        etag="",
    )


def hold(owner: str, step: int) -> HoldInfo:
    """Returns a hold on the checkpoint at a step."""
    return HoldInfo(
        id="hold",
        step=step,
        uid=f"uid-{step}",
        owner=owner,
        ttl=timedelta(minutes=1),
        create_time=START,
        expire_time=START + timedelta(minutes=1),
    )


def leaf(
    key: str,
    shape: Sequence[int] = (1,),
    dtype: str = "uint8",
    *,
    chunk_shape: Sequence[int] = (),
    sharding: SavedSharding | None = None,
) -> LeafInfo:
    """Returns a leaf, of one chunk if no shape of chunks is given."""
    chunks = tuple(chunk_shape or (max(n, 1) for n in shape))
    grid = Grid(tuple(shape), chunks, DTYPES[dtype].itemsize)
    return LeafInfo(
        key=key,
        path=tuple(key.split("/")),
        path_kinds="a" * len(key.split("/")),
        kind="array",
        dtype=dtype,
        shape=tuple(shape),
        chunk_shape=chunks,
        chunk_count=grid.count,
        size_bytes=grid.leaf_bytes,
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
