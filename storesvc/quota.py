"""Enforces the quotas of a server process.

Each call counts for the namespace of its run and for its principal; a scope without a
rule is not limited. Every server counts its own calls, so several replicas permit as
many times as much.

A call above a rate waits for its turn, for a moment: a flood of calls becomes slow, and
takes no more of the server than its rate. Beyond that, and above a count, calls are
rejected, and may be repeated after the time in their error, as clients do.

Stored bytes are the sum of three things, so that an old list of the objects hides
nothing that this server has admitted since:

1. All objects of the namespace, as they were listed a minute ago at most.
2. What each upload in progress may still store: it reserves the size of its tree before
   it begins, and more before it sends more.
3. What uploads that have ended sent since the list.
"""

import asyncio
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final, Literal, TypeAlias

from storesvc.auth.call import Call, principal_name, rpcs_with
from storesvc.auth.policy import Namespace, SomeRun
from storesvc.auth.policy_file import QuotaRule
from storesvc.errors import QuotaExceededError
from storesvc.format.names import RunName, UploadName
from storesvc.gc.run_state import StoredBytes
from storesvc.restore.sender import READ_BUFFER_BYTES
from storesvc.save.batches import BATCH_BYTES
from storesvc_proto.v1 import access_service_pb2 as access_api

BURST_SECONDS: Final = 2.0
"""A rate may be exceeded by the calls of this time, after a pause as long."""


def find_rule(rules: Iterable[QuotaRule], namespace: str) -> QuotaRule | None:
    """Returns the first rule that matches a namespace; None if there is none."""
    for rule in rules:
        if any(fnmatchcase(namespace, pattern) for pattern in rule.namespaces):
            return rule
    return None


class Bucket:
    """A token bucket: limits a rate. Calls that come too early take their turn later,
    in the order in which they come."""

    def __init__(self, *, now: float) -> None:
        self._at = now
        self._level = math.inf
        """Calls that may begin at once; negative: calls that wait."""

    def take(self, rate: float, *, now: float, most_seconds: float) -> float | None:
        """Takes a turn, and returns the time until it; None: the wait would be longer
        than the maximum, and no turn is taken.
        """
        level = self._fill_level(rate, now) - 1.0
        wait = max(0.0, -level / rate)
        if wait > most_seconds:
            return None
        self._level, self._at = level, now
        return wait

    def used(self, rate: float, *, now: float) -> int:
        """Returns how many calls of a second are used up."""
        burst = max(1.0, rate * BURST_SECONDS)
        return round(min(rate, burst - self._fill_level(rate, now)))

    def _fill_level(self, rate: float, now: float) -> float:
        burst = max(1.0, rate * BURST_SECONDS)
        return min(burst, self._level + (now - self._at) * rate)


MAX_SCOPES: Final = 10_000
"""Maximum idle scopes that are remembered: their names come from clients."""

UPLOAD_SECONDS: Final = 120.0
"""Time after its last call at which an upload no longer counts: a job that was killed
begins another one when it is restarted."""

USAGE_SECONDS: Final = 60.0
"""Age up to which the stored bytes of a namespace are used."""

RECENT_SECONDS: Final = 5.0
"""Age up to which they are used to reject an upload."""

TURN_SECONDS: Final = 2.0
"""Maximum wait of a call for its turn."""

MAX_WAITING: Final = 256
"""Maximum calls of a scope that wait for their turn."""

_BUSY_SECONDS: Final = 5
"""Time after which a call may be repeated that found too many others."""

_STREAMS: Final = rpcs_with(lambda rpc: rpc.is_stream)
_OF_UPLOAD: Final = rpcs_with(lambda rpc: rpc.is_of_upload)
_BEGIN: Final = frozenset({"BeginUpload", "CreateCheckpoint"})
_END: Final = frozenset({"CommitUpload", "AbortUpload", "CreateCheckpoint"})

Scope: TypeAlias = tuple[Literal["namespace", "principal"], str]
"""The kind and the name of a group of calls that are counted together."""

Kind: TypeAlias = Literal["streams", "watches", "bytes_in_flight"]

_BYTES: Final = {
    "WriteChunks": BATCH_BYTES,
    "ReadChunks": READ_BUFFER_BYTES // 8,  # it takes turns in a buffer of all reads
}
"""Memory for chunks that a stream may hold in the server."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Upload:
    """An upload that was begun and has not ended."""

    last: float
    """The time of its last call."""
    reserved: int = 0
    """Bytes that it may store."""
    sent: int = 0
    """Bytes that it has sent here since the objects were listed."""


@dataclass(slots=True)
class _Counted:
    """The calls of a scope."""

    bucket: Bucket
    waiting: int = 0
    """Calls that wait for their turn."""
    running: Counter[Kind] = field(default_factory=Counter)
    uploads: dict[str, _Upload] = field(default_factory=dict)
    usage: StoredBytes | None = None
    """The objects of a namespace, once they were listed."""
    listed_at: float = 0.0
    ended_bytes: int = 0
    """Bytes that uploads which have ended sent since then."""
    is_warned: bool = False
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_idle(self) -> bool:
        is_busy = self.waiting or self.running.total() or self.reading.locked()
        return not (is_busy or self.uploads or self.ended_bytes)

    def end(self, upload: str) -> None:
        """Forgets an upload that has ended."""
        if (found := self.uploads.pop(upload, None)) is not None:
            self.ended_bytes += found.sent

    def stored_bytes(self, usage: StoredBytes) -> int:
        """Returns the bytes that are stored, and those that may be: see the top."""
        return (
            usage.total
            + self.ended_bytes
            + sum(self.unlisted_bytes(name, usage) for name in self.uploads)
        )

    def unlisted_bytes(self, upload: str, usage: StoredBytes) -> int:
        """Returns the bytes of an upload that the list did not show, stored or not."""
        found = self.uploads[upload]
        listed = usage.uploads[upload.rpartition("/")[2]]
        return max(found.reserved - listed, found.sent)


@dataclass(eq=False, repr=False)
class Quotas:
    """Counts calls, and rejects those above a quota."""

    rules: Callable[[], tuple[Sequence[QuotaRule], QuotaRule | None]]
    """Returns the rules of namespaces, and the rule of each principal."""
    stored: Callable[[str], Awaitable[StoredBytes]]
    """Returns what a namespace stores."""
    clock: Callable[[], float] = time.monotonic
    """Returns the time in seconds."""
    _scopes: OrderedDict[Scope, _Counted] = field(default_factory=OrderedDict)
    _held: dict[str, list[tuple[Scope, Kind, int]]] = field(default_factory=dict)
    _begun: dict[tuple[Scope, str], set[str]] = field(default_factory=dict)
    """Uploads that are counted, but whose begin has not ended well yet, with the
    request ids of the calls that begin them: of the first one, and of retries."""

    async def began(self, call: Call) -> None:
        """Waits for the turn of the principal, before the request is looked at."""
        for scope, rule in self._list_scopes("", call.principal.name):
            await self._take_turn(scope, rule)

    async def on_permitted(self, call: Call) -> None:
        """Counts a call, once it is the turn of its namespace."""
        namespace = call_namespace(call)
        scopes = [*self._list_scopes(namespace, call.principal.name)]
        for scope, rule in scopes:
            if scope[0] == "namespace":
                await self._take_turn(scope, rule)
        now = self.clock()
        for scope, rule in scopes:
            self._start(call, scope, rule)
        upload = call.detail.get("name", "")
        if call.method in _OF_UPLOAD:
            for scope, _ in scopes:
                if (found := self._scope(scope).uploads.get(upload)) is not None:
                    found.last = now
        for scope, rule in scopes:
            if call.method in _BEGIN:
                self._begin_upload(call, scope, rule, now)
        if call.method == "CommitUpload" and (room := self._storage_rule(namespace)):
            counted = self._scope(("namespace", namespace))
            if upload not in counted.uploads:  # another server has admitted it
                await self._admit(namespace, counted, room, lambda _: 0)

    async def on_elevated(self, call: Call) -> None:
        """Does nothing: the call is counted."""

    async def ended(self, call: Call, error: BaseException | None) -> None:
        """Counts the end of a call."""
        for scope, kind, amount in self._held.pop(call.request_id, ()):
            self._scope(scope).running[kind] -= amount
        if call.method in _BEGIN:
            # A failed call takes its upload back, unless another has begun the same.
            for key, calls in [*self._begun.items()]:
                if call.request_id not in calls:
                    continue
                calls.remove(call.request_id)
                if error is None or not calls:
                    del self._begun[key]
                if error is not None and not calls:
                    scope, upload = key
                    self._scope(scope).uploads.pop(upload, None)
        if call.method in _END and error is None:
            for counted in self._scopes.values():
                counted.end(call.detail.get("name", ""))
        excess = len(self._scopes) - MAX_SCOPES
        if excess > 0:  # forget the idle scopes that were used longest ago
            idle = [scope for scope, found in self._scopes.items() if found.is_idle]
            for scope in idle[:excess]:
                del self._scopes[scope]

    async def reserve(self, upload: UploadName, size_bytes: int) -> None:
        """Reserves the bytes that an upload may store, before it stores them.

        Raises:
            QuotaExceededError: The namespace would store too much.
        """
        rule, namespace = self._storage_rule(upload.run.namespace), upload.run.namespace
        if rule is None:
            return
        name, counted = upload.resource, self._scope(("namespace", namespace))
        found = counted.uploads.get(name) or _Upload(self.clock())
        if size_bytes <= found.reserved:
            return

        def more(usage: StoredBytes) -> int:
            before = (
                counted.unlisted_bytes(name, usage) if name in counted.uploads else 0
            )
            listed = usage.uploads[upload.upload]
            return max(size_bytes - listed, found.sent) - before

        await self._admit(namespace, counted, rule, more)
        found.reserved = max(size_bytes, found.reserved)
        counted.uploads[name] = found

    async def send(self, upload: UploadName, size_bytes: int, tree_bytes: int) -> None:
        """Counts bytes that an upload sends; see ``reserve``.

        Args:
            size_bytes: The bytes.
            tree_bytes: What it reserves if it is not known here, as after a restart.

        Raises:
            QuotaExceededError: It sends more than it has reserved, and the namespace
                would store too much.
        """
        namespace = upload.run.namespace
        if self._storage_rule(namespace) is None:
            return
        await self.reserve(upload, tree_bytes)
        counted = self._scope(("namespace", namespace))
        found = counted.uploads.get(upload.resource)
        if found is None or counted.usage is None:  # it has just ended
            counted.ended_bytes += size_bytes
            return
        found.last = self.clock()
        found.sent += size_bytes
        listed = counted.usage.uploads[upload.upload]
        await self.reserve(upload, listed + found.sent)

    async def describe(self, namespace: str) -> list[access_api.Quota]:
        found: list[access_api.Quota] = []
        now = self.clock()
        for scope, rule in self._list_scopes(namespace, principal_name()):
            counted = self._scope(scope)
            name = f"namespaces/{scope[1]}" if scope[0] == "namespace" else scope[1]
            rate, running = rule.requests_per_second, counted.running
            rate_used = counted.bucket.used(rate, now=now) if rate else 0
            amounts = {
                "streams": running["streams"],
                "watches": running["watches"],
                "bytes_in_flight": running["bytes_in_flight"],
                "uploads": len(counted.uploads),
                "requests_per_second": rate_used,
            }
            found += [
                access_api.Quota(name=quota, scope=name, limit=limit, used=used)
                for quota, used in amounts.items()
                if (limit := getattr(rule, quota))
            ]
            if scope[0] == "namespace" and self._storage_rule(namespace):
                usage = await self._read_usage(namespace, counted, USAGE_SECONDS)
                found.append(
                    access_api.Quota(
                        name="stored_bytes",
                        scope=name,
                        limit=rule.stored_bytes,
                        soft_limit=rule.stored_bytes_soft,
                        used=counted.stored_bytes(usage),
                    )
                )
        return found

    def _list_scopes(
        self, namespace: str, principal: str
    ) -> Iterable[tuple[Scope, QuotaRule]]:
        """Yields the scopes of a call that have a rule."""
        rules, of_principal = self.rules()
        if namespace and (rule := find_rule(rules, namespace)) is not None:
            yield ("namespace", namespace), rule
        if of_principal is not None:
            yield ("principal", principal), of_principal

    def _scope(self, scope: Scope) -> _Counted:
        found = self._scopes.get(scope)
        if found is None:
            found = self._scopes[scope] = _Counted(Bucket(now=self.clock()))
        self._scopes.move_to_end(scope)
        return found

    async def _take_turn(self, scope: Scope, rule: QuotaRule) -> None:
        rate = rule.requests_per_second
        if not rate:
            return
        counted = self._scope(scope)
        most_seconds = TURN_SECONDS if counted.waiting < MAX_WAITING else 0.0
        wait = counted.bucket.take(rate, now=self.clock(), most_seconds=most_seconds)
        if wait is None:
            raise _exceeded_error(
                scope,
                "requests_per_second",
                rate,
                retry_seconds=math.ceil(TURN_SECONDS),
            )
        if wait:
            counted.waiting += 1
            try:
                await asyncio.sleep(wait)
            finally:
                counted.waiting -= 1

    def _start(self, call: Call, scope: Scope, rule: QuotaRule) -> None:
        running = self._scope(scope).running
        for kind, amount in iterate_amounts(call.method):
            limit: int = getattr(rule, kind)
            # The first stream is always admitted, however much it holds.
            if limit and running[kind] and running[kind] + amount > limit:
                raise _exceeded_error(scope, kind, limit, retry_seconds=_BUSY_SECONDS)
            running[kind] += amount
            held = self._held.setdefault(call.request_id, [])
            held.append((scope, kind, amount))

    def _begin_upload(
        self, call: Call, scope: Scope, rule: QuotaRule, now: float
    ) -> None:
        counted = self._scope(scope)
        uploads = counted.uploads
        for name, found in [*uploads.items()]:
            if now - found.last > UPLOAD_SECONDS:
                counted.end(name)
        upload = call.detail.get("name", "")
        # A retry of a call whose response was lost is the same upload.
        is_new = upload not in uploads
        if rule.uploads and is_new and len(uploads) >= rule.uploads:
            raise _exceeded_error(
                scope, "uploads", rule.uploads, retry_seconds=_BUSY_SECONDS
            )
        if is_new:
            uploads[upload] = _Upload(now)
            self._begun[scope, upload] = {call.request_id}
            return
        uploads[upload].last = now
        if (begun := self._begun.get((scope, upload))) is not None:
            begun.add(call.request_id)

    def _storage_rule(self, namespace: str) -> QuotaRule | None:
        rule = find_rule(self.rules()[0], namespace)
        is_given = rule is not None and (rule.stored_bytes or rule.stored_bytes_soft)
        return rule if is_given else None

    async def _admit(
        self,
        namespace: str,
        counted: _Counted,
        rule: QuotaRule,
        more: Callable[[StoredBytes], int],
    ) -> None:
        """Rejects more bytes than a namespace has room for; awaits nothing after."""
        for seconds in (USAGE_SECONDS, RECENT_SECONDS):  # space may have become free
            usage = await self._read_usage(namespace, counted, seconds)
            used, size = counted.stored_bytes(usage), more(usage)
            if not rule.stored_bytes or used + size <= rule.stored_bytes:
                break
        else:
            raise QuotaExceededError(
                f"namespace {namespace}: expected at most {rule.stored_bytes} stored "
                f"bytes, got {used}, with unfinished uploads and what is not collected "
                f"yet, and {size} more; delete and purge checkpoints, abort uploads "
                "and collect, or ask an administrator of the store for a larger quota",
                quota="stored_bytes",
                scope=f"namespaces/{namespace}",
            )
        is_above = 0 < rule.stored_bytes_soft < used + size
        if is_above and not counted.is_warned:
            _log.warning(
                "namespace %s stores %d bytes, above its soft quota of %d",
                namespace,
                used + size,
                rule.stored_bytes_soft,
            )
        counted.is_warned = is_above

    async def _read_usage(
        self, namespace: str, counted: _Counted, max_seconds: float
    ) -> StoredBytes:
        """Returns the objects of a namespace, as they were listed recently."""
        if counted.usage and counted.reading.locked() and max_seconds >= USAGE_SECONDS:
            return counted.usage  # a list may take long, and what was sent since counts
        async with counted.reading:  # callers that wait take what the first has read
            now = self.clock()
            if counted.usage is not None and now - counted.listed_at <= max_seconds:
                return counted.usage
            sent = {name: found.sent for name, found in counted.uploads.items()}
            ended_bytes = counted.ended_bytes
            usage = counted.usage = await self.stored(namespace)
            counted.listed_at = now
            counted.ended_bytes -= ended_bytes
            for name, found in counted.uploads.items():
                found.sent -= sent.get(name, 0)
            return usage


def call_namespace(call: Call) -> str:
    """Returns the namespace of a call; empty if it is of none, or of all."""
    for _, resource in call.granted:
        if isinstance(resource, RunName | SomeRun):
            return resource.namespace
        if isinstance(resource, Namespace):
            return resource.name
    return ""


def iterate_amounts(method: str) -> Iterator[tuple[Kind, int]]:
    """Yields what a call takes while it runs."""
    if method == "WatchCheckpoints":
        yield "watches", 1
    if method in _STREAMS:
        yield "streams", 1
    if size := _BYTES.get(method):
        yield "bytes_in_flight", size


def _exceeded_error(
    scope: Scope, quota: str, limit: int, *, retry_seconds: int
) -> QuotaExceededError:
    kind, name = scope
    return QuotaExceededError(
        f"{kind} {name or 'anonymous'}: expected at most {limit} {quota}, got more; "
        f"retry after {retry_seconds} s, or ask an administrator of the store for a "
        "larger quota",
        retry_seconds=retry_seconds,
        quota=quota,
        scope=name,
    )
