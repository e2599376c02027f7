"""Checkpoints of other projects, read in place.

``open_foreign`` returns the checkpoints below a URL, which begins with the name of
their format. They are read with the planner of a store's restore: only what the target
needs, straight into its buffers. Nothing is written, and nothing is copied.

>>> import storesvc_client as store
>>> run = store.open_foreign("orbax:gs://bucket/run")  # doctest: +SKIP
>>> state = run.restore(like=state, mesh=mesh, rules="recorded")  # doctest: +SKIP

Errors of a wrong URL name the checkpoints that it was meant for: of another format, a
folder further down, or the one that a file is a part of.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from storesvc.format.chunks import ChunkLocations, Sums
from storesvc.format.manifests import Manifest
from storesvc.format.names import Which
from storesvc.storage.threads import Threads
from storesvc_client._chunks.memory import allocate
from storesvc_client._foreign.foreign_step import ForeignRoot, ForeignStep
from storesvc_client._foreign.formats import FORMATS
from storesvc_client._foreign.locations import Location, open_location
from storesvc_client._foreign.source import StepSource
from storesvc_client._foreign.steps import item_name
from storesvc_client._restore.assembly import Assembly
from storesvc_client._restore.items import Items
from storesvc_client._restore.mapped import MappedReader, MappedSource, load_rules
from storesvc_client._restore.open_tree import OpenTree, TreeReader
from storesvc_client._telemetry.progress import Meter, ProgressCallback
from storesvc_client._telemetry.reports import RestoreReport
from storesvc_client._values.arguments import (
    Deadline,
    DurationLike,
    checked_duration,
    checked_texts,
)
from storesvc_client._values.options import (
    DEFAULT_DEADLINE,
    Indivisible,
    Like,
    MappingRules,
    RestoreRequest,
    collect_arguments,
)
from storesvc_client._views.notebook import list_results
from storesvc_client._views.texts import size_text
from storesvc_client.errors import (
    DataLossError,
    InvalidRequestError,
    MismatchError,
    NotFoundError,
    PreconditionError,
    StoreError,
)

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from numpy.typing import DTypeLike

    from storesvc_client._mapping import rules as mapping_rules
    from storesvc_client._values.key_patterns import Pattern, Patterns
    from storesvc_client._values.options import Rules

SEARCHED: Final = 16
"""Folders that are looked into."""

ORDER: Final = ("orbax", "jax", "safetensors", "eformer", "levanter")
"""The formats, those first whose files are no part of a checkpoint of another."""

_MSGPACK: Final = re.compile(rb"[\x80-\x8f\xde\xdf]")
"""Beginning of a mapping of msgpack."""

SHOWN: Final = 5
"""Folders that an error names."""


def open_root(kind: str, location: Location, options: Mapping[str, Any]) -> ForeignRoot:
    """Returns the root of a format at a location."""
    module = import_module(f"{__package__}.formats.{FORMATS[kind]}")
    root: ForeignRoot = module.open_root(location, **options)
    return root


def explain(
    kind: str, url: str, location: Location, options: Any, error: NotFoundError
) -> NotFoundError:
    """Returns the error of a location without checkpoints of a format, with what is
    there instead.
    """
    if found := _file_advice(url, options):
        return NotFoundError(
            f"{kind}:{location.url}: expected a folder, got a file; {found}"
        )
    if other := other_format(kind, location):
        return NotFoundError(f"{error}; there are some of another format: use {other}")
    if inside := below(kind, location):
        return NotFoundError(
            f"{error}; there are some in its folders, each of which is opened by its "
            f"own URL: use {inside}"
        )
    return error


def _file_advice(url: str, options: Any) -> str | None:
    """Returns how a file is opened; None if there is no file at a URL."""
    path, question, query = url.partition("?")
    folder, slash, name = path.rstrip("/").rpartition("/")
    with suppress(StoreError):
        above = open_location(
            (folder or slash or ".") + question + query, storage_options=options
        )
        if (size := above.size(name)) is None:
            return None
        if name.endswith(".safetensors"):
            return f"use safetensors:{url}"
        start = above.read_range(name, 0, min(size, 9))
        if _MSGPACK.match(start):
            return (
                "it may be one of msgpack, as Flax writes it: read it with "
                "flax.serialization.msgpack_restore, and save that with Run.save"
            )
        if start[8:] == b"{":
            return f"if it is one of safetensors, name it {name}.safetensors"
        if found := other_format("", above):
            return f"if it is a part of a checkpoint, use {found}"
        return "only files of safetensors are read alone"
    return None


def other_format(kind: str, location: Location) -> str | None:
    """Returns the URLs of the checkpoints of other formats at a location; None: no
    other format has finished ones."""
    others = [other for other in FORMATS if other != kind]
    found = [url for other in others if (url := _url(other, location))]
    return " or ".join(found) or None


def below(kind: str, location: Location) -> str | None:
    """Returns the URLs of the checkpoints of any format in the folders at a location;
    None: there are none."""
    folders: list[str] = []
    with suppress(StoreError):
        names = location.names()
        folders = [name.rstrip("/") for name in names if name.endswith("/")]
    searched = folders[:SEARCHED]
    with Threads(SEARCHED) as pool:
        urls = pool.map(partial(_url_in, kind, location), searched)
        found = [url for url in urls if url]
    more = ", ..." if len(found) > SHOWN or len(folders) > SEARCHED else ""
    return " or ".join(found[:SHOWN]) + more if found else None


def _url_in(kind: str, location: Location, folder: str) -> str | None:
    """Returns the URL of the checkpoints in a folder, of the given format if it has
    some."""
    with suppress(StoreError):
        inside = location.below(folder)
        for each in dict.fromkeys((kind, *ORDER)):
            if url := _url(each, inside):
                return url
    return None


def _url(kind: str, location: Location) -> str | None:
    """Returns the URL of the checkpoints of a format at a location; None: none."""
    with suppress(StoreError):
        if open_root(kind, location, {}).steps():
            return f"{kind}:{location.url.removeprefix('file://')}"
    return None


MAX_CHUNKS: Final = 64_000_000
"""Maximum chunks of a step, each of which takes 40 bytes of a restore's plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignInfo:
    """A checkpoint that another project wrote, as its files describe it."""

    run: str
    """URL of its run, which begins with the name of the format."""
    step: int
    """Training step; 0 if it has none."""
    url: str
    """Location of the checkpoint."""
    create_time: datetime | None
    """Time of its writing, in UTC; None if its files do not state it."""
    labels: Mapping[str, str]
    metrics: Mapping[str, float]
    size_bytes: int
    """Bytes of all leaves and items, uncompressed."""
    leaf_count: int
    item_count: int
    chunk_count: int
    """Number of pieces that the format reads as a whole."""
    digest: str
    """Digest of the files that describe it, and of what the storage knows of its data
    files, in hexadecimal."""
    is_verified: bool
    """True if reading compares checksums of all elements."""
    verified_count: int
    """Number of leaves and items of which reading compares checksums."""
    unread: Mapping[str, str]
    """Reason for what is not read, by name: an item of Orbax that cannot be, or a file
    of safetensors with tensors that the index lacks."""

    def __repr__(self) -> str:
        size = f"{self.leaf_count} leaves, {size_text(self.size_bytes)}"
        return f"<ForeignInfo {self.run}@{self.step}, {size}>"

    @classmethod
    def from_step(cls, run: str, step: ForeignStep) -> "ForeignInfo":
        """Returns the description of a step."""
        return cls(
            run=run,
            step=step.step,
            url=step.url,
            create_time=step.create_time,
            labels=step.labels,
            metrics=step.metrics,
            size_bytes=step.tree.size_bytes,
            leaf_count=step.tree.tree_count,
            item_count=step.tree.item_count,
            chunk_count=step.tree.chunk_count,
            digest=step.digest,
            is_verified=step.is_verified,
            verified_count=step.verified_count,
            unread={item.name: item.reason for item in step.unread},
        )


_OF_ORBAX: Final = ("orbax", "checkpoints of Orbax")


def open_foreign(
    url: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    trust_uncommitted: bool = False,
    without: Iterable[str] = (),
    keep_names: bool = False,
    mapping: MappingRules | None = None,
) -> "ForeignRun":
    """Returns the checkpoints that another project wrote below a URL; lists it.

    >>> run = store.open_foreign("orbax:/ckpts/llama")  # doctest: +SKIP
    >>> run.checkpoint("latest").step  # doctest: +SKIP
    500

    Args:
        url: ``FORMAT:LOCATION`` or ``FORMAT:///PATH``, such as ``orbax:///ckpts/run``,
            ``orbax:gs://bucket/run``, ``orbax:s3://bucket/run?region=us-east-1``.
        storage_options: Options of fsspec's file system.
        trust_uncommitted: Whether steps of Orbax in a bucket without
            ``commit_success.txt`` count as finished, as those that were copied there
            from a file system.
        without: Names of items of Orbax to leave out of each step, such as one that
            cannot be read, with which no step is imported.
        keep_names: Whether the name of a tensor of safetensors is one key, and not
            split at each ".".
        mapping: Rules that make another tree of each checkpoint, as for
            ``Run.restore``; all calls then show and read that tree.

    Raises:
        InvalidRequestError: The URL names no known format or location, or a package is
            missing.
        NotFoundError: Orbax wrote no checkpoints there; the other formats raise it
            when steps are listed.
        PreconditionError: The storage denies access.
        UnavailableError: The storage does not answer.
    """
    kind, place = split_url(url)
    left_out = frozenset(checked_texts(f"{url}: without=", without))
    for given, name, owner, what in (
        (trust_uncommitted, "trust_uncommitted= (--trust-uncommitted)", *_OF_ORBAX),
        (left_out, "without= (--without)", *_OF_ORBAX),  # others have no items
        (keep_names, "keep_names=", "safetensors", "safetensors"),
    ):
        if given and kind != owner:
            raise InvalidRequestError(
                f"{url}: expected {name} with {what} only; leave it out"
            )
    options: dict[str, Any] = {}
    if kind == "orbax":
        options = {"trust_uncommitted": trust_uncommitted, "without": left_out}
    elif kind == "safetensors":
        place, file = split_file(place)
        options = {"file": file, "keep_names": keep_names}
    location = open_location(place, storage_options=storage_options)
    lookalike = partial(other_format, kind, location)
    explained = partial(explain, kind, place, location, storage_options)
    try:
        root = open_root(kind, location, options)
    except NotFoundError as e:
        raise explained(e) from e
    run = ForeignRun(root, lookalike, explained)
    return run if mapping is None else run.map(mapping)


def split_url(url: str) -> tuple[str, str]:
    """Returns the format of a URL, and its location.

    >>> split_url("orbax:///ckpts/run")
    ('orbax', '/ckpts/run')
    >>> split_url("orbax:gs://bucket/run")
    ('orbax', 'gs://bucket/run')
    """
    kind, colon, place = url.partition(":")
    if place.startswith("///"):
        place = place[2:]
    if kind not in FORMATS or not colon or not place or place.startswith("//"):
        raise InvalidRequestError(
            f"{url!r}: expected FORMAT:LOCATION, such as orbax:/ckpts/run or "
            f"orbax:gs://bucket/run; formats: {', '.join(FORMATS)}"
        )
    return kind, place


def split_file(place: str) -> tuple[str, str]:
    """Returns the folder and the name of a file of safetensors; "" for a folder.

    >>> split_file("gs://bucket/lora.safetensors?endpoint=x")
    ('gs://bucket?endpoint=x', 'lora.safetensors')
    >>> split_file("/models/llama")
    ('/models/llama', '')
    """
    path, question, query = place.partition("?")
    folder, _, name = path.rpartition("/")
    if not name.endswith(".safetensors"):
        return place, ""
    return (
        folder or "/" if path.startswith("/") else folder or "."
    ) + question + query, name


class ForeignRun:
    """The checkpoints of another project below one location; from ``open_foreign``.

    Threads may share it.
    """

    def __init__(
        self,
        root: ForeignRoot,
        lookalike: Callable[[], str | None] = lambda: None,
        explained: Callable[[NotFoundError], NotFoundError] = lambda error: error,
    ) -> None:
        self.root = root
        """Reads its steps."""
        self._lookalike = lookalike
        """Returns the URL of checkpoints of another format at the same place."""
        self._explained = explained
        """Adds what is there instead to an error."""
        self.mapping: mapping_rules.Rules | None = None
        """Rules that make another tree of each checkpoint; None: the stored one."""

    def __repr__(self) -> str:
        return f"<ForeignRun {self.name}>"

    def map(self, mapping: MappingRules) -> "ForeignRun":
        """Returns the run with the tree that rules make of each checkpoint.

        Args:
            mapping: As for ``Run.restore``.

        Raises:
            InvalidRequestError: The rules are none, or the run has a mapping.
        """
        if self.mapping is not None:
            raise InvalidRequestError(
                f"{self.name}: expected one mapping, got another one; write one "
                "document of rules for both"
            )
        found = copy(self)
        found.mapping = load_rules(mapping)
        return found

    @property
    def name(self) -> str:
        """URL of the run, with the name of its format."""
        return self.root.url

    def steps(self) -> Sequence[int]:
        """Returns the finished steps, ascending.

        Raises:
            NotFoundError: There is nothing of this format, or only checkpoints of
                another one.
        """
        try:
            found = self.root.steps()
        except NotFoundError as e:
            raise self._explained(e) from e
        if not found and (other := self._lookalike()):
            raise NotFoundError(
                f"{self.name}: expected finished checkpoints of this format, got some "
                f"of another one; use {other}"
            )
        return found

    @list_results("checkpoint")
    def checkpoints(
        self, *, on_damage: Callable[[DataLossError], object] | None = None
    ) -> Iterator[ForeignInfo]:
        """Yields all finished checkpoints, newest first; reads what describes each.

        Args:
            on_damage: Called with the error of each checkpoint that cannot be read; the
                others are yielded. By default the error is raised.

        Raises:
            StoreError: As for ``open``.
        """
        for step in reversed(self.steps()):
            try:
                yield self.checkpoint(step)
            except DataLossError as e:
                if on_damage is None:
                    raise
                on_damage(e)

    def checkpoint(self, which: Which = "latest") -> ForeignInfo:
        """Returns one checkpoint; see ``open``."""
        return self.open(which).info

    def latest(self) -> ForeignInfo | None:
        """Returns the newest checkpoint; None if there is none."""
        return self.checkpoint() if self.steps() else None

    def open(self, which: Which = "latest") -> "ForeignCheckpoint":
        """Reads what describes a checkpoint, and no elements.

        Args:
            which: A step, or "latest".

        Raises:
            InvalidRequestError: It is neither.
            NotFoundError: There is no such checkpoint, or it is unfinished.
            DataLossError: Its files are damaged.
            PreconditionError: It holds something that no checkpoint of a store can
                hold, such as two arrays of one name.
        """
        reader = self.read(which)
        return ForeignCheckpoint(reader.map(self.mapping), reader.info)

    def read(self, which: Which) -> "ForeignReader":
        """Returns the reader of a checkpoint as it is stored; see ``open``."""
        if which == "latest":
            steps = self.steps()
            if not steps:
                raise NotFoundError(
                    f"{self.name} has no finished checkpoint; check its URL"
                )
            which = steps[-1]
        if type(which) is not int:
            raise InvalidRequestError(
                f"{self.name}: expected a step or 'latest', got {which!r}; other "
                "projects have no tags"
            )
        return ForeignReader(self.name, self.root.open(which))

    def items(self, which: Which = "latest") -> Items:
        """Returns the items of a checkpoint; see ``Run.items``."""
        return self.open(which).items

    def restore(
        self,
        which: Which = "latest",
        *,
        deadline: DurationLike = DEFAULT_DEADLINE,
        like: Like | None = None,
        mesh: "Mesh | None" = None,
        rules: "Rules | None" = None,
        select: "Patterns | None" = None,
        cast: "DTypeLike | None" = None,
        missing: Literal["error", "keep"] = "error",
        indivisible: Indivisible = "error",
        progress: ProgressCallback | None = None,
    ) -> Like:
        """Returns the state of a checkpoint; see ``Run.restore``.

        Each process reads what its own devices need. `which` is a step, or "latest";
        ``Run.restore`` describes the other arguments.

        Raises:
            StoreError: As for ``open``, and as for ``Run.restore``.
        """
        request = collect_arguments(RestoreRequest, locals(), mapping=self.mapping)
        state: Like = self.read(which).restore(request, deadline)
        return state


class ForeignReader(TreeReader):
    """Reads one checkpoint of another project."""

    def __init__(self, run: str, step: ForeignStep) -> None:
        super().__init__(step.tree, allocate=allocate)
        self.info = ForeignInfo.from_step(run, step)
        """The checkpoint as its files describe it."""
        self._step = step
        self._lost = [item for item in step.unread if item.is_tree]
        """Items with leaves that cannot be read."""

    @property
    def name(self) -> str:
        """URL of the run, and the step after "@"."""
        return f"{self.info.run}@{self.info.step}"

    def restore(self, request: RestoreRequest, deadline: DurationLike) -> Any:
        """See ``TreeReader``."""
        what = f"restore of {self.name}: deadline="
        ends = Deadline.after(checked_duration(what, deadline).total_seconds())
        chosen = request.patterns(self.name)
        takes_all = request.like is None or request.missing == "keep"
        if self._lost and chosen is None and takes_all:
            raise DataLossError(
                f"restore of {self.name}: expected a step that can be read whole, got "
                f"{self._lost_text()}; name the leaves of the others with select="
            )
        with Meter("restore", self.name, request.progress) as meter:
            # 1. rejects what cannot be restored
            with meter.phase("plan"):
                view = self.map(request.mapping)
                rows = view.select_rows(chosen)
            with meter.phase("plan"), self._naming_lost():
                # text keys: of Orbax, and dotted names of others
                target = view.choose_target(request, rows, has_text_keys=True)
            assembly = view.plan_reads(target.regions(), target.place, meter, ends)
            source = view.open_source()
            assert isinstance(source, StepSource | MappedSource)
            source.read(assembly.missing, assembly)  # 2. only what was planned
            assembly.check_complete()
            with meter.phase("rebuild"):
                result = target.result()
        self.report = self._report(source, assembly)
        if isinstance(view, MappedReader):
            self.report = replace(self.report, mapping=view.mapped.name)
        return result

    def _lost_text(self) -> str:
        return "; ".join(
            f"the item {item.name}, which cannot ({item.reason})" for item in self._lost
        )

    @contextmanager
    def _naming_lost(self) -> Iterator[None]:
        """Adds the items that cannot be read to the error of leaves that are absent."""
        try:
            yield
        except (MismatchError, NotFoundError) as e:
            if not self._lost:
                raise
            raise type(e)(f"{e}; of the step, not read: {self._lost_text()}") from e

    @cached_property
    def items(self) -> Items:
        """Items that are read; one that cannot be raises its error."""
        unread = {
            item_name(item.name): item.reason
            for item in self._step.unread
            if item.is_needed and not item.is_tree
        }
        return Items(self.name, self.tree, self.read_arrays, None, unread=unread)

    def select_rows(self, select: "Sequence[Pattern] | None") -> list[int]:
        with self._naming_lost():
            return super().select_rows(select)

    @cached_property
    def manifest(self) -> Manifest:
        """The tree with its chunks, none of which has a checksum or a place here."""
        count = self.tree.chunk_count
        if count > MAX_CHUNKS:
            raise PreconditionError(
                f"{self.name}: expected at most {MAX_CHUNKS} chunks, got {count}; read "
                "it with its own library"
            )
        nowhere = np.zeros(count, np.int64)
        return Manifest(
            self.tree,
            Sums(
                ordinal=np.empty(0, np.int64),
                crc32c=np.empty(0, np.uint32),
                digests=np.empty((0, 16), np.uint8),
            ),
            ChunkLocations(
                files=(self._step.url,), file=nowhere, offset=nowhere, length=nowhere
            ),
        )

    def open_source(self) -> StepSource:
        return StepSource(self._step, name=self.name)

    def _report(
        self, source: StepSource | MappedSource, assembly: Assembly
    ) -> RestoreReport:
        meter = assembly.meter
        return RestoreReport(
            run=self.info.run,
            step=self.info.step,
            start_time=meter.start_time,
            read_bytes=source.read_bytes,
            received_bytes=0,
            returned_bytes=assembly.buffer_bytes,
            seconds=meter.seconds,
            timings=meter.timings,
            timeline=meter.timeline,
            slowest=meter.slowest.name,
            slowest_seconds=meter.slowest.seconds,
            slowest_process=None,
            is_verified=self.info.is_verified,
        )


class ForeignCheckpoint(OpenTree):
    """One checkpoint of another project; from ``ForeignRun.open``.

    It has no document, and each process reads what its own devices need. An item that
    cannot be read raises its error. Threads may share it.
    """

    def __init__(self, reader: TreeReader, info: ForeignInfo) -> None:
        super().__init__(reader)
        self.info = info
        """The checkpoint as its files describe it."""
