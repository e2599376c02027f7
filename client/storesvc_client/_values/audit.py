"""Entries of the audit log of a server."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, Self, cast

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from storesvc_client._values.call_kinds import AuditStage, Authentication
from storesvc_client.errors import DataLossError
from storesvc_proto.v1 import access_service_pb2 as api

_YEARS: Final = range(1970, 9999)

_STAGE: Final = "AUDIT_STAGE_"
_AUTHENTICATION: Final = "AUTHENTICATION_"

_OBJECT: Final = re.compile(
    r"namespaces/(?P<namespace>[^/]+)"
    r"(?:/runs/(?P<run>[^/]+)(?:/(?P<kind>[a-z]+)/(?P<id>[^/]+))?)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """An entry of the audit log of a server; from ``Client.audit_entries``."""

    server: str
    """Name of the server."""
    problem: str = ""
    """Set if a line of the log cannot be read as an entry: where it is, and why. No
    other field but ``server`` is set then."""
    seq: int = 0
    """Number of the entry in the log, from 1."""
    time: datetime | None = None
    """When it was made; None if ``problem`` is set."""
    stage: AuditStage | None = None
    """The moment that it records; None if ``problem`` is set, or if this release does
    not know it."""
    principal: str = ""
    """Name of the caller; empty: anonymous, or the log itself."""
    authentication: Authentication | None = None
    """By what the caller was authenticated; None for the log itself."""
    method: str = ""
    """Name of the rpc, such as ``DeleteCheckpoint``; empty for the log itself."""
    permissions: tuple[tuple[str, str], ...] = ()
    """The permissions that were checked and granted, each with its resource."""
    missing: tuple[str, str] | None = None
    """The permission that the caller of a denied call lacks, with its resource; None:
    it was denied for another cause, such as an invalid token."""
    detail: Mapping[str, str] = field(default_factory=dict)
    """Values of the call, such as the ``name`` of its object."""
    reason: str = ""
    """Why the call failed, as in ``StoreError.reason``; empty: it did not."""
    latency: timedelta | None = None
    """Duration of the call; None before its end."""
    request_id: str = ""
    """Identifies the call, as ``StoreError.metadata["request_id"]``."""
    peer: str = ""
    """Address of the client."""
    left_out: int = 0
    """Number of denials before this one that were not recorded."""
    follows_torn_line: bool = False
    """True if the line before it was cut off, as by a crash of the server."""

    @property
    def object_name(self) -> str:
        """The object of the call as in ``storectl``, such as ``prod/llama-8b@500``; of
        an upload, the checkpoint if its step is known; empty: none."""
        text = object_text(self.detail.get("name", ""))
        if "step" in self.detail and " upload " in text:
            return f"{text.partition(' ')[0]}@{self.detail['step']}"
        checked = (*((self.missing,) if self.missing else ()), *self.permissions)
        return text or next((resource for _, resource in checked), "")

    @property
    def reason_text(self) -> str:
        """Why the call failed, and how many denials before it were not recorded."""
        more = f"{self.left_out} denials not recorded" if self.left_out else ""
        return ", ".join(filter(None, (self.reason, more)))

    @classmethod
    def from_message(cls, message: api.AuditEntry) -> Self:
        """Returns the value of a message."""
        if message.problem:
            return cls(server=message.server, problem=message.problem)
        return cls(
            server=message.server,
            seq=message.seq,
            time=_time(message.time),
            stage=_stage(message.stage),
            principal=message.principal,
            authentication=_authentication(message.authentication),
            method=message.method,
            permissions=tuple(
                (each.permission, each.resource) for each in message.permissions
            ),
            missing=(
                (message.missing.permission, message.missing.resource)
                if message.HasField("missing")
                else None
            ),
            detail=dict(message.detail),
            reason=message.reason,
            latency=_latency(message.latency) if message.HasField("latency") else None,
            request_id=message.request_id,
            peer=message.peer,
            left_out=message.left_out,
            follows_torn_line=message.follows_torn_line,
        )


def object_text(name: str) -> str:
    """Returns the name of an object of the contract as in ``storectl``.

    >>> object_text("namespaces/prod/runs/llama-8b/checkpoints/500")
    'prod/llama-8b@500'
    """
    match = _OBJECT.fullmatch(name)
    if match is None or match["run"] is None:
        return match["namespace"] if match else name
    run = f"{match['namespace']}/{match['run']}"
    match match["kind"]:
        case None:
            return run
        case "checkpoints":
            return f"{run}@{match['id']}"
        case kind:
            return f"{run} {kind.removesuffix('s')} {match['id']}"


def authentication_number(
    authentication: Authentication | None,
) -> api.Authentication.ValueType:
    """Returns the number of a way of authentication in the contract; 0 for None."""
    if authentication is None:
        return api.AUTHENTICATION_UNSPECIFIED
    return api.Authentication.Value(_AUTHENTICATION + authentication.upper())


def stage_number(stage: AuditStage | None) -> api.AuditStage.ValueType:
    """Returns the number of a stage in the contract; 0 for None."""
    if stage is None:
        return api.AUDIT_STAGE_UNSPECIFIED
    return api.AuditStage.Value(_STAGE + stage.upper())


def _time(stamp: Timestamp) -> datetime:
    """Returns a time that every time zone can show.

    Raises:
        DataLossError: No log has it.
    """
    try:
        found = stamp.ToDatetime(UTC)
    except (ValueError, OverflowError) as e:
        raise _no_value("time", stamp.seconds) from e
    if found.year not in _YEARS:
        raise _no_value("time", stamp.seconds)
    return found


def _latency(length: Duration) -> timedelta:
    try:
        return length.ToTimedelta()
    except (ValueError, OverflowError) as e:
        raise _no_value("latency", length.seconds) from e


def _no_value(field: str, seconds: int) -> DataLossError:
    return DataLossError(
        f"the server sent an audit entry with a {field} of {seconds} s, which no log "
        "has; ask another server",
        reason="CORRUPT_DATA",
    )


def _stage(number: int) -> AuditStage | None:
    if number not in api.AuditStage.values() or not number:
        return None
    name = api.AuditStage.Name(cast("api.AuditStage.ValueType", number))
    return cast("AuditStage", name.removeprefix(_STAGE).lower())


def _authentication(number: int) -> Authentication | None:
    if number not in api.Authentication.values() or not number:
        return None
    name = api.Authentication.Name(cast("api.Authentication.ValueType", number))
    return cast("Authentication", name.removeprefix(_AUTHENTICATION).lower())
