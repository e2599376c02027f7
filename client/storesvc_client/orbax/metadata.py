"""Metadata of a run, and what the metadata of its steps, of Orbax's classes, holds."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from storesvc_client._api.run import Run
from storesvc_client.errors import InvalidRequestError, NotFoundError

if TYPE_CHECKING:
    from storesvc_client._values.values import Checkpoint

_LABEL: Final = "orbax/metadata"
"""Label of a run with the metadata that its first manager was created with."""


def timestamps(found: "Checkpoint") -> dict[str, int]:
    """Returns the start and the commit of a save in nanoseconds."""
    return {
        "init_timestamp_nsecs": int(found.create_time.timestamp() * 1e9),
        "commit_timestamp_nsecs": int(found.commit_time.timestamp() * 1e9),
    }


def numbers_of(place: str, metrics: Any, best: str | None) -> dict[str, float]:
    """Returns the metrics that retention policies can rank by: the numbers at the top.

    Args:
        place: Name of the step, for messages.
        metrics: What the caller passes; None: no metrics.
        best: Metric of ``best_fn``; None if there is none.

    Raises:
        InvalidRequestError: The metric of ``best_fn`` is missing, or no number.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InvalidRequestError(
            f"{place}: metrics=: expected a dict, got {type(metrics).__name__}"
        )
    numbers = {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    if best is not None and best not in numbers:
        raise InvalidRequestError(
            f"{place}: metrics=: expected a number {best!r}, which best_fn returns, "
            f"got {', '.join(map(repr, metrics)) or 'none'}"
        )
    return numbers


def root_metadata(run: Run) -> Any:
    """Returns the metadata of a run; {} if it has none."""
    try:
        text = run.info().labels.get(_LABEL)
    except NotFoundError:
        return {}
    return {} if text is None else json.loads(text)


def set_root_metadata(run: Run, metadata: Any) -> None:
    """Keeps the metadata of a run, unless it has some; as in Orbax the first stays.

    Raises:
        InvalidRequestError: It is no JSON, or too large for a label.
    """
    try:
        text = json.dumps(dict(metadata), sort_keys=True)
    except (TypeError, ValueError) as e:
        raise InvalidRequestError(
            f"metadata= of {run.name}: expected a dict that JSON can hold, got {e}"
        ) from e
    try:
        labels = run.info().labels
    except NotFoundError:
        labels = {}
    if _LABEL not in labels:
        run.configure(labels={**labels, _LABEL: text})
