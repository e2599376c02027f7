"""Turns pages, which are values, into HTML: their addresses, navigation and pictures.

Every value that a template prints is escaped, and its unprintable characters are shown
as escapes, so that no label or key can add markup or turn the direction of text.
Pictures are SVG that needs no script and no inline style; their functions return None
where there is nothing to draw, and a page then leaves the panel out.

>>> checkpoint_url("prod/llama-8b", 500)
'/r/prod/llama-8b@500'
>>> command("stat", "prod/llama-8b@500:a b")
"storectl stat 'prod/llama-8b@500:a b'"
"""

import math
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from storesvc.format.names import Which
from storesvc_client import (
    Checkpoint,
    Client,
    Diff,
    HoldInfo,
    LeafInfo,
    OpenCheckpoint,
    StoreError,
    Tag,
    WriterReport,
)
from storesvc_client._pictures.layer_bars import changed_shares
from storesvc_client._pictures.layer_bars import chunk_map as chunk_map_picture
from storesvc_client._pictures.layer_bars import layer_bars as layer_bars_picture
from storesvc_client._pictures.layer_bars import sharding_grid as sharding_grid_picture
from storesvc_client._pictures.plots import make_plot
from storesvc_client._pictures.svg import BLUE, document, draw_rect, line, words
from storesvc_client._pictures.timeline import timeline as timeline_picture
from storesvc_client._pictures.treemap import treemap as treemap_picture
from storesvc_client._views.texts import (
    ABSENT,
    count_text,
    duration_text,
    number_text,
    order_metrics,
    printable,
    printable_lines,
    size_text,
    time_text,
)
from storesvc_client.console.visit import LeafValues


def command(*words: str | None) -> str:
    """Returns a storectl command as it is typed in a shell, without absent words."""
    return shlex.join(("storectl", *map(printable, filter(None, words))))


def run_url(run: str, **values: str | int) -> str:
    return with_values(f"/r/{quote(run)}", values)


def checkpoint_url(run: str, which: Which, **values: str | int) -> str:
    return with_values(f"/r/{quote(run)}@{quote(str(which), safe='')}", values)


def plot_url(run: str, metric: str) -> str:
    """Returns the address of the points of a metric."""
    return with_values(f"/plot/{quote(run)}", {"metric": metric})


def trace_url(run: str, which: Which) -> str:
    """Returns the address of the timeline of a save."""
    return f"/trace/{quote(run)}@{quote(str(which), safe='')}"


def tree_url(run: str, which: Which, **values: str | int) -> str:
    """Returns the address of rows of the tree of a checkpoint."""
    return with_values(f"/tree/{quote(run)}@{quote(str(which), safe='')}", values)


def leaf_url(run: str, which: Which, key: str) -> str:
    return checkpoint_url(run, which, key=key)


def diff_url(before: str, after: str) -> str:
    """Returns the address of the comparison of two checkpoints."""
    return with_values("/diff", {"a": before, "b": after})


def change_url(action: str, **values: str | int) -> str:
    """Returns the address of the page that asks before a change."""
    return with_values(f"/change/{action}", values)


def with_values(path: str, values: Mapping[str, str | int]) -> str:
    return f"{path}?{urlencode(values, quote_via=quote)}" if values else path


Section = tuple[str, str]
"""Name and address of a page."""

SECTIONS: Final[tuple[Section, ...]] = (
    ("Runs", "/"),
    ("Uploads", "/uploads"),
    ("Storage", "/storage"),
    ("Events", "/events"),
    ("Help", "/help"),
)
"""Pages for every user."""

AUDIT: Final[Section] = ("Audit", "/audit")

_SECONDS: Final = 60.0
"""Time for which an answer of the server is used."""


class Navigation:
    """The sections of a console: those that every user has, and those that the server
    permits. It is asked once a minute, not for each page: the navigation only shows
    links, and the server decides about each page."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._until = 0.0
        self.known = SECTIONS
        """The sections as the server has last permitted them."""

    def current(self) -> tuple[Section, ...]:
        """Returns the sections; asks the server if its last answer is old."""
        if time.monotonic() >= self._until:
            # assigned last: other threads show what was known until then
            reads = self._reads_audit_log()
            self.known = (*SECTIONS[:-1], AUDIT, SECTIONS[-1]) if reads else SECTIONS
            self._until = time.monotonic() + _SECONDS
        return self.known

    def _reads_audit_log(self) -> bool:
        """Returns whether the user may read the audit log, and there is one."""
        try:
            # first, because the log records a denial
            if not self._client.test_permissions(None, ["audit.read"]):
                return False
            self._client.audit_entries().read_page(1)
        except StoreError:  # an older server, or one without a log
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Crumb:
    """A link to a page above."""

    name: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page for people, and its document for programs."""

    template: str
    """File below `templates/`."""
    title: str
    document: Any
    """Value of ``?json``; equals that of the command with ``--json`` where both
    exist."""
    command: str = ""
    """The storectl command that prints the same; "" if there is none."""
    section: str = "Runs"
    """Entry of the navigation that it belongs to."""
    crumbs: tuple[Crumb, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values for the template."""
    status: int = 200


RUNS = Crumb(name="Runs", address="/")


def crumbs_to_namespace(run: str) -> tuple[Crumb, ...]:
    """Returns the links above the page of a run."""
    namespace = run.partition("/")[0]
    return RUNS, Crumb(name=namespace, address=f"/?in={namespace}")


def crumbs_to_run(run: str) -> tuple[Crumb, ...]:
    """Returns the links above the page of a checkpoint."""
    name = run.partition("/")[2]
    return *crumbs_to_namespace(run), Crumb(name=name, address=run_url(run))


_WIDTH_SAVE_CHART: Final = 1180.0
_LEFT: Final = 150.0
_RIGHT: Final = 150.0
_ROW: Final = 22.0
_THINNEST: Final = 2.0


_WIDTH: Final = 96
_HEIGHT: Final = 22


def metric_plot(
    run: str, metric: str, checkpoints: Sequence[Checkpoint]
) -> Markup | None:
    drawn = [c for c in checkpoints if math.isfinite(c.metrics.get(metric, math.nan))]
    if len(drawn) < 2:
        return None
    return _drawn(make_plot(run, metric, checkpoints).svg)


def sparkline(values: Sequence[float], title: str) -> Markup | None:
    """Returns a small line through values, the oldest first."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return None
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    points = " ".join(
        f"{2 + at * (_WIDTH - 4) / (len(finite) - 1):.1f},"
        f"{_HEIGHT - 3 - (value - low) / span * (_HEIGHT - 6):.1f}"
        for at, value in enumerate(finite)
    )
    return Markup(  # noqa: S704 - numbers, and an escaped title
        f'<svg class="spark" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" role="img"><title>{escape(printable(title))}</title>'
        f'<polyline points="{points}" fill="none" stroke="currentColor" '
        'stroke-width="1.5" stroke-linejoin="round"/></svg>'
    )


def timeline(
    checkpoints: Sequence[Checkpoint], tags: Sequence[Tag], holds: Sequence[HoldInfo]
) -> Markup | None:
    """Returns the checkpoints of a run over steps, deleted ones included."""
    if not checkpoints:
        return None
    damaged = {found.step for found in checkpoints if "damage" in found.labels}
    return _drawn(
        timeline_picture(
            checkpoints, tags=tags, holds=holds, damaged=damaged, width=1180
        )
    )


def treemap(opened: OpenCheckpoint, found: Diff | None) -> Markup | None:
    """Returns the leaves of a checkpoint as areas, coloured by dtype or by change."""
    leaves = opened.leaves.values()
    if not any(leaf.size_bytes for leaf in leaves):
        return None
    shares = None if found is None else changed_shares(found)
    return _drawn(treemap_picture(leaves, width=780, height=360, changed=shares))


def chunk_map(leaf: LeafInfo) -> Markup | None:
    """Returns the grid of the chunks of a leaf of several."""
    if leaf.chunk_count < 2:
        return None
    return _drawn(chunk_map_picture(leaf.shape, leaf.chunk_shape, width=760))


def sharding_grid(leaf: LeafInfo) -> Markup | None:
    """Returns the devices that held the blocks of a leaf."""
    if leaf.sharding is None or not leaf.shape:
        return None
    return _drawn(sharding_grid_picture(leaf.shape, leaf.sharding, width=760))


def histogram(values: LeafValues, scale: Literal["linear", "symlog"]) -> Markup | None:
    found = values.statistics
    if found is None or found.minimum is None:
        return None
    return _drawn(found.histogram(scale=scale).drawing)


def heatmap(values: LeafValues) -> Markup | None:
    """Returns the means of the blocks of a leaf of two dimensions or more."""
    found = values.statistics
    if found is None or found.means is None or found.minimum is None:
        return None
    return _drawn(found.heatmap().drawing)


def save_phases(writer: WriterReport, seconds: float) -> Markup | None:
    """Returns a bar for each phase of a process of a save, from its first start to its
    last end."""
    spans = writer.timeline
    if not spans:
        return None
    room = _WIDTH_SAVE_CHART - _LEFT - _RIGHT
    scale = room / max(seconds, 1e-9)
    body = [line(_LEFT, 0, _LEFT, _ROW * len(spans), opacity=0.3)]
    for at, span in enumerate(spans):
        top = at * _ROW
        start = _LEFT + min(span.start_seconds * scale, room)
        length = min((span.end_seconds - span.start_seconds) * scale, room)
        times = f"{span.start_seconds:.3f} s to {span.end_seconds:.3f} s"
        body += [
            words(span.name, _LEFT - 10, top + 15, text_anchor="end"),
            draw_rect(
                *(start, top + 4, max(length, _THINNEST), _ROW - 8),
                title=f"{span.name}: {times}, busy for {span.busy_seconds:.3f} s",
                rx=2,
                fill=BLUE,
            ),
            words(
                f"{span.end_seconds - span.start_seconds:.3f} s",
                _WIDTH_SAVE_CHART - _RIGHT + 70,
                top + 15,
                text_anchor="end",
            ),
            words(
                f"{span.busy_seconds:.3f} s",
                _WIDTH_SAVE_CHART - 6,
                top + 15,
                text_anchor="end",
                opacity=0.7,
            ),
        ]
    label = f"phases of process {writer.writer}"
    height = _ROW * len(spans)
    return _drawn(document(body, label=label, width=_WIDTH_SAVE_CHART, height=height))


def layer_bars(opened: OpenCheckpoint, found: Diff) -> Markup | None:
    """Returns the share of the changed bytes of each layer."""
    shares = changed_shares(found)
    if not shares:
        return None
    return _drawn(layer_bars_picture(opened.leaves.values(), shares, width=1180))


def _drawn(svg: str) -> Markup:
    """Marks a picture as HTML: the functions that draw escape every text."""
    return Markup(svg)  # noqa: S704


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
            "metrics": lambda values: [(n, values[n]) for n in order_metrics(values)],
            "number": number_text,
            "short_duration": short_duration_text,
            "short_number": short_number_text,
            "size": size_text,
            "time": time_text,
        }
        self._environment.globals |= {
            "absent": ABSENT,
            "asset": _asset,
            "change_url": change_url,
            "checkpoint_url": checkpoint_url,
            "diff_url": diff_url,
            "leaf_url": leaf_url,
            "plot_url": plot_url,
            "run_url": run_url,
            "trace_url": trace_url,
            "tree_url": tree_url,
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


def _final(value: Any) -> Any:
    """Returns what a template prints of a value."""
    if isinstance(value, Markup):
        return value
    return printable_lines(str(value))


def _asset(name: str) -> str:
    """Returns the address of a file of `static/`, which changes with its content."""
    content = (FOLDER / "static" / name).read_bytes()
    return f"/static/{name}?v={sha256(content).hexdigest()[:12]}"
