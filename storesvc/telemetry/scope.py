"""The call that the current task serves, as far as its measurement needs it.

`storesvc.rpc` sets it before anything else of a call runs. Events that are published
during the call, in its task or in threads that it waits for, belong to it.
"""

from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class CallScope:
    """Counts of one call."""

    method: str
    """``package.Service/Method``."""
    request_id: str
    """Identifies the call in logs, spans, the audit log and errors."""
    parent: str = ""
    """``traceparent`` of the caller (W3C Trace Context); empty: none."""
    received_bytes: int = 0
    sent_bytes: int = 0
    status: str = ""
    """Name of the gRPC status that was sent; empty: none yet."""
    reason: str = ""
    """Reason of the error in the contract."""
    parts: list[object] = field(default_factory=list)
    """Parts of the call that become spans or span events, for ``spans``."""


scope: ContextVar[CallScope | None] = ContextVar("storesvc_scope", default=None)
"""The call that this task serves; None: none."""
