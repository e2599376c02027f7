"""A visit, which the function of a page gets, with what pages share.

A feed of events watches for all pages that show the same namespace or run, in a thread
of its own from the first page that asks for it until the console ends, and keeps the
last events, so that a page without JavaScript shows them too. The tree of a checkpoint
never changes, so it is kept by the checkpoint's uid; its record (labels, pin, deletion)
is read for each page.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from storesvc.format.grids import Grid, part, whole
from storesvc.format.names import InvalidNameError, Which, parse_which
from storesvc_client import (
    Checkpoint,
    Client,
    Event,
    InvalidRequestError,
    LeafInfo,
    LimitError,
    NotFoundError,
    OpenCheckpoint,
    Run,
    StoreError,
)
from storesvc_client._documents import deleted_checkpoint
from storesvc_client._views.texts import ENCODED, Node, grow, number_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from storesvc_client._pictures.leaf_statistics import LeafStatistics

_KEPT: Final = 300
"""Events that a feed keeps."""

_MOST: Final = 32
"""Feeds that run at a time."""

_FIRST_SECONDS: Final = 0.5
"""Maximum wait of a page for the first event."""


class EventFeed:
    """The events of a namespace or a run since the feed began."""

    def __init__(
        self, watch: Callable[[], Generator[Event]], parent: str, numbers: Iterator[int]
    ) -> None:
        """Begins to watch.

        Args:
            parent: Namespace or run that is watched.
            numbers: Numbers for the events: of all feeds, because a browser continues
                after the last number that it has seen, also if its feed began again.
        """
        self._numbers = numbers
        self._events: deque[tuple[int, Event]] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()
        self._begun = threading.Event()
        self.problem: StoreError | None = None
        """Error that has ended the feed; None while it runs."""
        self._thread = threading.Thread(
            target=self._watch, args=(watch,), name=f"events of {parent}", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits a moment for the first event: a namespace may have many runs."""
        self._begun.wait(_FIRST_SECONDS)
        if self.problem is not None and not self.after(0):
            raise self.problem

    def after(self, number: int) -> list[tuple[int, Event]]:
        """Returns the kept events with higher numbers, the oldest first."""
        with self._lock:
            return [entry for entry in self._events if entry[0] > number]

    def _watch(self, watch: Callable[[], Generator[Event]]) -> None:
        try:
            for event in watch():
                with self._lock:
                    self._events.append((next(self._numbers), event))
                self._begun.set()
        except StoreError as e:  # rejected, or the server is gone
            self.problem = e
        finally:
            self._begun.set()


class EventFeeds:
    """The feeds of a console, by namespace or run; threads may share them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._feeds: dict[str, EventFeed] = {}
        self._numbers = count(1)

    def find_feed(self, parent: str) -> EventFeed:
        """Returns the feed of a namespace or a run, and starts it if necessary.

        Raises:
            LimitError: Too many feeds run.
            StoreError: As for ``Client.watch``.
        """
        with self._lock:
            feed = self._feeds.get(parent)
            if feed is not None and feed.problem is None:
                return feed
            self._feeds = {p: f for p, f in self._feeds.items() if f.problem is None}
            if len(self._feeds) >= _MOST:
                raise LimitError(
                    f"events of {parent}: expected at most {_MOST} namespaces and runs "
                    "that are watched, got one more; start another console"
                )
            feed = EventFeed(partial(self._watch, parent), parent, self._numbers)
            self._feeds[parent] = feed
        feed.wait()
        return feed

    def _watch(self, parent: str) -> Generator[Event]:
        if "/" in parent:
            return self._client.run(parent).watch("latest")
        return self._client.watch(parent, "latest")


READ_BYTES: Final = 64 << 20
"""Maximum bytes that are read of a leaf: of a larger one, a sample."""

_CORNER: Final = 8
"""Rows and columns of the first values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafValues:
    """Values that were read of a leaf."""

    index: str
    """Slice of the first values, such as "[0, 0:8, 0:8]"; "" if a sample was read."""
    rows: tuple[tuple[str, ...], ...]
    """The first values; none if a sample was read."""
    statistics: "LeafStatistics | None"
    """Statistics; None for PRNG keys, whose numbers mean nothing."""


def is_readable(leaf: LeafInfo) -> bool:
    """Returns whether a page reads the leaf: whether it is an array of numbers."""
    return leaf.kind not in ENCODED


def read_values(opened: OpenCheckpoint, leaf: LeafInfo) -> LeafValues:
    """Reads a leaf, or a sample of a large one, and verifies what it reads."""
    from storesvc_client._pictures.leaf_statistics import leaf_statistics

    if leaf.size_bytes > READ_BYTES:
        sample = opened.statistics(leaf.key, budget_bytes=READ_BYTES)
        return LeafValues(index="", rows=(), statistics=sample)
    _, array = next(iter(opened.read([leaf.key])))
    shown = _first(array)
    statistics = None
    if leaf.prng_impl is None:
        grid = Grid(leaf.shape, leaf.chunk_shape, array.dtype.itemsize)
        regions = map(grid.region, range(grid.count))
        chunks = ((at, part(array, whole(leaf.shape), at)) for at in regions)
        statistics = leaf_statistics(leaf, chunks)
    return LeafValues(
        index=_index(array.ndim, shown.shape),
        rows=tuple(
            tuple(
                number_text(one) if isinstance(one, int | float | complex) else str(one)
                for one in row
            )
            for row in shown.tolist()
        ),
        statistics=statistics,
    )


def _first(array: "NDArray[Any]") -> "NDArray[Any]":
    """Returns the first values, as a matrix; an empty one if there are none."""
    if array.size == 0:
        return array.reshape(0, 0)
    while array.ndim > 2:
        array = array[0]
    matrix = array.reshape(1, -1) if array.ndim < 2 else array
    return matrix[:_CORNER, :_CORNER]


def _index(rank: int, shape: Sequence[int]) -> str:
    """Returns the slice as it is typed in Python."""
    if rank == 0:
        return "[()]"
    if rank == 1:
        return f"[0:{shape[1]}]"
    leading = ["0"] * (rank - 2)
    return f"[{', '.join([*leading, *(f'0:{size}' for size in shape)])}]"


_KEPT_OPENED: Final = 6
"""Checkpoints that are kept; one of 100,000 leaves takes some 100 MB."""

_KEPT_LEAVES: Final = 32
"""Leaves of a checkpoint whose first values and statistics are kept."""


class Content:
    """The tree of one checkpoint."""

    def __init__(self, opened: OpenCheckpoint) -> None:
        self.opened = opened
        self._lock = threading.Lock()
        self._values: OrderedDict[str, LeafValues] = OrderedDict()

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        return grow(self.opened.leaves.values())

    def values(self, leaf: LeafInfo) -> LeafValues:
        """Returns the values of a leaf; reads one leaf at a time, and keeps the last
        ones."""
        with self._lock:
            if leaf.key not in self._values:
                self._values[leaf.key] = read_values(self.opened, leaf)
            self._values.move_to_end(leaf.key)
            while len(self._values) > _KEPT_LEAVES:
                self._values.popitem(last=False)
            return self._values[leaf.key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint; a deleted one has a record only."""

    checkpoint: Checkpoint
    content: Content | None
    is_deferred: bool = False
    """True if its tree is too large to wait for, and was not read."""


class OpenedCheckpoints:
    """Opens checkpoints, and keeps the last ones; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Content] = OrderedDict()

    def find(self, run: Run, which: Which, *, most: int | None = None) -> Found:
        """Returns a checkpoint, deleted ones included.

        Args:
            which: Step, "latest" or tag.
            most: Leaves above which a tree is not read, unless it is kept; None reads
                any.
        """
        try:
            checkpoint = run.checkpoint(which)
        except NotFoundError as e:
            return Found(checkpoint=deleted_checkpoint(run, e), content=None)
        key = f"{checkpoint.run}:{checkpoint.uid}"
        with self._lock:
            content = self._kept.get(key)
            if content is not None:
                self._kept.move_to_end(key)
        if content is None and most is not None and checkpoint.leaf_count > most:
            return Found(checkpoint=checkpoint, content=None, is_deferred=True)
        if content is None:
            content = Content(run.open(checkpoint.step))
            with self._lock:
                self._kept[key] = content
                while len(self._kept) > _KEPT_OPENED:
                    self._kept.popitem(last=False)
        return Found(checkpoint=checkpoint, content=content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One request of a browser."""

    client: Client
    opened: OpenedCheckpoints
    feeds: EventFeeds
    now: datetime
    """Time of the request, in UTC."""
    path: Mapping[str, str]
    """Parts of the address."""
    query: Mapping[str, str]
    """Values of the query."""

    @property
    def run(self) -> Run:
        run, _, _ = self.path["name"].partition("@")
        return self.client.run(f"{self.path['namespace']}/{run}")

    @property
    def which(self) -> Which:
        """The step or the tag that the address names."""
        _, _, text = self.path["name"].partition("@")
        return parse_selector(text)

    def permissions(self) -> frozenset[str]:
        """Returns what the user may do on the run of the address.

        A page leaves out the changes that the server would deny; the server decides.
        """
        return frozenset(self.client.test_permissions(self.run.name))

    @property
    def wants_whole(self) -> bool:
        """True if the page waits for all there is, as its document always does."""
        return "whole" in self.query or "json" in self.query

    def number(self, name: str) -> int:
        """Returns a number of the query, 0 if it is absent."""
        text = self.query.get(name, "") or "0"
        return parse_number(name, text, remedy="correct the address")


def parse_number(name: str, text: str, *, remedy: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise InvalidRequestError(
            f"{name}: expected a number of 0 or more, got {text!r}; {remedy}"
        )
    return int(text)


def parse_selector(text: str) -> Which:
    """Returns a step, "latest" or a tag."""
    try:
        return parse_which(text)
    except InvalidNameError as e:
        raise InvalidRequestError(f"{e}; correct the address") from e


def checkpoint_path(text: str) -> tuple[str, Which]:
    """Returns the run and the step or tag of ``namespace/run@step``."""
    run, at, which = text.strip().partition("@")
    if not at:
        raise InvalidRequestError(
            f"expected a checkpoint, such as prod/llama-8b@500, got {text!r}; name one"
        )
    return run, parse_selector(which)
