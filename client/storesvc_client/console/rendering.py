"""Turns pages into HTML.

Every value that a template prints is escaped, and its unprintable characters are shown
as escapes, so that no label or key can add markup or turn the direction of text.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from storesvc_client._values.arguments import duration_text
from storesvc_client._values.texts import (
    ABSENT,
    count_text,
    number_text,
    order_metrics,
    printable_lines,
    size_text,
    time_text,
)
from storesvc_client.console import addresses
from storesvc_client.console.navigation import Section
from storesvc_client.console.page import Page

FOLDER: Final = Path(__file__).parent

_AGES: Final = ((86_400, "d"), (3_600, "h"), (60, "min"))


class Renderer:
    """The templates of the console."""

    def __init__(self, *, store: str) -> None:
        self._store = store
        self._environment = Environment(
            loader=FileSystemLoader(FOLDER / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=_final,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters |= {
            "age": age_text,
            "breakable": breakable_markup,
            "clock": clock_markup,
            "count": count_text,
            "duration": duration_text,
            "metrics": _ordered,
            "number": number_text,
            "short_duration": short_duration_text,
            "short_number": short_number_text,
            "size": size_text,
            "time": time_text,
        }
        self._environment.globals |= {
            "absent": ABSENT,
            "asset": _asset,
            "change_url": addresses.change_url,
            "checkpoint_url": addresses.checkpoint_url,
            "diff_url": addresses.diff_url,
            "leaf_url": addresses.leaf_url,
            "plot_url": addresses.plot_url,
            "run_url": addresses.run_url,
            "trace_url": addresses.trace_url,
            "tree_url": addresses.tree_url,
        }

    def html(
        self,
        page: Page,
        *,
        sections: Sequence[Section],
        token: str,
        now: datetime,
        address: str,
    ) -> str:
        """Returns a page as HTML.

        Args:
            page: The page.
            sections: The navigation.
            token: Token that forms send, so that no other site can.
            now: Time of the request, in UTC.
            address: Path and query of the page.
        """
        frame: Mapping[str, Any] = {
            "page": page,
            "sections": sections,
            "store": self._store,
            "token": token,
            "now": now,
            "address": address,
        }
        return self._environment.get_template(page.template).render(
            {**frame, **page.values}
        )

    def row(self, template: str, **values: Any) -> str:
        """Returns a part of a page as HTML."""
        return self._environment.get_template(template).render(values)


def age_text(time: datetime, now: datetime) -> str:
    """Returns how long ago a time was, such as "5 min ago"."""
    seconds = (now - time).total_seconds()
    if seconds < 10:
        return "just now"
    return f"{short_duration_text(timedelta(seconds=seconds))} ago"


def breakable_markup(text: str) -> Markup:
    """Returns a name that may be wrapped after "/", "_" and the like."""
    return Markup("<wbr>").join(re.split(r"(?<=[/_.-])", printable_lines(text)))


def clock_markup(time: datetime) -> Markup:
    """Returns a time in UTC, which a script shows in the zone of the viewer."""
    text = time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Markup('<time datetime="{}">{}</time>').format(time.isoformat(), text)


def short_duration_text(length: timedelta) -> str:
    """Returns a duration in its largest unit, such as "5 min"."""
    seconds = length.total_seconds()
    for unit, name in _AGES:
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    if seconds >= 10:
        return f"{seconds:.0f} s"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def short_number_text(value: float | None) -> str:
    """Returns a metric in four digits."""
    return ABSENT if value is None else f"{value:.4g}"


def _ordered(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """Returns metrics as they are shown: losses first."""
    return [(name, metrics[name]) for name in order_metrics(metrics)]


def _final(value: Any) -> Any:
    """Returns what a template prints of a value."""
    if isinstance(value, Markup):
        return value
    return printable_lines(str(value))


def _asset(name: str) -> str:
    """Returns the address of a file of `static/`, which changes with its content."""
    content = (FOLDER / "static" / name).read_bytes()
    return f"/static/{name}?v={sha256(content).hexdigest()[:12]}"
