"""Completion of parameters in a shell, as values of ``shell_complete=``.

Each command imports this; the candidates are in ``completion_candidates``, which is
imported when a shell completes.
"""

from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Completer: TypeAlias = (
    "Callable[[click.Context, click.Parameter, str], list[CompletionItem]]"
)


class Part(IntEnum):
    """A part of a path, from left to right."""

    NAMESPACE = 1
    RUN = 2
    CHECKPOINT = 3
    LEAF = 4


class Which(IntEnum):
    """The checkpoints that a path may end in."""

    ANY = 1
    STEPS = 2
    """No tags, nor latest."""
    DELETED = 3
    """Steps of deleted checkpoints."""


def complete_path(
    least: Part,
    most: Part,
    *,
    which: Which = Which.ANY,
    items: bool = False,
    contexts: bool = False,
) -> Completer:
    """Returns the completion of a path.

    Args:
        least: Last part that the path must have.
        most: Last part that it may have.
        which: Checkpoints that are candidates.
        items: Whether the path ends in an item, and not in leaves.
        contexts: Whether a context may come before it.
    """

    def complete(
        context: click.Context, _parameter: click.Parameter, text: str
    ) -> "list[CompletionItem]":
        from storesvc_client.cli.completion_candidates import (
            PathRule,
            completed,
            paths,
        )

        rule = PathRule(
            least=least, most=most, which=which, items=items, contexts=contexts
        )
        return completed(partial(paths, rule), context, text)

    return complete


def complete_tag(
    context: click.Context, _parameter: click.Parameter, text: str
) -> "list[CompletionItem]":
    """Returns tags of the run in the argument ``path``."""
    from storesvc_client.cli.completion_candidates import completed, tags

    return completed(tags, context, text)


def complete_context(
    context: click.Context, _parameter: click.Parameter, text: str
) -> "list[CompletionItem]":
    """Returns names of contexts."""
    from storesvc_client.cli.completion_candidates import completed, context_names

    return completed(context_names, context, text)


def complete_condition(
    context: click.Context, _parameter: click.Parameter, text: str
) -> "list[CompletionItem]":
    """Returns fields of the records at the argument ``path``, as --where has them."""
    from storesvc_client.cli.completion_candidates import completed, conditions

    return completed(conditions, context, text)


def complete_order(
    context: click.Context, _parameter: click.Parameter, text: str
) -> "list[CompletionItem]":
    """Returns fields of the records at the argument ``path``, as --sort has them."""
    from storesvc_client.cli.completion_candidates import completed, orders

    return completed(orders, context, text)
