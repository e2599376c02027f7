"""The checkpoint that a save will create, except its tree.

Its attributes are checked before anything is copied or sent.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import SupportsFloat, SupportsIndex

from storesvc.format.names import MAX_STEP, CheckpointName, RunName
from storesvc_client._values.arguments import (
    DurationLike,
    as_timedelta,
    checked_labels,
    checked_metrics,
)
from storesvc_client.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The attributes of a checkpoint, except its tree."""

    run: RunName
    step: int
    labels: Mapping[str, str]
    metrics: Mapping[str, float]
    base: CheckpointName | None
    """Checkpoint whose chunks need not be sent again."""
    lease: timedelta
    """Lease of the upload."""

    def __str__(self) -> str:
        return f"{self.run}@{self.step}"


def checked_step(run: str, step: SupportsIndex) -> int:
    """Returns the step of a save as an int.

    Raises:
        InvalidRequestError: It is no integer, or out of range.
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_STEP:
        raise InvalidRequestError(
            f"save to {run}: expected a step in [0, 2^63 - 1], got {step!r}"
        )
    return number


def checked_description(
    run: RunName,
    step: int,
    *,
    metrics: Mapping[str, SupportsFloat] | None,
    labels: Mapping[str, str] | None,
    base: CheckpointName | None,
    lease: DurationLike,
) -> Description:
    """Returns the description of a checkpoint.

    Raises:
        InvalidRequestError: A metric, a label or the lease is invalid.
    """
    what = f"save to {run}"
    return Description(
        run=run,
        step=step,
        labels=checked_labels(what, labels),
        metrics=checked_metrics(what, metrics),
        base=base,
        lease=as_timedelta(f"{what}: lease=", lease),
    )
