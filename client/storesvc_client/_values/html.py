"""HTML tables for notebooks.

Every text is escaped, and there is no script, no style sheet and no colour of our own:
a table takes the colours of the page around it, light or dark, and only its lines are
half-transparent grey. Characters that do not print, such as those that reverse a line,
are shown as escapes.

Example:
    >>> table([Column("STEP", right=True)], [("100",)])[:6]
    '<table'
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from storesvc_client._values.texts import printable

_LINE = "border-bottom:1px solid rgba(128,128,128,0.4)"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    right: bool = False
    """True for quantities, which are aligned right."""
    drawn: bool = False
    """True for drawings, which need their spaces and letters of equal width."""


def table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[str]],
    *,
    caption: str = "",
    omitted: str = "",
) -> str:
    """Returns a table.

    Args:
        columns: The columns; if no one has a title, there is no header.
        rows: A text for each column.
        caption: Text above the table; "" for none.
        omitted: Text of a last line, about rows that are left out; "" for none.
    """
    parts = ['<table style="border-collapse:collapse;color:inherit">']
    if caption:
        style = "text-align:left;caption-side:top;color:inherit;padding:2px 0"
        parts.append(f'<caption style="{style}">{text(caption)}</caption>')
    if any(column.title for column in columns):
        titles = (_cell("th", column, column.title) for column in columns)
        parts.append(f"<thead><tr>{''.join(titles)}</tr></thead>")
    parts.append("<tbody>")
    for row in rows:
        cells = zip(columns, row, strict=True)
        parts.append(f"<tr>{''.join(_cell('td', *each) for each in cells)}</tr>")
    if omitted:
        parts.append(
            f'<tr><td colspan="{len(columns)}" style="text-align:left">'
            f"{text(omitted)}</td></tr>"
        )
    parts.append("</tbody></table>")
    return "".join(parts)


def heading(title: str) -> str:
    """Returns a line above tables."""
    return f'<div style="padding:4px 0"><strong>{text(title)}</strong></div>'


def note(words: str) -> str:
    """Returns a line of plain text."""
    return f'<div style="padding:2px 0">{text(words)}</div>'


def text(words: str) -> str:
    """Returns a text as HTML."""
    return escape(printable(words))


def _cell(tag: str, column: Column, words: str) -> str:
    align = "right" if column.right else "left"
    style = f"text-align:{align};padding:2px 10px 2px 0;color:inherit;{_LINE}"
    if column.drawn:
        style += ";white-space:pre;font-family:monospace;line-height:1.2"
    return f'<{tag} style="{style}">{text(words)}</{tag}>'
