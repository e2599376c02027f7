"""Enforces the quotas of a server process.

Each call counts for the namespace of its run and for its principal; a scope without a
rule is not limited. Every server counts its own calls, so several replicas permit as
many times as much, except for stored bytes, which are read from the store.

A call above a rate waits for its turn, for a moment: a flood of calls becomes slow, and
takes no more of the server than its rate. Beyond that, and above a count, calls are
rejected, and may be repeated after the time in their error, as clients do. Stored bytes
are checked before an upload begins and before it is committed.
"""

import asyncio
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from storesvc.access.call import Call, principal_name
from storesvc.access.policy import Namespace
from storesvc.errors import QuotaExceededError
from storesvc.format.names import RunName
from storesvc.quota.limits import Bucket, QuotaRule, rule_of
from storesvc.restore.sender import READ_BUFFER_BYTES
from storesvc.save.batches import BATCH_BYTES
from storesvc_proto.v1 import access_service_pb2 as access_api

MAX_SCOPES: Final = 10_000
"""Maximum idle scopes that are remembered: their names come from clients."""

UPLOAD_SECONDS: Final = 120.0
"""Time after its last call at which an upload no longer counts: a job that was killed
begins another one when it is restarted."""

USAGE_SECONDS: Final = 60.0
"""Age up to which the stored bytes of a namespace are used."""

TURN_SECONDS: Final = 2.0
"""Maximum wait of a call for its turn."""

MAX_WAITING: Final = 256
"""Maximum calls of a scope that wait for their turn."""

_BUSY_SECONDS: Final = 5
"""Time after which a call may be repeated that found too many others."""

_STREAMS: Final = frozenset(
    {
        *("BeginUpload", "JoinUpload", "FindChunks", "WriteChunks", "FinishWriter"),
        *("ReadChunks", "ReadManifest", "VerifyCheckpoint", "DiffCheckpoints"),
        *("CollectGarbage", "ApplyRetention"),
    }
)
_OF_UPLOAD: Final = frozenset(
    {"JoinUpload", "FindChunks", "WriteChunks", "FinishWriter", "KeepUploadAlive"}
)

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
class _Counted:
    """The calls of a scope."""

    bucket: Bucket
    waiting: int = 0
    """Calls that wait for their turn."""
    running: Counter[Kind] = field(default_factory=Counter)
    uploads: dict[str, float] = field(default_factory=dict)
    """The time of the last call of each upload."""

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running.total() or self.uploads)


@dataclass(slots=True)
class _Usage:
    """The stored bytes of a namespace."""

    stored_bytes: int
    at: float
    is_warned: bool = False


class Quotas:
    """Counts calls, and rejects those above a quota."""

    def __init__(
        self,
        rules: Callable[[], tuple[Sequence[QuotaRule], QuotaRule | None]],
        stored_bytes: Callable[[str], Awaitable[int]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Creates it.

        Args:
            rules: Returns the rules of namespaces, and the rule of each principal.
            stored_bytes: Returns the bytes that a namespace stores.
            clock: Returns the time in seconds.
        """
        self._rules = rules
        self._stored_bytes = stored_bytes
        self._clock = clock
        self._scopes: OrderedDict[Scope, _Counted] = OrderedDict()
        self._held: dict[str, list[tuple[Scope, Kind, int]]] = {}
        self._begun: dict[tuple[Scope, str], set[str]] = {}
        """Uploads that are counted, but whose begin has not ended well yet, with the
        request ids of the calls that begin them: of the first one, and of retries."""
        self._usage: dict[str, _Usage] = {}
        self._reading = asyncio.Lock()

    async def began(self, call: Call) -> None:
        """Waits for the turn of the principal, before the request is looked at.

        Raises:
            QuotaExceededError: The principal makes too many calls.
        """
        for scope, rule in self._limited("", call.principal.name):
            await self._take_turn(scope, rule)

    async def permitted(self, call: Call) -> None:
        """Counts a call, once it is the turn of its namespace.

        Raises:
            QuotaExceededError: A quota is used up.
        """
        namespace = namespace_of(call)
        scopes = [*self._limited(namespace, call.principal.name)]
        for scope, rule in scopes:
            if scope[0] == "namespace":
                await self._take_turn(scope, rule)
        now = self._clock()
        for scope, rule in scopes:
            self._start(call, scope, rule)
        upload = call.detail.get("name", "")
        if call.method in _OF_UPLOAD:
            for scope, _ in scopes:
                if upload in (uploads := self._scope(scope).uploads):
                    uploads[upload] = now
        for scope, rule in scopes:
            if call.method == "BeginUpload":
                self._begin_upload(call, scope, rule, now)
        if namespace and call.method in ("BeginUpload", "CommitUpload"):
            await self._check_stored(namespace)

    async def ended(self, call: Call, error: BaseException | None) -> None:
        """Counts the end of a call."""
        for scope, kind, amount in self._held.pop(call.request_id, ()):
            self._scope(scope).running[kind] -= amount
        if call.method == "BeginUpload":
            self._end_begin(call, error)
        elif call.method in ("CommitUpload", "AbortUpload") and error is None:
            for counted in self._scopes.values():
                counted.uploads.pop(call.detail.get("name", ""), None)
        self._forget()

    async def describe(self, namespace: str) -> list[access_api.Quota]:
        """Returns the quotas of a namespace and of the caller, with their usage."""
        found: list[access_api.Quota] = []
        now = self._clock()
        for scope, rule in self._limited(namespace, principal_name()):
            counted = self._scope(scope)
            name = f"namespaces/{scope[1]}" if scope[0] == "namespace" else scope[1]
            found += _rows(name, rule, counted, now)
            if scope[0] == "namespace" and (
                rule.stored_bytes or rule.stored_bytes_soft
            ):
                usage = await self._usage_of(namespace)
                found.append(
                    access_api.Quota(
                        name="stored_bytes",
                        scope=name,
                        limit=rule.stored_bytes,
                        soft_limit=rule.stored_bytes_soft,
                        used=usage.stored_bytes,
                    )
                )
        return found

    def _limited(
        self, namespace: str, principal: str
    ) -> Iterable[tuple[Scope, QuotaRule]]:
        """Yields the scopes of a call that have a rule."""
        rules, of_principal = self._rules()
        if namespace and (rule := rule_of(rules, namespace)) is not None:
            yield ("namespace", namespace), rule
        if of_principal is not None:
            yield ("principal", principal), of_principal

    def _scope(self, scope: Scope) -> _Counted:
        found = self._scopes.get(scope)
        if found is None:
            found = self._scopes[scope] = _Counted(Bucket(now=self._clock()))
        self._scopes.move_to_end(scope)
        return found

    def _forget(self) -> None:
        """Forgets the idle scopes that were used longest ago."""
        excess = len(self._scopes) - MAX_SCOPES
        if excess > 0:
            idle = [scope for scope, found in self._scopes.items() if found.is_idle]
            for scope in idle[:excess]:
                del self._scopes[scope]

    async def _take_turn(self, scope: Scope, rule: QuotaRule) -> None:
        rate = rule.requests_per_second
        if not rate:
            return
        counted = self._scope(scope)
        most_seconds = TURN_SECONDS if counted.waiting < MAX_WAITING else 0.0
        wait = counted.bucket.take(rate, now=self._clock(), most_seconds=most_seconds)
        if wait is None:
            raise _exceeded(
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
        for kind, amount in amounts_of(call.method):
            limit: int = getattr(rule, kind)
            # The first stream is always admitted, however much it holds.
            if limit and running[kind] and running[kind] + amount > limit:
                raise _exceeded(scope, kind, limit, retry_seconds=_BUSY_SECONDS)
            running[kind] += amount
            held = self._held.setdefault(call.request_id, [])
            held.append((scope, kind, amount))

    def _begin_upload(
        self, call: Call, scope: Scope, rule: QuotaRule, now: float
    ) -> None:
        uploads = self._scope(scope).uploads
        for name, last in [*uploads.items()]:
            if now - last > UPLOAD_SECONDS:
                del uploads[name]
        upload = call.detail.get("name", "")
        # A retry of a call whose response was lost is the same upload.
        is_new = upload not in uploads
        if rule.uploads and is_new and len(uploads) >= rule.uploads:
            raise _exceeded(scope, "uploads", rule.uploads, retry_seconds=_BUSY_SECONDS)
        uploads[upload] = now
        if is_new:
            self._begun[scope, upload] = {call.request_id}
        elif (begun := self._begun.get((scope, upload))) is not None:
            begun.add(call.request_id)

    def _end_begin(self, call: Call, error: BaseException | None) -> None:
        """Takes back the upload of a call that failed, unless another call has begun
        the same."""
        for key, calls in [*self._begun.items()]:
            if call.request_id not in calls:
                continue
            calls.remove(call.request_id)
            if error is None or not calls:
                del self._begun[key]
            if error is not None and not calls:
                scope, upload = key
                self._scope(scope).uploads.pop(upload, None)

    async def _check_stored(self, namespace: str) -> None:
        rule = rule_of(self._rules()[0], namespace)
        if rule is None or not (rule.stored_bytes or rule.stored_bytes_soft):
            return
        usage = await self._usage_of(namespace)
        if rule.stored_bytes and usage.stored_bytes >= rule.stored_bytes:
            raise QuotaExceededError(
                f"namespace {namespace}: expected at most {rule.stored_bytes} stored "
                f"bytes, got {usage.stored_bytes}; delete and purge checkpoints, or "
                "ask an administrator of the store for a larger quota",
                quota="stored_bytes",
                scope=f"namespaces/{namespace}",
            )
        is_above = 0 < rule.stored_bytes_soft <= usage.stored_bytes
        if is_above and not usage.is_warned:
            _log.warning(
                "namespace %s stores %d bytes, above its soft quota of %d",
                namespace,
                usage.stored_bytes,
                rule.stored_bytes_soft,
            )
        usage.is_warned = is_above

    async def _usage_of(self, namespace: str) -> _Usage:
        """Returns the stored bytes of a namespace, read a minute ago at most."""
        async with self._reading:  # callers that wait take what the first one has read
            found = self._usage.get(namespace)
            now = self._clock()
            if found is not None and now - found.at <= USAGE_SECONDS:
                return found
            stored_bytes = await self._stored_bytes(namespace)
            is_warned = found is not None and found.is_warned
            if len(self._usage) >= MAX_SCOPES:
                self._usage.clear()
            found = self._usage[namespace] = _Usage(stored_bytes, now, is_warned)
            return found


def namespace_of(call: Call) -> str:
    """Returns the namespace of a call; empty if it is of none, or of all."""
    for _, resource in call.granted:
        if isinstance(resource, RunName):
            return resource.namespace
        if isinstance(resource, Namespace):
            return resource.name
    return ""


def amounts_of(method: str) -> Iterator[tuple[Kind, int]]:
    """Yields what a call takes while it runs."""
    if method == "WatchCheckpoints":
        yield "watches", 1
    if method in _STREAMS:
        yield "streams", 1
    if size := _BYTES.get(method):
        yield "bytes_in_flight", size


def _rows(
    name: str, rule: QuotaRule, counted: _Counted, now: float
) -> list[access_api.Quota]:
    rate = rule.requests_per_second
    amounts = {
        "streams": (rule.streams, counted.running["streams"]),
        "watches": (rule.watches, counted.running["watches"]),
        "bytes_in_flight": (
            rule.bytes_in_flight,
            counted.running["bytes_in_flight"],
        ),
        "uploads": (rule.uploads, len(counted.uploads)),
        "requests_per_second": (
            rate,
            counted.bucket.used(rate, now=now) if rate else 0,
        ),
    }
    return [
        access_api.Quota(name=quota, scope=name, limit=limit, used=used)
        for quota, (limit, used) in amounts.items()
        if limit
    ]


def _exceeded(
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
