"""Decides what the audit log records.

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
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from cachetools import TTLCache

from storesvc.access.call import Call
from storesvc.access.permissions import Permission
from storesvc.access.policy import Resource
from storesvc.audit.log import AuditLog, now_text
from storesvc.errors import (
    AuditUnavailableError,
    IdentityRequiredError,
    InvalidCertificateError,
    InvalidTokenError,
    PermissionDeniedError,
    TokenAudienceError,
    TokenExpiredError,
    UnknownIssuerError,
)

INTENDED: Final = frozenset(
    {
        *("DeleteCheckpoint", "UndeleteCheckpoint", "PurgeCheckpoint", "DeleteTag"),
        *("ApplyRetention", "CollectGarbage", "UpdateRun"),
        *("BeginUpload", "CommitUpload", "AbortUpload", "LendCredentials"),
        # a pin that is lost, a metric that changes and a tag that moves permit a
        # deletion
        *("UpdateCheckpoint", "SetTag"),
    }
)
"""Calls whose intent is recorded first. So is the intent of any other call on an upload
or a hold of another principal, such as its release."""

ENDED: Final = INTENDED | {"CreateHold", "DeleteHold"}
"""Calls whose end is recorded."""

PARTS: Final = frozenset(
    {
        *("JoinUpload", "FindChunks", "WriteChunks", "FinishWriter"),
        *("KeepUploadAlive", "RenewHold"),
    }
)
"""Calls that change something, but only as parts of what is recorded."""

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

_log = logging.getLogger(__name__)


class AuditObserver:
    """Records calls in the audit log."""

    def __init__(
        self,
        log: AuditLog,
        *,
        reason_of: Callable[[BaseException], str],
        reads: bool = False,
        best_effort: bool = False,
    ) -> None:
        """Creates it.

        Args:
            log: The log.
            reason_of: Returns the reason of an error in the contract.
            reads: True to record all calls.
            best_effort: True to continue calls that cannot be recorded.
        """
        self._audit = log
        self._reason_of = reason_of
        self._reads = reads
        self._best_effort = best_effort
        self._began: dict[str, int] = {}
        self._intended = set[str]()
        """Ids of calls in progress whose intent is recorded."""
        self._allowances: TTLCache[str, tuple[float, float]] = TTLCache(10_000, 3600.0)
        """Denials that a caller has left, and when that was counted."""
        self._left_out = 0
        """Denials that were not recorded since the last one that was."""
        self._reporting: asyncio.Task[None] | None = None

    async def began(self, call: Call) -> None:
        """Records nothing yet: what the call is about is not known."""

    async def permitted(self, call: Call) -> None:
        """Records the intent of a call.

        Raises:
            AuditUnavailableError: It cannot be recorded.
        """
        self._began[call.request_id] = time.monotonic_ns()
        if call.method in INTENDED:
            await self.elevated(call)

    async def elevated(self, call: Call) -> None:
        """Records the intent of a call, once.

        Raises:
            AuditUnavailableError: It cannot be recorded.
        """
        if call.request_id in self._intended:
            return
        try:
            await self._audit.write(fields_of(call, stage="intent"))
        except AuditUnavailableError:
            if not self._best_effort:
                raise
        self._intended.add(call.request_id)

    async def ended(self, call: Call, error: BaseException | None) -> None:
        """Records the end of a call, and its denial."""
        began = self._began.pop(call.request_id, None)
        is_intended = call.request_id in self._intended
        self._intended.discard(call.request_id)
        is_denied = call.missing is not None or isinstance(error, _REJECTED)
        if not (is_denied or is_intended or call.method in ENDED or self._reads):
            return
        took = 0 if began is None else time.monotonic_ns() - began
        if is_denied and not self._admits_denial(call):
            self._left_out += 1
            if self._reporting is None or self._reporting.done():
                self._reporting = asyncio.create_task(self._report(REPORT_SECONDS))
            return
        fields = {
            **fields_of(call, stage="denied" if is_denied else "ended"),
            "reason": "" if error is None else self._reason_of(error),
            "latency_ms": round(took / 1e6, 3),
        }
        if is_denied and self._left_out:
            fields["left_out"], self._left_out = self._left_out, 0
        try:
            await self._audit.write(fields)
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
            await self._audit.write(entry)
        except AuditUnavailableError:
            self._left_out += count
            _log.error("%d denials are not recorded", self._left_out)

    def _admits_denial(self, call: Call) -> bool:
        """Counts a denial, and returns whether to record it."""
        is_bound = call.policy is not None and call.policy.names(call.principal)
        caller, now = call.principal.name if is_bound else "", time.monotonic()
        left, since = self._allowances.get(caller, (float(DENIAL_BURST), now))
        left = min(DENIAL_BURST, left + (now - since) / DENIAL_SECONDS)
        is_admitted = left >= 1 and self._audit.has_room
        self._allowances[caller] = (left - is_admitted, now)
        return is_admitted


def fields_of(call: Call, *, stage: str) -> Mapping[str, Any]:
    """Returns the values of an entry."""
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
