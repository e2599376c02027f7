"""Diagnoses a place for a store: a directory, a bucket, or a server.

The checks write below ``probes/`` of a root, or to one run of a server, and delete what
they wrote. They stay within the limits of `Effort`.
"""

import asyncio
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from storesvc.errors import InvalidFieldError
from storesvc.errors import StoreError as StorageError
from storesvc.format.layout import PROBES
from storesvc.storage.location import Storage, is_this_machine, parse_root, storage_at
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc_client._doctor import drill
from storesvc_client._doctor.buckets import (
    GCS,
    S3,
    Workload,
    check_clock,
    check_settings,
    estimate_cost,
)
from storesvc_client._doctor.directory import check_directory
from storesvc_client._doctor.drill import DrillRun
from storesvc_client._doctor.findings import (
    Diagnosis,
    Effort,
    Finding,
    Severity,
    passed,
    problem,
    skipped,
)
from storesvc_client._doctor.storage_checks import PROMISES, SPEED_CHECKS, Probe
from storesvc_client._values.arguments import DurationLike, checked_duration
from storesvc_client.errors import InvalidRequestError, StoreError

if TYPE_CHECKING:
    from storesvc_client import Client

from datetime import UTC, datetime
from importlib.metadata import version
from typing import Final

from storesvc_client._doctor.directory import judge_clock

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
    state_bytes: int | None = None,
    interval: DurationLike = timedelta(minutes=10),
    on_finding: Report = lambda _: None,
) -> Diagnosis:
    """Checks whether a place can hold a store, and measures it.

    Takes up to ten minutes, writes up to 2 GiB, and deletes what it wrote: objects
    below ``probes/`` of a root, one run of a server.

    >>> doctor("/ckpts").exit_code
    0

    Args:
        target: Root of a store, which need not exist yet, or ``HOST:PORT`` of a server.
        ca: See ``connect``; for a server.
        cert: See ``connect``; for a server.
        key: See ``connect``; for a server.
        token: See ``connect``; for a server.
        insecure: See ``connect``; for a server.
        state_bytes: Bytes of a checkpoint, to estimate the cost of a month in a bucket.
        interval: Time between two saves, a ``timedelta`` or seconds, for the cost.
        on_finding: Called with each finding as it is made.

    Raises:
        InvalidRequestError: The target is neither a root nor an address.
    """
    try:
        place = parse_root(target)
        storage = storage_at(place) if "://" in place else None
    except InvalidFieldError as e:
        raise InvalidRequestError(f"doctor: {e}") from e
    examination = Examination(on_finding)
    if storage is None:
        files = {"ca": ca, "cert": cert, "key": key}
        options = {name: fspath(file) for name, file in files.items() if file}
        if isinstance(token, PathLike):
            options["token_file"] = fspath(token)
        elif token is not None:
            options["token"] = token if isinstance(token, str) else token()
        return examination.examine_server(place, options, insecure=insecure)
    work = None
    if state_bytes is not None:
        every = checked_duration("doctor: interval=", interval)
        work = Workload(state_bytes=state_bytes, interval_seconds=every.total_seconds())
    return examination.examine_root(place, storage, work)


class Examination:
    """The checks of one place in turn, and what they found."""

    def __init__(self, report: Report, effort: Effort = Effort()) -> None:  # noqa: B008 - frozen
        self._report = report
        self._effort = effort
        self._findings: list[Finding] = []
        self._measured: dict[str, float] = {}
        self._until = time.monotonic() + effort.max_seconds
        self._id = f"doctor-{uuid.uuid4().hex[:12]}"
        self._was_opened = False

    def examine_root(
        self, root: str, storage: Storage, work: Workload | None
    ) -> Diagnosis:
        """Checks a directory or a bucket."""
        folder = f"{PROBES}{self._id}/"
        if storage.is_files:
            path = Path(storage.spec["path"], folder)
            if not self._make("directory", lambda: _check_in(path)):
                return self._diagnosis(storage.name)
        elif storage.is_remote:
            self._make("settings", lambda: check_settings(storage))
            self._make("clock", lambda: check_clock(storage))
        written = 0
        try:
            if probe := asyncio.run(self._check_storage(root, folder)):
                written = probe.written_bytes
                if not storage.is_memory and not self._has_failed:
                    written += self._check_saves(root, folder)
        finally:
            if self._was_opened:
                self._make("clean-up", lambda: _delete(root, storage, folder))
        if work is not None and storage.is_remote:
            prices = S3 if storage.is_s3 else GCS
            self._make("cost", lambda: estimate_cost(work, prices))
        best = int(self._measured.get("recommended_concurrency", 0))
        is_better = storage.is_remote and best > storage.concurrency
        return self._diagnosis(
            storage.name,
            recommended_root=with_concurrency(root, best) if is_better else None,
            written_bytes=written,
        )

    async def _check_storage(self, root: str, folder: str) -> Probe | None:
        """Checks the promises of a storage, then its speed; None if it cannot be
        opened."""
        opening = await self._gather("open", TensorStoreBucket.open(root))
        if opening is None:
            return None
        self._was_opened = True
        probe = Probe(
            bucket=opening,
            storage=opening.opened.storage,
            folder=folder,
            until=self._until,
            effort=self._effort,
            measured=self._measured,
        )
        for check in (*PROMISES, *SPEED_CHECKS):
            name = check.__name__.removeprefix("check_")
            if check in SPEED_CHECKS and self._has_failed:
                self._add(skipped(name, "a check before it failed"))
            elif self._has_time(name):
                found = await self._gather(name, check(probe))
                if found is None:  # as would be said of the others
                    break
                for finding in found:
                    self._add(finding)
        return probe

    def _check_saves(self, root: str, folder: str) -> int:
        """Makes the drill in a store below a root; returns the bytes that it writes."""
        place = DrillRun(
            target=below(root, f"{folder}store"),
            options={},
            run="doctor/drill",
            state_bytes=self._effort.state_bytes,
        )
        if self._make("save", lambda: drill.check_saves(place, self._measured)):
            other = replace(place, target=below(root, f"{folder}flipped"))

            def flip() -> str:
                return asyncio.run(_flip(root, f"{folder}flipped/"))

            self._make("flipped-bit", lambda: drill.check_flip(other, flip))
        return 6 * self._effort.state_bytes

    # --- servers --------------------------------------------------------------------

    def examine_server(
        self, address: str, options: Mapping[str, str], *, insecure: bool
    ) -> Diagnosis:
        """Checks a server, and what this client may do there."""
        place = DrillRun(
            target=address,
            options={**options, "insecure": insecure},
            run=f"doctor/{self._id}",
            state_bytes=self._effort.state_bytes,
        )
        is_remote = not is_this_machine(address.rpartition(":")[0] or address)
        is_encrypted = not insecure and (is_remote or "ca" in options)
        clients: list[Client] = []

        def open_client() -> Iterable[Finding]:
            clients.append(place.connect())
            return check_server(
                clients[0], is_encrypted=is_encrypted, is_remote=is_remote
            )

        if not self._make("server", open_client):
            return self._diagnosis(address)
        with clients[0] as client:
            try:
                if self._make("save", lambda: drill.check_saves(place, self._measured)):
                    self._make("clock", lambda: check_server_clock(client, place.run))
            finally:
                self._make("clean-up", lambda: drill.delete_run(place))
        return self._diagnosis(address, written_bytes=5 * self._effort.state_bytes)

    # --- findings -------------------------------------------------------------------

    @property
    def _has_failed(self) -> bool:
        return any(found.severity is Severity.FAILURE for found in self._findings)

    def _has_time(self, name: str) -> bool:
        """Returns whether a check may begin; reports that it is skipped otherwise."""
        if time.monotonic() < self._until or name == "clean-up":
            return True
        self._add(skipped(name, f"{self._effort.max_seconds:.0f} s have passed"))
        return False

    def _make(self, name: str, check: Callable[[], Iterable[Finding]]) -> bool:
        """Makes a check; returns whether it ended without an error."""
        if not self._has_time(name):
            return False
        with self._reported(name) as ended:
            for finding in check():
                self._add(finding)
            ended.append(True)
        return bool(ended)

    async def _gather(self, name: str, check: Awaitable[T]) -> T | None:
        """Returns the result of a check; reports an error, and returns None."""
        with self._reported(name):
            return await check
        return None

    @contextmanager
    def _reported(self, name: str) -> Generator[list[bool]]:
        """Reports an error of the block as a failure of the check."""
        try:
            yield []
        except (StoreError, StorageError, OSError, TimeoutError) as e:
            self._add(problem("check.failed", f"{name}: {str(e) or type(e).__name__}"))

    def _add(self, finding: Finding) -> None:
        self._findings.append(finding)
        self._report(finding)

    def _diagnosis(
        self,
        place: str,
        *,
        recommended_root: str | None = None,
        written_bytes: int = 0,
    ) -> Diagnosis:
        return Diagnosis(
            place=place,
            findings=tuple(self._findings),
            measured=self._measured,
            recommended_root=recommended_root,
            written_bytes=written_bytes,
        )


def below(root: str, folder: str) -> str:
    """Returns the root of a folder below a root, with the same options."""
    url = urlsplit(root)
    return urlunsplit(url._replace(path=f"{url.path.rstrip('/')}/{folder}"))


def with_concurrency(root: str, count: int) -> str:
    """Returns a root with another number of concurrent requests."""
    url = urlsplit(root)
    options = dict(parse_qsl(url.query)) | {"concurrency": str(count)}
    return urlunsplit(url._replace(query=urlencode(options, safe=":/")))


def _check_in(folder: Path) -> list[Finding]:
    folder.mkdir(parents=True)
    try:
        return check_directory(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _delete(root: str, storage: Storage, folder: str) -> list[Finding]:
    """Deletes all objects of the checks, and the folders of files."""

    async def delete() -> None:
        await (await TensorStoreBucket.open(root)).delete_below(folder)

    path = Path(storage.spec.get("path", ""))
    if not storage.is_files:
        asyncio.run(delete())
    elif (path / folder).exists():
        shutil.rmtree(path / folder)
    if storage.is_files:
        with suppress(OSError):  # other probes, or a store
            (path / PROBES).rmdir()
            path.rmdir()
    return []


async def _flip(root: str, folder: str) -> str:
    """Flips a bit of the largest object below a folder; returns its path there."""
    bucket = await TensorStoreBucket.open(root)
    sizes = await bucket.sizes(folder)
    path = max(sizes, key=lambda path: sizes[path])
    stored = await bucket.read(path)
    assert stored is not None, path
    data = bytearray(stored.data)
    data[len(data) // 2] ^= 1
    await bucket.write(path, bytes(data))
    return path.removeprefix(folder)


# --- Servers -------------------------------------------------------------------------

NEEDED: Final = (
    "uploads.begin",
    "uploads.commit",
    "checkpoints.list",
    "checkpoints.read",
)


def check_server(
    client: "Client", *, is_encrypted: bool, is_remote: bool
) -> list[Finding]:
    """Asks a server about itself and the caller; writes nothing.

    Raises:
        StoreError: The server does not answer.
    """
    return [
        _check_version(client.info().version),
        _check_encryption(is_encrypted=is_encrypted, is_remote=is_remote),
        *_check_identity(client, is_remote=is_remote),
    ]


def _check_version(server: str) -> Finding:
    ours = version("storesvc")
    shown = f"server {server}, client {ours}"
    if server.split(".")[:2] == ours.split(".")[:2]:
        return passed("version", shown)
    return problem("version.differs", shown)


def _check_encryption(*, is_encrypted: bool, is_remote: bool) -> Finding:
    if is_encrypted:
        return passed("encryption", "TLS")
    if not is_remote:
        return passed("encryption", "plaintext within this machine")
    return problem("encryption.none", "plaintext to another machine")


def _check_identity(client: "Client", *, is_remote: bool) -> list[Finding]:
    who = client.identity()
    name = who.principal or "anonymous"
    if not who.is_restricted:
        shown = f"{name}: there is no policy, and every caller may do everything"
        return [problem("policy.none", shown) if is_remote else passed("policy", shown)]
    allowed = client.test_permissions(None, NEEDED)
    lacking = [permission for permission in NEEDED if permission not in allowed]
    if not lacking:
        return [passed("permissions", f"{name}: {', '.join(NEEDED)}")]
    shown = f"{name} lacks {', '.join(lacking)} on all runs"
    return [problem("permissions.role", shown)]


def check_server_clock(client: "Client", run: str) -> list[Finding]:
    """Compares the time that a server gives a checkpoint with the time of the save."""
    before = datetime.now(UTC)
    saved = client.run(run).save(9, {"clock": 0}).result()
    after = datetime.now(UTC)
    skew = max(saved.create_time - after, timedelta(0))
    skew += min(saved.create_time - before, timedelta(0))
    return judge_clock(skew.total_seconds(), "the server")
