"""Decides what the audit log records, and appends to it.

Entries that are waiting are written together, with one sync for all of them. An entry
is written completely or not at all: after an error, the file is cut back to where it
was. One process at a time writes a file, which is locked. The file is opened again when
its path leads to another one, as after a rotation; the chain continues in the new file.

1. Before a call that changes something begins its work, its entry ``intent`` is
   durable; if it cannot be written, the call fails and changes nothing. The only
   exceptions are the caller's own holds, which every restore needs.
2. When a call that changes something ends, its entry ``ended`` has the outcome.
3. A call that is denied has an entry ``denied``, whatever it is.

Strangers must not fill the disk of the log, whose loss rejects commits. So the denials
of each caller that a binding names, and of all others together, have an allowance; what
exceeds it is counted, and the count is in the next denial or, after a minute, in an
entry of its own. On a disk that is nearly full, all denials are only counted.

Calls that only read are recorded on request. So are the parts of an upload, whose begin
and commit are recorded. Labels, metrics and tokens are in no entry.
"""

import asyncio
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from cachetools import TTLCache

from storesvc.auth.call import Call, Effect, rpcs_with
from storesvc.auth.policy import Permission, Resource
from storesvc.errors import (
    AuditUnavailableError,
    IdentityRequiredError,
    InvalidCertificateError,
    InvalidFieldError,
    InvalidTokenError,
    PermissionDeniedError,
    TokenAudienceError,
    TokenExpiredError,
    UnknownIssuerError,
)
from storesvc.format.audit_chain import (
    FIRST,
    REOPENED,
    STARTED,
    TORN,
    line_digest,
    make_line,
)
from storesvc.storage.rooted_files import sync_directory
from storesvc.telemetry.events import AuditFailed, publish

_TAIL_BYTES: Final = 64 << 10
"""Bytes at the end of a file that have its last line."""

ROOM_BYTES: Final = 64 << 20
"""Space of the disk, or an eighth of a smaller one, that is kept for calls that change
something: denials are recorded only if there is more."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Waiting:
    """An entry that is not written yet."""

    fields: Mapping[str, Any]
    done: "asyncio.Future[None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class AuditLog:
    """The audit log of a server process."""

    def __init__(self, path: Path, *, server: str) -> None:
        """Opens the log; creates the file if there is none."""
        self._path = path
        self.server = server
        """Name of this server in the entries."""
        self._waiting: list[_Waiting] = []
        self._writing: asyncio.Task[None] | None = None
        self._seq, self._prev = 0, FIRST
        self._file = -1
        self._durable = threading.Lock()
        """Held while the file has an entry that is not durable yet."""
        self.syncs = 0
        """Number of syncs."""
        self.has_room = True
        """False if the disk was nearly full at the last write."""
        try:
            self._open()
        except OSError as e:
            raise InvalidFieldError(
                f"audit log {path}: cannot be written: {e.strerror}; correct the path"
            ) from e

    async def write(self, fields: Mapping[str, Any]) -> None:
        """Writes an entry, and returns once it is durable.

        Raises:
            AuditUnavailableError: It cannot be written.
        """
        waiting = _Waiting(fields)
        self._waiting.append(waiting)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        # Shielded: an entry of a call that is cancelled is written anyway.
        await asyncio.shield(waiting.done)

    def duplicate(self) -> tuple[int, int]:
        """Returns a descriptor of the file, which the caller closes, and the size of
        its durable entries.

        Raises:
            OSError: The log is closed, or the file cannot be used.
        """
        with self._durable:
            file = os.dup(self._file)
            return file, os.fstat(file).st_size

    async def reopen(self) -> None:
        """Opens the file again, as after a rotation; logs an error if it cannot."""
        try:
            await self.write({"time": now_text(), "stage": REOPENED})
        except AuditUnavailableError as e:
            _log.warning("%s", e)

    async def close(self) -> None:
        """Closes the log once all entries are written."""
        while self._writing is not None:
            await asyncio.wait([self._writing])
        with self._durable:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    async def _write_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                await asyncio.to_thread(self._append, [each.fields for each in batch])
            except OSError as e:
                _log.error("audit log %s: cannot be written: %s", self._path, e)
                for each in batch:
                    publish(AuditFailed())
                    self._end(each, e)
            else:
                for each in batch:
                    self._end(each, None)
        self._writing = None

    def _end(self, waiting: _Waiting, error: OSError | None) -> None:
        if waiting.done.done():
            return
        if error is None:
            waiting.done.set_result(None)
            return
        waiting.done.set_exception(
            AuditUnavailableError(
                f"audit log: the call cannot be recorded ({error.strerror}), so "
                "nothing was changed; ask an administrator of the store to free its "
                "disk"
            )
        )
        waiting.done.exception()  # a cancelled call does not read it

    def _append(self, entries: "list[Mapping[str, Any]]") -> None:
        """Writes entries together; runs in a thread."""
        if not self._is_current():
            self._open()
        self._put(entries)

    def _put(self, entries: "list[Mapping[str, Any]]") -> None:
        seq, prev, lines = self._seq, self._prev, []
        for fields in entries:
            seq += 1
            line = make_line({"server": self.server, **fields}, seq=seq, prev=prev)
            prev = line_digest(line)
            lines.append(line + b"\n")
        with self._durable:
            size = os.fstat(self._file).st_size
            try:
                data = memoryview(b"".join(lines))
                while data:
                    data = data[os.write(self._file, data) :]
                os.fsync(self._file)
            except OSError:
                os.ftruncate(self._file, size)
                raise
            finally:
                disk = os.fstatvfs(self._file)
                least = min(ROOM_BYTES // disk.f_frsize, disk.f_blocks // 8)
                self.has_room = disk.f_bavail >= least
        self.syncs += 1
        self._seq, self._prev = seq, prev

    def _is_current(self) -> bool:
        """Returns whether the path leads to the open file."""
        try:
            found = self._path.stat()
        except OSError:
            return False
        opened = os.fstat(self._file) if self._file >= 0 else None
        return opened is not None and (opened.st_dev, opened.st_ino) == (
            found.st_dev,
            found.st_ino,
        )

    def _open(self) -> None:
        """Opens the file, and continues the chain."""
        opened = os.open(
            self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            # It ends with the process, also if that is killed.
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(opened)
            if not isinstance(e, BlockingIOError):
                raise
            what = "another server writes it, and each needs a file of its own"
            raise OSError(e.errno, what) from e
        with self._durable:
            if self._file >= 0:
                os.close(self._file)
            self._file = opened
        # A new file is durable only with its name: entries in it could vanish, whole.
        sync_directory(self._path.parent)
        size = os.fstat(opened).st_size
        tail = os.pread(opened, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        is_torn = bool(tail) and not tail.endswith(b"\n")
        if is_torn:
            os.write(opened, b"\n")
        last = tail.rstrip(b"\n").rpartition(b"\n")[2]
        if last:  # an empty file after a rotation: the chain goes on
            self._prev = line_digest(last)
            self._seq = _last_number(tail, is_torn=is_torn)
        self._put([{"time": now_text(), "stage": STARTED, TORN: is_torn}])


def now_text() -> str:
    """Returns the time in RFC 3339, in nanoseconds."""
    now = time.time_ns()
    seconds = datetime.fromtimestamp(now // 10**9, UTC)
    return f"{seconds:%Y-%m-%dT%H:%M:%S}.{now % 10**9:09d}Z"


def _last_number(tail: bytes, *, is_torn: bool) -> int:
    """Returns the number of the last whole line of a file."""
    import json

    lines = tail.rstrip(b"\n").split(b"\n")
    for line in reversed(lines[:-1] if is_torn else lines):
        try:
            return int(json.loads(line)["seq"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0


INTENDED: Final = rpcs_with(lambda rpc: rpc.effect is Effect.GRAVE_CHANGE)
"""Calls whose intent is recorded first. So is the intent of any other call on an upload
or a hold of another principal, such as its release."""

ENDED: Final = INTENDED | rpcs_with(lambda rpc: rpc.effect is Effect.CHANGE)
"""Calls whose end is recorded."""

DENIAL_BURST: Final = 100
"""Maximum denials of one allowance that are recorded at once."""

DENIAL_SECONDS: Final = 10.0
"""Time after which an allowance has another one: 8,640 entries, 5 MB, a day."""

REPORT_SECONDS: Final = 60.0
"""Time after which denials that were not recorded are counted in an entry."""

_REJECTED: Final = (
    PermissionDeniedError,
    IdentityRequiredError,
    InvalidCertificateError,
    InvalidTokenError,
    TokenAudienceError,
    TokenExpiredError,
    UnknownIssuerError,
)


@dataclass(eq=False, repr=False)
class AuditObserver:
    """Records calls in the audit log."""

    log: AuditLog
    reason_of: Callable[[BaseException], str]
    """Returns the reason of an error in the contract."""
    reads: bool = False
    """True to record all calls."""
    best_effort: bool = False
    """True to continue calls that cannot be recorded."""
    _began: dict[str, int] = field(default_factory=dict)
    _intended: set[str] = field(default_factory=set)
    """Ids of calls in progress whose intent is recorded."""
    _allowances: TTLCache[str, tuple[float, float]] = field(
        default_factory=lambda: TTLCache(10_000, 3600.0)
    )
    """Denials that a caller has left, and when that was counted."""
    _left_out: int = 0
    """Denials that were not recorded since the last one that was."""
    _reporting: asyncio.Task[None] | None = None

    async def began(self, call: Call) -> None:
        """Records nothing yet: what the call is about is not known."""

    async def on_permitted(self, call: Call) -> None:
        """Records the intent of a call."""
        self._began[call.request_id] = time.monotonic_ns()
        if call.method in INTENDED:
            await self.on_elevated(call)

    async def on_elevated(self, call: Call) -> None:
        """Records the intent of a call, once."""
        if call.request_id in self._intended:
            return
        try:
            await self.log.write(entry_fields(call, stage="intent"))
        except AuditUnavailableError:
            if not self.best_effort:
                raise
        self._intended.add(call.request_id)

    async def ended(self, call: Call, error: BaseException | None) -> None:
        """Records the end of a call, and its denial."""
        began = self._began.pop(call.request_id, None)
        is_intended = call.request_id in self._intended
        self._intended.discard(call.request_id)
        is_denied = call.missing is not None or isinstance(error, _REJECTED)
        if not (is_denied or is_intended or call.method in ENDED or self.reads):
            return
        took = 0 if began is None else time.monotonic_ns() - began
        if is_denied and not self._admits_denial(call):
            self._left_out += 1
            if self._reporting is None or self._reporting.done():
                self._reporting = asyncio.create_task(self._report(REPORT_SECONDS))
            return
        fields = {
            **entry_fields(call, stage="denied" if is_denied else "ended"),
            "reason": "" if error is None else self.reason_of(error),
            "latency_ms": round(took / 1e6, 3),
        }
        if is_denied and self._left_out:
            fields["left_out"], self._left_out = self._left_out, 0
        try:
            await self.log.write(fields)
        except AuditUnavailableError:
            _log.error("the end of call %s is not recorded", call.request_id)

    async def close(self) -> None:
        """Records how many denials were left out."""
        if self._reporting is not None:
            self._reporting.cancel()
        await self._report(0)

    async def _report(self, after_seconds: float) -> None:
        await asyncio.sleep(after_seconds)
        count, self._left_out = self._left_out, 0
        if not count:
            return
        entry = {"time": now_text(), "stage": "denied", "left_out": count}
        try:
            await self.log.write(entry)
        except AuditUnavailableError:
            self._left_out += count
            _log.error("%d denials are not recorded", self._left_out)

    def _admits_denial(self, call: Call) -> bool:
        """Counts a denial, and returns whether to record it."""
        is_bound = call.policy is not None and call.policy.names(call.principal)
        caller, now = call.principal.name if is_bound else "", time.monotonic()
        left, since = self._allowances.get(caller, (float(DENIAL_BURST), now))
        left = min(DENIAL_BURST, left + (now - since) / DENIAL_SECONDS)
        is_admitted = left >= 1 and self.log.has_room
        self._allowances[caller] = (left - is_admitted, now)
        return is_admitted


def entry_fields(call: Call, *, stage: str) -> Mapping[str, Any]:
    missing = {} if call.missing is None else {"missing": _values(call.missing)}
    return {
        "time": now_text(),
        "stage": stage,
        "id": call.request_id,
        "principal": call.principal.name,
        "authentication": call.principal.authentication.value,
        "peer": call.peer,
        "method": call.method,
        "permissions": [_values(each) for each in call.granted],
        **missing,
        "detail": call.detail,
    }


def _values(checked: tuple[Permission, Resource]) -> Mapping[str, str]:
    permission, resource = checked
    return {"permission": str(permission), "resource": str(resource)}
