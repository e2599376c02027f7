"""Writes encoded values, of leaves and items, to stdout and to files."""

import sys
from typing import TYPE_CHECKING

import click

from storesvc_client._views.texts import printable, printable_lines, size_text
from storesvc_client.cli.errors import Refusal

if TYPE_CHECKING:
    from storesvc_client import LeafInfo
    from storesvc_client.cli.leaf_summary import Array


def echo_data(what: str, kind: str, data: bytes) -> None:
    """Writes a value to stdout, byte for byte. In a terminal a line feed is added, and
    control characters are escaped.

    Args:
        what: The value in messages.
        kind: Kind of the value.
        data: Its bytes.

    Raises:
        Refusal: It is bytes, for a terminal.
    """
    if not sys.stdout.isatty():
        click.echo(data, nl=False)
    elif kind == "bytes":
        raise Refusal(
            f"{what} is {size_text(len(data))} of bytes, which may control a terminal; "
            "redirect it to a file"
        )
    else:
        click.echo(printable_lines(data.decode(errors="replace")))


def encode_leaf(leaf: "LeafInfo", array: "Array") -> bytes:
    """Returns the bytes that are written for an encoded leaf: the stored ones, but of a
    large integer its decimal digits.

    Raises:
        Refusal: The integer has more digits than Python converts.
    """
    data = array.tobytes()
    if leaf.kind != "integer":
        return data
    try:
        return str(int.from_bytes(data, "little", signed=True)).encode()
    except ValueError as e:
        raise Refusal(
            f"leaf {printable(leaf.key)}: expected an integer of at most "
            f"{sys.get_int_max_str_digits():,} digits, got one of "
            f"{size_text(len(data))}; read it with run.restore(select=)"
        ) from e
