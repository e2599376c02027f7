"""Diagnoses a place for a store: a directory, a bucket, or a server.

The checks write below ``probes/`` of a root, or to one run of a server, and delete what
they wrote. They stay within the limits of `Effort`.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.metadata import version
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit, urlunsplit

from storesvc.errors import InvalidFieldError
from storesvc.errors import StoreError as StorageError
from storesvc.format.layout import PROBES
from storesvc.format.names import InvalidNameError, parse_which
from storesvc.storage.location import Storage, is_this_machine, parse_root, storage_at
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc_client._doctor import drill
from storesvc_client._doctor.drill import DrillRun
from storesvc_client._doctor.findings import (
    Diagnosis,
    Effort,
    Finding,
    Severity,
    judge,
    judge_clock,
    problem,
    skipped,
)
from storesvc_client._doctor.kinds import (
    Workload,
    absent_directories,
    check_clock,
    check_directory,
    check_settings,
    delete_directories,
    estimate_cost,
)
from storesvc_client._doctor.storage_checks import PROMISES, SPEED_CHECKS, Probe
from storesvc_client._rpc.connection import holds_store
from storesvc_client._values.arguments import DurationLike, checked_duration
from storesvc_client.errors import DataLossError, InvalidRequestError, StoreError

if TYPE_CHECKING:
    from storesvc_client import Client

T = TypeVar("T")

Report = Callable[[Finding], object]
"""Called with each finding as it is made."""


def doctor(
    target: "str | PathLike[str]",
    *,
    ca: "str | PathLike[str] | None" = None,
    cert: "str | PathLike[str] | None" = None,
    key: "str | PathLike[str] | None" = None,
    token: "str | PathLike[str] | Callable[[], str] | None" = None,
    insecure: bool = False,
    direct: "str | PathLike[str] | None" = None,
    tree: int | str | None = None,
    interval: DurationLike = timedelta(minutes=10),
    on_finding: Report = lambda _: None,
) -> Diagnosis:
    """Checks whether a place can hold a store, and measures it.

    Takes up to ten minutes, writes up to 2 GiB, and deletes what it wrote: objects
    below ``probes/`` of a root, one run of a server.

    >>> doctor("/ckpts").exit_code
    0

    Arguments that are not listed are as for ``connect``, for a server.

    Args:
        target: Root of a store, which need not exist yet, or ``HOST:PORT`` of a server.
        direct: Root of the store of a server: compares saves and restores through the
            server with direct ones.
        tree: Bytes of a checkpoint, or a checkpoint of the place, such as
            ``"prod/llama-8b@latest"``, to estimate the cost of a month in a bucket.
        interval: Time between two saves, a ``timedelta`` or seconds, for the cost.
        on_finding: Called with each finding as it is made.

    Raises:
        InvalidRequestError: The target is neither a root nor an address, or another
            argument is not valid.
        StoreError: The checkpoint of ``tree`` cannot be read.
    """
    try:
        place = parse_root(target)
        storage = storage_at(place) if "://" in place else None
        root = None if direct is None else parse_root(direct)
        base = storage if root is None else storage_at(root)
    except InvalidFieldError as e:
        raise InvalidRequestError(f"doctor: {e}; or HOST:PORT of a server") from e
    if storage is not None and root is not None:
        raise InvalidRequestError(
            f"doctor: direct=: expected the address of a server with it, got {place!r}"
        )
    files = {"ca": ca, "cert": cert, "key": key}
    options: dict[str, Any] = {
        name: fspath(file) for name, file in files.items() if file
    }
    if isinstance(token, PathLike):
        options["token_file"] = fspath(token)
    elif token is not None:
        options["token"] = token if isinstance(token, str) else token()
    if storage is None:
        options["insecure"] = insecure
    work = None
    if tree is not None:
        every = checked_duration("doctor: interval=", interval)
        work = _read_workload(DrillRun(target=place, options=options), tree, every)
    examination = Examination(on_finding)
    if storage is None:
        examination.examine_server(place, options, root)
    else:
        examination.examine_root(place, storage)
    return examination.end(base, work)


def _read_workload(place: DrillRun, tree: int | str, every: timedelta) -> Workload:
    """Returns the saves of a tree, given by its bytes or by a checkpoint."""
    seconds = every.total_seconds()
    if isinstance(tree, int):
        return Workload(tree, tree, seconds)
    if "://" in place.target and not holds_store(place.target, timeout=_OPEN_SECONDS):
        raise InvalidRequestError(
            f"doctor: tree={tree!r}: {place.target} holds no store; give the bytes of "
            "a checkpoint"
        )
    run, _, which = tree.rpartition("@")
    try:
        parsed = parse_which(which)
    except InvalidNameError as e:
        raise InvalidRequestError(f"doctor: tree={tree!r}: {e}") from e
    with place.connect() as client:
        found = client.run(run).checkpoint(parsed)
    return Workload(found.stored_bytes, found.own_bytes, seconds)


_OPEN_SECONDS: Final = 60.0


class Examination:
    """The checks of one place in turn, and what they found."""

    def __init__(self, report: Report, effort: Effort = Effort()) -> None:  # noqa: B008 - frozen
        self._report = report
        self._effort = effort
        self._findings: list[Finding] = []
        self._measured: dict[str, float] = {}
        self._until = time.monotonic() + effort.max_seconds
        self._id = f"doctor-{uuid.uuid4().hex[:12]}"
        self._place = ""
        self._written_bytes = 0
        self._was_opened = False

    def examine_root(self, root: str, storage: Storage) -> None:
        """Checks a directory or a bucket."""
        self._place, folder = storage.name, f"{PROBES}{self._id}/"
        if not storage.is_files:
            if storage.is_remote:
                self._make("settings", lambda: check_settings(storage))
                self._make("clock", lambda: check_clock(storage))
            try:
                self._check_storage(root, folder)
            finally:
                if storage.is_remote and self._was_opened:
                    self._make("clean-up", lambda: asyncio.run(_delete(root, folder)))
            return
        path = Path(storage.spec["path"], folder)
        absent = absent_directories(path)
        try:
            needed = self._effort.stored_bytes
            self._make("directory", lambda: check_directory(path, needed_bytes=needed))
            if not self._has_failed:
                self._check_storage(root, folder)
        finally:
            self._make("clean-up", lambda: delete_directories(path, absent))

    def _check_storage(self, root: str, folder: str) -> None:
        """Checks the promises of a storage, then its speed, then saves in it."""
        with asyncio.Runner() as runner:
            opening = TensorStoreBucket.open(root)
            bucket = self._ask("open", lambda: runner.run(opening))
            if bucket is None:
                return
            self._was_opened = True
            probe = Probe(bucket, folder, self._until, self._effort, self._measured)
            for check in (*PROMISES, *SPEED_CHECKS):
                name = check.__name__.removeprefix("check_")
                if check in SPEED_CHECKS and self._has_failed:
                    self._add(skipped(name, "a check before it failed"))
                elif not self._make(name, lambda: runner.run(check(probe))):  # noqa: B023
                    break  # as would be said of the others
            self._written_bytes = probe.written_bytes
            if not (probe.storage.is_memory or self._has_failed):
                self._check_saves(root, probe, runner)

    def _check_saves(self, root: str, probe: Probe, runner: asyncio.Runner) -> None:
        """Makes the drill in stores below a root."""
        state_bytes, folder = self._effort.state_bytes, probe.folder
        place = DrillRun(target=below(root, f"{folder}store"), state_bytes=state_bytes)
        self._written_bytes += 6 * state_bytes
        if self._make("save", lambda: drill.check_saves(place, self._measured)):
            other = replace(place, target=below(root, f"{folder}flipped"))
            flip = f"{folder}flipped/"
            self._make(
                "flipped-bit",
                lambda: drill.check_flip(
                    other, lambda: runner.run(flip_a_bit(probe.bucket, flip))
                ),
            )

    def examine_server(
        self, address: str, options: Mapping[str, Any], root: str | None = None
    ) -> None:
        """Checks a server, and what this client may do there; with the root of its
        store, compares saves through the server with direct ones."""
        self._place = address
        place = DrillRun(
            target=address,
            options=options,
            run=f"doctor/{self._id}",
            state_bytes=self._effort.state_bytes,
        )
        is_remote = not is_this_machine(address.rpartition(":")[0] or address)
        client = self._ask("server", place.connect)
        if client is None:
            return
        with client:
            self._make(
                "server", lambda: check_server(client, options, is_remote=is_remote)
            )
            self._written_bytes = 5 * place.state_bytes
            try:
                if self._make("save", lambda: drill.check_saves(place, self._measured)):
                    self._make("clock", lambda: check_server_clock(client, place.run))
                    self._compare_ways(place, root)
            finally:
                self._make("clean-up", lambda: drill.delete_run(place))

    def _compare_ways(self, place: DrillRun, root: str | None) -> None:
        if root is None:
            why = "give the root of the server's store to compare with direct saves"
            self._add(skipped("direct", why))
            return
        self._written_bytes += drill.COMPARED * place.state_bytes
        reach, measured = partial(_reaches, root), self._measured
        self._make("direct", lambda: drill.compare_ways(place, root, reach, measured))

    def end(
        self, storage: Storage | None = None, work: Workload | None = None
    ) -> Diagnosis:
        """Estimates the cost of saves in a storage, and returns the diagnosis."""
        if work is not None:
            self._make("cost", lambda: estimate_cost(work, storage))
        return Diagnosis(
            place=self._place,
            findings=tuple(self._findings),
            measured=self._measured,
            written_bytes=self._written_bytes,
        )

    @property
    def _has_failed(self) -> bool:
        return any(found.severity is Severity.FAILURE for found in self._findings)

    def _make(self, name: str, check: Callable[[], Iterable[Finding]]) -> bool:
        """Makes a check; returns whether it ended without an error."""
        found = self._ask(name, check)
        for finding in found or ():
            self._add(finding)
        return found is not None

    def _ask(self, name: str, call: Callable[[], T]) -> T | None:
        """Returns the result of a call; if it fails, reports that, and returns None."""
        is_last = name == "clean-up"
        if time.monotonic() >= self._until and not is_last:
            self._add(skipped(name, f"{self._effort.max_seconds:.0f} s have passed"))
            return None
        try:
            return call()
        except (StoreError, StorageError, OSError) as e:
            text = getattr(e, "strerror", None) or str(e) or type(e).__name__
            code = "clean-up.left" if is_last else "check.failed"
            if isinstance(e, DataLossError):
                code = "save.wrong"
            self._add(problem(code, f"{name}: {text}"))
            return None

    def _add(self, finding: Finding) -> None:
        self._findings.append(finding)
        self._report(finding)


def below(root: str, folder: str) -> str:
    """Returns the root of a folder below a root, with the same options."""
    url = urlsplit(root)
    return urlunsplit(url._replace(path=f"{url.path.rstrip('/')}/{folder}"))


async def _delete(root: str, folder: str) -> list[Finding]:
    """Deletes the objects of the checks, and what an interrupted one still writes."""
    bucket = await TensorStoreBucket.open(root)
    for _ in range(10):
        await bucket.delete_below(folder)
        await asyncio.sleep(_LATE_SECONDS)
        if not (left := await bucket.list(folder)):
            return []
    return [problem("clean-up.left", f"{len(left)} objects below {folder}")]


_LATE_SECONDS: Final = 0.5
"""Time in which an abandoned request may still arrive."""


def _reaches(root: str) -> bool:
    """Returns whether this machine reads the store at a root."""
    with suppress(StoreError):
        return holds_store(root, timeout=_OPEN_SECONDS)
    return False


async def flip_a_bit(bucket: TensorStoreBucket, folder: str) -> str:
    """Flips a bit of the largest object below a folder; returns its path there."""
    sizes = await bucket.sizes(folder)
    path = max(sizes, key=lambda path: sizes[path])
    stored = await bucket.read(path)
    assert stored is not None, path
    data = bytearray(stored.data)
    data[0] ^= 1  # of the first chunk: there may be unused bytes between two
    await bucket.write(path, bytes(data))
    return path.removeprefix(folder)


# --- Servers -------------------------------------------------------------------------


def check_server(
    client: "Client", options: Mapping[str, Any], *, is_remote: bool
) -> list[Finding]:
    """Asks a server about itself and the caller; writes nothing."""
    ours, theirs = version("storesvc"), client.info().version
    shown = f"server {theirs}, client {ours}"
    differs = theirs.split(".")[:2] != ours.split(".")[:2]
    found = judge("version.differs", shown if differs else "", shown)
    is_encrypted = "ca" in options or (is_remote and not options.get("insecure"))
    shown = "plaintext to another machine"
    fine = "TLS" if is_encrypted else "plaintext within this machine"
    is_plain = is_remote and not is_encrypted
    found += judge("encryption.none", shown if is_plain else "", fine)
    who = client.identity()
    name = who.principal or "anonymous"
    if not who.is_restricted:
        shown = f"{name}: there is no policy, and every caller may do everything"
        return found + judge("policy.none", shown if is_remote else "", shown)
    needed = ("uploads.begin", "uploads.commit", "checkpoints.list", "checkpoints.read")
    allowed = client.test_permissions(None, needed)
    lacking = [permission for permission in needed if permission not in allowed]
    shown = f"{name} lacks {', '.join(lacking)} on all runs"
    fine = f"{name}: {', '.join(needed)}"
    return found + judge("permissions.role", shown if lacking else "", fine)


def check_server_clock(client: "Client", run: str) -> list[Finding]:
    """Compares the time that a server gives a checkpoint with the time of the save."""
    before = datetime.now(UTC)
    saved = client.run(run).save(9, {"clock": 0}).result()
    after = datetime.now(UTC)
    skew = max(saved.create_time - after, timedelta(0))
    skew += min(saved.create_time - before, timedelta(0))
    return judge_clock(skew.total_seconds(), "the server")
