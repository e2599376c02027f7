"""Lists the permissions that each rpc of the contract needs.

``RULES`` has each rpc; a test fails if one is missing, and a call without a rule is
denied. The rules read the request alone. What depends on a record is checked where the
record is read: that an upload, a hold or a protected tag is the caller's own
(`storesvc.auth.call`), and that an upload takes over another one. All other facts
about an rpc are in `storesvc.auth.call`.

`ReadOnly` rejects each call that is not known to change nothing.
"""

import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio

from storesvc.auth import call as access
from storesvc.auth.call import RPCS, Effect
from storesvc.auth.policy import AllRuns, Namespace, Permission, Resource, SomeRun
from storesvc.errors import InvalidFieldError, PermissionDeniedError, StorageDeniedError
from storesvc.format.names import CheckpointName, HoldName, RunName, TagName, UploadName
from storesvc.gc.collector import DEFAULT_GRACE
from storesvc.rpc import requests
from storesvc.rpc.status import (
    Context,
    Continuation,
    is_contract_method,
    replace_method,
)
from storesvc_proto.v1.upload_service_pb2 import (
    BeginUploadRequest,
    CreateCheckpointRequest,
)


class ReadOnly(grpc.aio.ServerInterceptor):
    """Rejects the calls that change a store; `ErrorInterceptor` must precede it."""

    def __init__(self, root: str) -> None:
        """Creates the interceptor for the store at a root."""
        self._root = root

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Returns the handler of a call, or one that rejects it."""
        rpc = handler_call_details.method.rpartition("/")[2]
        handler = await continuation(handler_call_details)
        is_other = handler is None or not is_contract_method(
            handler_call_details.method
        )
        if is_other or (rpc in RPCS and RPCS[rpc].effect is Effect.NONE):
            return handler

        async def reject(_request: object, _context: Context) -> None:
            raise StorageDeniedError(
                f"{self._root} is served read-only, got {rpc}; use a server that may "
                "write to it, or restart this one without --read-only",
                storage=self._root,
                read_only="true",
            )

        return replace_method(handler, reject)


Need: TypeAlias = tuple[Permission, Resource]
"""A permission, and the object that it is needed for."""

_NAME_LENGTH: Final = 256
"""Maximum characters of the name of an object in the audit log. Valid names are
shorter; some parts of a request are validated after its permissions."""

_NAMES: Final = tuple(
    tuple(path.split("."))
    for path in (
        *("name", "parent", "checkpoint.name", "run.name", "open.upload"),
        *("upload.upload", "hold", "base"),
    )
)
"""Fields that may name the object of a request, the most precise first."""


_BEGINNINGS: Final = (BeginUploadRequest, CreateCheckpointRequest)
_OF_A_SAVE: Final = (
    *(Permission.UPLOADS_BEGIN, Permission.UPLOADS_WRITE, Permission.UPLOADS_COMMIT),
)


@dataclass(frozen=True, slots=True)
class Public:
    """Needs no identity: the call is answered before anybody has one."""


@dataclass(frozen=True, slots=True)
class Open:
    """Needs no identity; one that is given must be valid."""


Needs: TypeAlias = Callable[[Any], Iterator[Need]]
"""Yields the permissions that a request requires of an identified caller; raises if a
name or another field of the request is malformed."""

Rule: TypeAlias = Public | Open | Needs


def parse_resource(parent: str) -> Resource:
    """Returns the run, the namespace or all runs that a parent names."""
    if "/runs/" in parent:
        return RunName.from_resource(parent)
    namespace = requests.parse_namespace(parent)
    return AllRuns() if namespace is None else Namespace(namespace)


async def authorize(rpc: str, request: Any) -> None:
    """Checks the permissions that a request requires, and lets the observers of the
    call take part; the call may then begin its work.

    Raises:
        RunNotFoundError: The caller may not see a run that the request names.
        PermissionDeniedError: The caller lacks a permission.
        InvalidNameError: A name of the request is malformed.
        InvalidFieldError: Another field is.
        StoreError: An observer rejects the call.
    """
    current = access.current.get()
    if current is None:
        return
    rule = RULES.get(rpc)
    if rule is None:
        raise PermissionDeniedError(
            f"{rpc}: expected an rpc with a rule, got one that has none"
        )
    needed = [] if isinstance(rule, Public | Open) else [*rule(request)]
    # before the checks, so that a denial is recorded with its object
    current.detail["name"] = _name(request)[:_NAME_LENGTH]
    if isinstance(request, _BEGINNINGS):
        current.detail["step"] = str(request.upload.step)
    for permission, resource in needed:
        access.require(permission, resource)
    await current.permit()


def _name(request: Any) -> str:
    """Returns the name of the object that a request is about; empty: none."""
    if isinstance(request, _BEGINNINGS):
        with suppress(InvalidFieldError):  # the id is validated later
            upload = uuid.UUID(requests.checked_request_id(request.request_id))
            return f"{request.parent}/uploads/{upload.hex}"
        return request.parent
    for path in _NAMES:
        found: Any = request
        for field in path:
            found = getattr(found, field, "")
        if isinstance(found, str) and found:
            return found
    return ""


def _require(
    permission: Permission,
    kind: type[RunName | CheckpointName | HoldName | TagName | UploadName],
    *fields: str,
) -> Needs:
    """Requires a permission on the runs of the objects that fields name."""

    def needs(request: Any) -> Iterator[Need]:
        for field in fields or ("name",):
            name = kind.from_resource(attrgetter(field)(request))
            yield permission, name if isinstance(name, RunName) else name.run

    return needs


def _identity(_request: Any) -> Iterator[Need]:
    """Requires an identity, and no permission."""
    return iter(())


def _rows(request: Any) -> Iterator[Need]:
    """Requires nothing but a valid parent: the rows are filtered."""
    parse_resource(request.parent)
    return iter(())


def _list_uploads(request: Any) -> Iterator[Need]:
    """Requires a permission on a run; of a namespace, the rows are filtered."""
    resource = parse_resource(request.parent)
    if isinstance(resource, RunName):
        yield Permission.UPLOADS_GET, resource


def _watch(request: Any) -> Iterator[Need]:
    """Requires a permission on a run, or on any run of a namespace."""
    resource = parse_resource(request.parent)
    if isinstance(resource, Namespace):  # its events are filtered, but it is polled
        resource = SomeRun(resource.name)
    yield Permission.CHECKPOINTS_WATCH, resource


def _update_run(request: Any) -> Iterator[Need]:
    run = RunName.from_resource(request.run.name)
    paths = set(request.update_mask.paths)
    yield Permission.RUNS_UPDATE, run
    if paths & {"retention", "purge_delay", "migrations"}:
        yield Permission.RUNS_SET_POLICY, run


def _apply_retention(request: Any) -> Iterator[Need]:
    run = RunName.from_resource(request.name)
    if request.validate_only:
        yield Permission.CHECKPOINTS_LIST, run
    else:
        yield Permission.CHECKPOINTS_DELETE, run


def _update_checkpoint(request: Any) -> Iterator[Need]:
    run = CheckpointName.from_resource(request.checkpoint.name).run
    paths = set(request.update_mask.paths)
    if paths != {"pinned"}:
        yield Permission.CHECKPOINTS_UPDATE, run
    if "pinned" in paths:
        yield Permission.CHECKPOINTS_PIN, run


def _set_tag(request: Any) -> Iterator[Need]:
    run = TagName.from_resource(request.name).run
    yield Permission.TAGS_SET, run
    if request.HasField("protected"):
        yield Permission.TAGS_MANAGE, run


def _collect(request: Any) -> Iterator[Need]:
    resource, grace = parse_resource(request.parent), requests.parse_grace(request)
    yield Permission.GARBAGE_COLLECT, resource
    if grace < DEFAULT_GRACE:
        yield Permission.GARBAGE_COLLECT_EARLY, resource


def _commit(request: Any) -> Iterator[Need]:
    run = UploadName.from_resource(request.name).run
    yield Permission.UPLOADS_COMMIT, run
    if request.HasField("end"):
        yield Permission.UPLOADS_WRITE, run
        if request.end.placed.crc32c:
            yield Permission.UPLOADS_PLACE, run


def _lend(request: Any) -> Iterator[Need]:
    match request.WhichOneof("purpose"):
        case "upload":
            run = UploadName.from_resource(request.upload.upload).run
            yield Permission.CREDENTIALS_LEND_WRITE, run
        case "hold":
            run = HoldName.from_resource(request.hold).run
            yield Permission.CREDENTIALS_LEND_READ, run
        case _:
            raise InvalidFieldError("purpose: expected an upload or a hold, got none")


RULES: Final = MappingProxyType[str, Rule](
    {
        # CheckpointService
        "ListRuns": _rows,
        "GetRun": _require(Permission.RUNS_GET, RunName),
        "UpdateRun": _update_run,
        "ApplyRetention": _apply_retention,
        "ListCheckpoints": _require(Permission.CHECKPOINTS_LIST, RunName, "parent"),
        "GetCheckpoint": _require(Permission.CHECKPOINTS_GET, CheckpointName),
        "ReadManifest": _require(Permission.CHECKPOINTS_READ, CheckpointName),
        "DiffCheckpoints": _require(
            Permission.CHECKPOINTS_READ, CheckpointName, "base", "name"
        ),
        "UpdateCheckpoint": _update_checkpoint,
        "DeleteCheckpoint": _require(Permission.CHECKPOINTS_DELETE, CheckpointName),
        "UndeleteCheckpoint": _require(Permission.CHECKPOINTS_UNDELETE, CheckpointName),
        "PurgeCheckpoint": _require(Permission.CHECKPOINTS_PURGE, CheckpointName),
        "WatchCheckpoints": _watch,
        "SetTag": _set_tag,
        "DeleteTag": _require(Permission.TAGS_DELETE, TagName),
        "ListTags": _require(Permission.TAGS_LIST, RunName, "parent"),
        "CreateHold": _require(Permission.HOLDS_CREATE, CheckpointName, "parent"),
        "RenewHold": _require(Permission.HOLDS_CREATE, HoldName),
        "DeleteHold": _require(Permission.HOLDS_CREATE, HoldName),
        "ListHolds": _require(Permission.HOLDS_LIST, RunName, "parent"),
        # UploadService
        "BeginUpload": _require(Permission.UPLOADS_BEGIN, RunName, "parent"),
        "JoinUpload": _require(Permission.UPLOADS_WRITE, UploadName, "open.upload"),
        "GetUpload": _require(Permission.UPLOADS_GET, UploadName),
        "ListUploads": _list_uploads,
        "KeepUploadAlive": _require(Permission.UPLOADS_WRITE, UploadName),
        "FindChunks": _require(Permission.UPLOADS_WRITE, UploadName, "open.upload"),
        "WriteChunks": _require(Permission.UPLOADS_WRITE, UploadName, "open.upload"),
        "FinishWriter": _require(Permission.UPLOADS_WRITE, UploadName, "open.upload"),
        "CommitUpload": _commit,
        "AbortUpload": _require(Permission.UPLOADS_ABORT, UploadName),
        "CreateCheckpoint": lambda request: (
            (permission, RunName.from_resource(request.parent))
            for permission in _OF_A_SAVE
        ),
        # ChunkService
        "ReadChunks": _require(Permission.CHECKPOINTS_READ, CheckpointName),
        # MaintenanceService
        "GetServerInfo": Open(),
        "VerifyCheckpoint": _require(Permission.CHECKPOINTS_VERIFY, CheckpointName),
        "CollectGarbage": _collect,
        "GetUsage": _require(Permission.USAGE_GET, RunName),
        "UpgradeStore": lambda _request: iter([(Permission.STORES_UPGRADE, AllRuns())]),
        # AccessService
        "GetLoginOptions": Public(),
        "GetIdentity": _identity,
        "TestPermissions": _identity,
        "LendCredentials": _lend,
        "GetQuota": lambda request: iter(
            [(Permission.QUOTAS_GET, parse_resource(request.parent))]
        ),
        "ListAuditEntries": lambda _request: iter([(Permission.AUDIT_READ, AllRuns())]),
    }
)
"""The rule of each rpc, by its name; names are unique over the services."""
