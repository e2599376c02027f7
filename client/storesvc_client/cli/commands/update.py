"""``storectl update``: sets labels, metrics and the pin of a checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import click

from storesvc_client._values.texts import pairs_text
from storesvc_client.cli.arguments import json_option, label, whole_checkpoint
from storesvc_client.cli.completion import Part, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.output import print_fields, print_json
from storesvc_client.cli.paths import CheckpointPath

if TYPE_CHECKING:
    from storesvc_client import Checkpoint, Run

T = TypeVar("T")

_ATTEMPTS: Final = 8
"""Maximum attempts of a change, while others change the same checkpoint."""


def metric(text: str) -> tuple[str, float]:
    """Returns the key and the number of a metric."""
    key, _, value = text.partition("=")
    try:
        if key:
            return key, float(value)
    except ValueError:
        pass
    raise click.BadParameter(f"{text!r}: expected KEY=NUMBER, such as loss=2.31")


@click.command()
@click.argument(
    "path",
    type=whole_checkpoint,
    metavar="PATH",
    shell_complete=complete_path(Part.CHECKPOINT, Part.CHECKPOINT),
)
@click.option(
    "--label",
    "labels",
    type=label,
    metavar="KEY=TEXT",
    multiple=True,
    help="Set a label; the others stay. Repeatable, like all options but --pin.",
)
@click.option(
    "--remove-label",
    "no_labels",
    metavar="KEY",
    multiple=True,
    help="Remove a label.",
)
@click.option(
    "--metric",
    "metrics",
    type=metric,
    metavar="KEY=NUMBER",
    multiple=True,
    help="Set a metric; the others stay.",
)
@click.option(
    "--remove-metric",
    "no_metrics",
    metavar="KEY",
    multiple=True,
    help="Remove a metric.",
)
@click.option(
    "--pin/--unpin",
    "pinned",
    default=None,
    help="Protect it from deletion, also by retention policies, or stop that.",
)
@json_option
@pass_connection
def update(
    connection: Connection,
    *,
    path: CheckpointPath,
    labels: Sequence[tuple[str, str]],
    no_labels: Sequence[str],
    metrics: Sequence[tuple[str, float]],
    no_metrics: Sequence[str],
    pinned: bool | None,
    as_json: bool,
) -> None:
    """Set labels, metrics or the pin of a checkpoint.

    Its leaves never change.

    \b
    Examples:
      storectl update prod/llama-8b@500 --pin
      storectl update prod/llama-8b@best --label stage=final --metric loss=2.1
      storectl update prod/llama-8b@500 --unpin --remove-label stage
    """
    new_labels, new_metrics = dict(labels), dict(metrics)
    if both := new_labels.keys() & no_labels or new_metrics.keys() & no_metrics:
        raise click.UsageError(f"expected to set or to remove {min(both)}, not both")
    if not (labels or no_labels or metrics or no_metrics or pinned is not None):
        raise click.UsageError("expected something to set, such as --label or --pin")

    def change(run: "Run", known: "Checkpoint") -> "Checkpoint":
        return run.update(
            known.step,
            labels=_changed(known.labels, new_labels, no_labels),
            metrics=_changed(known.metrics, new_metrics, no_metrics),
            pinned=pinned,
            etag=known.etag,
        )

    with connection.open() as client:
        found = _update_with_retries(client.run(path.run), path, change)
    if as_json:
        print_json(found)
        return
    fields = {
        "pinned": "yes" if found.pinned else "no",
        "metrics": pairs_text(found.metrics),
        "labels": pairs_text(found.labels),
    }
    print_fields(f"{found.run}@{found.step}", fields.items())


def _update_with_retries(
    run: "Run",
    path: CheckpointPath,
    change: "Callable[[Run, Checkpoint], Checkpoint]",
) -> "Checkpoint":
    """Changes a checkpoint; retries if another client has changed it."""
    from storesvc_client import ConflictError

    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return change(run, run.checkpoint(path.which))
        except ConflictError as e:
            if e.reason != "ETAG_MISMATCH" or attempt == _ATTEMPTS:
                raise
    raise AssertionError


def _changed(
    known: Mapping[str, T], given: Mapping[str, T], removed: Sequence[str]
) -> dict[str, T] | None:
    """Returns all entries after the change; None if none changes."""
    if not (given or removed):
        return None
    return {
        key: value for key, value in {**known, **given}.items() if key not in removed
    }
