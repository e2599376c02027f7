"""Prints the checkpoints of an import or a copy as they are committed."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from storesvc_client._values.texts import printable, size_text
from storesvc_client.cli.output import json_value, print_json

if TYPE_CHECKING:
    from storesvc_client._values.transfers import Transfer


def show_transfers(
    transfers: "Iterable[Transfer]", *, as_json: bool
) -> "list[Transfer]":
    """Performs transfers, and prints each, a line as soon as it is done, or one JSON
    document at the end, also if one of them fails.

    Returns:
        The transfers.

    Raises:
        StoreError: A transfer failed; those before it are done and printed.
    """
    done: list[Transfer] = []
    try:
        for transfer in transfers:
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


def _line(transfer: "Transfer") -> str:
    checkpoint = transfer.checkpoint
    name = f"{checkpoint.run}@{checkpoint.step}"
    if not transfer.is_new:
        return f"{name}: was there already"
    size, sent = size_text(checkpoint.size_bytes), size_text(transfer.sent_bytes)
    verified = "" if transfer.is_verified else ", source has no checksums"
    text = f"{name}: {size}, {sent} stored{verified}"
    return printable(text)


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
