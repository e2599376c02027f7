"""Parses places in stores: a run or a checkpoint, and the store that has it.

    prod/llama-8b@best                       in the store of the command
    lab:prod/llama-8b@best                   in the store of a context
    gs://bucket/ckpts//prod/llama-8b@best    in a store by its root
    ckpt.example:7070//prod/llama-8b         in a store by its server

The address of a store and a path in it are separated by "//", which no run, step or tag
contains; a context and a path by ":", which none of them contains either.

>>> parse_place("lab:prod/llama-8b@best").store
ContextName(name='lab')
"""

from dataclasses import dataclass
from typing import TypeAlias

from storesvc.format.names import InvalidNameError
from storesvc_client.cli.contexts import check_name
from storesvc_client.cli.paths import (
    CheckpointPath,
    RunPath,
    is_foreign,
    parse_path,
    parse_target,
)


@dataclass(frozen=True, slots=True)
class ContextName:
    """The store of a context."""

    name: str


@dataclass(frozen=True, slots=True)
class StoreTarget:
    """A store by its address."""

    target: str


StorePart: TypeAlias = ContextName | StoreTarget | None
"""The store of a place; None: the one of the command."""


@dataclass(frozen=True, slots=True)
class Place:
    """A run or a checkpoint of a store."""

    store: StorePart
    path: RunPath | CheckpointPath


def parse_place(text: str) -> Place:
    """Returns the place that a text names.

    Raises:
        InvalidNameError: The text does not have one of the forms.
    """
    try:
        return _parse_place(text)
    except InvalidNameError as e:  # a context may have the name of a format
        if not is_foreign(text):
            raise
        raise InvalidNameError(
            f"place {text!r}: expected a run of a store, got a format of another "
            "project; storectl import reads it, and storectl export writes it"
        ) from e


def _parse_place(text: str) -> Place:
    address, slashes, path = text.rpartition("//")
    if slashes:
        if not address or address.endswith((":", "/")):
            raise InvalidNameError(
                f"place {text!r}: expected a run after the store, such as "
                f"{text.rstrip('/')}//prod/llama-8b"
            )
        return Place(StoreTarget(parse_target(address)), _parse_path(path, text))
    context, colon, path = text.partition(":")
    if colon and "/" not in context and "@" not in context:
        return Place(ContextName(check_name(context)), _parse_path(path, text))
    return Place(None, _parse_path(text, text))


def _parse_path(text: str, whole: str) -> RunPath | CheckpointPath:
    match parse_path(text):
        case RunPath() | CheckpointPath() as path:
            return path
        case _:
            raise InvalidNameError(
                f"place {whole!r}: expected a run or a checkpoint, such as "
                "prod/llama-8b or prod/llama-8b@latest"
            )
