"""Decides what the audit log records.

1. Before a call that deletes, commits, administers or lends begins its work, its entry
   ``intent`` is durable; if it cannot be written, the call fails and changes nothing.
2. When a call that changes something ends, its entry ``ended`` has the outcome.
3. A call that is denied has an entry ``denied``, whatever it is.

More denials in a second than ``DENIALS_PER_SECOND`` are only counted: callers without
an identity must not fill the disk of the log, whose loss rejects commits.

Calls that only read are recorded on request. So are the parts of an upload, whose begin
and commit are recorded. Labels, metrics and tokens are in no entry.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

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
        *("CommitUpload", "AbortUpload", "LendCredentials"),
    }
)
"""Calls whose intent is recorded first."""

ENDED: Final = INTENDED | {
    *("BeginUpload", "UpdateCheckpoint", "SetTag", "CreateHold", "DeleteHold"),
}
"""Calls whose end is recorded."""

PARTS: Final = frozenset(
    {
        *("JoinUpload", "FindChunks", "WriteChunks", "FinishWriter"),
        *("KeepUploadAlive", "RenewHold"),
    }
)
"""Calls that change something, but only as parts of what is recorded."""

DENIALS_PER_SECOND: Final = 100
"""Maximum denials that are recorded in a second."""

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
        self._second = 0
        self._denials = 0
        """Denials in that second."""
        self._left_out = 0
        """Denials that were not recorded since the last one that was."""

    async def began(self, call: Call) -> None:
        """Records nothing yet: what the call is about is not known."""

    async def permitted(self, call: Call) -> None:
        """Records the intent of a call.

        Raises:
            AuditUnavailableError: It cannot be recorded.
        """
        self._began[call.request_id] = time.monotonic_ns()
        if call.method not in INTENDED:
            return
        try:
            await self._audit.write(fields_of(call, stage="intent"))
        except AuditUnavailableError:
            if not self._best_effort:
                raise

    async def ended(self, call: Call, error: BaseException | None) -> None:
        """Records the end of a call, and its denial."""
        began = self._began.pop(call.request_id, None)
        is_denied = call.missing is not None or isinstance(error, _REJECTED)
        if not (is_denied or call.method in ENDED or self._reads):
            return
        took = 0 if began is None else time.monotonic_ns() - began
        if is_denied and not self._admits_denial():
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

    def _admits_denial(self) -> bool:
        """Counts a denial, and returns whether to record it."""
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._denials = second, 0
        self._denials += 1
        if self._denials > DENIALS_PER_SECOND:
            self._left_out += 1
            return False
        return True


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
