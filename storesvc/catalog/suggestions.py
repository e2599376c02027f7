"""Composes the errors of runs, checkpoints and tags that do not exist, with the nearest
existing ones."""

import difflib
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from storesvc.catalog.row_lookup import or_damage, rows
from storesvc.errors import (
    CheckpointNotFoundError,
    RunNotFoundError,
    TagNotFoundError,
)
from storesvc.format.names import LATEST, CheckpointName, RunName, TagName
from storesvc.storage.bucket import Generation
from storesvc.storage.hedged_calls import AT_ONCE, each
from storesvc_proto.v1 import bucket_pb2 as pb

_NEAREST: Final = 3
"""Maximum suggestions."""

_SIMILARITY: Final = 0.5
"""Minimum ratio of ``difflib`` between two similar names."""


def run_not_found(name: RunName, existing: Iterable[RunName]) -> RunNotFoundError:
    """Returns the error of a run that has no record, or has nothing but its record.

    Args:
        name: The run.
        existing: Runs of its namespace that have a record. Runs of others must not be
            named to a caller that may not know them.
    """
    others = [*existing]
    if name in others:  # a save has begun once
        return RunNotFoundError(
            f"run {name} has no checkpoint: none was committed yet, or all were "
            "purged; save one",
            run=str(name),
            nearest="",
        )
    names = [*map(str, others)]
    nearest = difflib.get_close_matches(
        str(name), names, n=_NEAREST, cutoff=_SIMILARITY
    )
    known = f"nearest: {', '.join(nearest)}" if nearest else "no run is similar"
    return RunNotFoundError(
        f"run {name} does not exist ({known}); list the runs to see all",
        run=str(name),
        nearest=",".join(nearest),
    )


async def checkpoint_not_found(
    name: CheckpointName,
    steps: Callable[[], Awaitable[list[int]]],
    committed: Callable[[int], Awaitable[pb.CheckpointRecord | None]],
) -> CheckpointNotFoundError:
    """Returns the error of a checkpoint that does not exist.

    Args:
        name: The checkpoint.
        steps: Returns the steps of its run that have a slot.
        committed: Returns the committed checkpoint of a step; None if there is none.
    """
    if name.which == LATEST:
        return CheckpointNotFoundError(
            f"{name.run} has no committed checkpoint yet; save one",
            run=str(name.run),
            nearest="",
        )
    if isinstance(name.which, str):
        return CheckpointNotFoundError(
            f"{name}: the tag points to a purged checkpoint; point it at another step",
            run=str(name.run),
            nearest="",
        )
    wanted = name.which
    rest = sorted(await steps(), key=lambda step: abs(step - wanted))
    found: list[int] = []
    while rest and len(found) < _NEAREST:
        batch, rest = rest[:_NEAREST], rest[_NEAREST:]
        slots = await each(lambda step: or_damage(committed(step)), batch)
        found += [s.step for s in slots if isinstance(s, pb.CheckpointRecord)]
    near = sorted(found[:_NEAREST])
    return CheckpointNotFoundError(
        f"{name} does not exist; the nearest steps of {name.run} are "
        f"{', '.join(map(str, near)) or 'none'}",
        run=str(name.run),
        step=str(wanted),
        nearest=",".join(map(str, near)),
    )


async def tag_not_found(
    name: TagName,
    existing: Iterable[str],
    read: Callable[[TagName], Awaitable[tuple[pb.TagRecord, Generation] | None]],
) -> TagNotFoundError:
    """Returns the error of a tag that does not exist.

    Args:
        name: The tag.
        existing: Names of its run's tags, deleted ones included.
        read: Reads the record of a tag.
    """
    similar = difflib.get_close_matches(
        name.tag, existing, n=AT_ONCE, cutoff=_SIMILARITY
    )
    names = [TagName(name.run, tag) for tag in similar]
    found = await rows(read, names, limit=len(names))
    # Deleted and damaged tags are no suggestions.
    live = [
        other.tag for other, tag in found if isinstance(tag, tuple) and tag[0].upload
    ]
    nearest = live[:_NEAREST]
    return TagNotFoundError(
        f"{name.run} has no tag {name.tag} (nearest: {', '.join(nearest) or 'none'}); "
        "list its tags to see all",
        run=str(name.run),
        tag=name.tag,
        nearest=",".join(nearest),
    )
