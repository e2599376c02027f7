"""Makes checkpoints, tags and holds of runs that do not exist."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from storesvc_client._values.models import Checkpoint, HoldInfo, Tag

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
