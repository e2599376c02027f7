"""Prints the checkpoints of an import or a copy as they are committed."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from storesvc_client._values.texts import count_text, printable, size_text
from storesvc_client.cli.output import json_value, print_json, print_note

if TYPE_CHECKING:
    from storesvc_client import Run
    from storesvc_client._values.values import Transfer


def show_transfers(
    transfers: "Iterable[Transfer]", *, into: "Run", as_json: bool
) -> "list[Transfer]":
    """Performs transfers, and prints each, a line as soon as it is done, or one JSON
    document at the end, also if one of them fails.

    A note on stderr names the run: a wrong name creates one, or mixes two.

    Returns:
        The transfers.

    Raises:
        StoreError: A transfer failed; those before it are done and printed.
    """
    done: list[Transfer] = []
    note = _note(into)
    try:
        for transfer in transfers:
            if note and transfer.is_new:
                print_note(note)
                note = ""
            done.append(transfer)
            if not as_json:
                click.echo(_line(transfer))
    finally:
        if as_json and done:
            print_json([_document(transfer) for transfer in done])
    if not done and as_json:
        print_json([])
    elif not done:
        click.echo("storectl: no checkpoints", err=True)
    return done


def _note(run: "Run") -> str:
    """Returns what the first new checkpoint does to a run, before it is there."""
    from storesvc_client import NotFoundError

    try:
        count = sum(1 for _ in run.checkpoints(on_damage=lambda _: None))
    except NotFoundError:
        return f"created run {run.name}"
    return f"added to run {run.name}, which had {count_text(count, 'checkpoint')}"


def _line(transfer: "Transfer") -> str:
    checkpoint = transfer.checkpoint
    name = f"{checkpoint.run}@{checkpoint.step}"
    if not transfer.is_new:
        return f"{name}: was there already"
    size, sent = size_text(checkpoint.size_bytes), size_text(transfer.sent_bytes)
    return printable(f"{name}: {size}, {sent} stored{_unverified(transfer)}")


def _unverified(transfer: "Transfer") -> str:
    """Returns what was not compared with checksums of the source; "" for nothing."""
    if transfer.is_verified:
        return ""
    if not transfer.verified_count:
        return ", source has no checksums"
    total = transfer.checkpoint.leaf_count + transfer.checkpoint.item_count
    return (
        f", {transfer.verified_count:,} of {total:,} leaves and items compared with "
        "checksums, source has none of the others"
    )


def _document(transfer: "Transfer") -> dict[str, Any]:
    document: dict[str, Any] = json_value(transfer)
    return document


def step_list(text: str) -> list[int]:
    """Returns the steps of an option; a type of click parameters."""
    try:
        steps = [int(part) for part in text.split(",")]
    except ValueError:
        steps = []
    if not steps or min(steps) < 0:
        raise click.BadParameter(f"{text!r}: expected steps, such as 100,200")
    return steps
