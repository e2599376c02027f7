"""Connects to a store: ``connect``, ``Client``, and the audit log of its server."""

import math
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, Final, Self

from google.protobuf.timestamp_pb2 import Timestamp

from storesvc.errors import InvalidFieldError
from storesvc.format.names import RunName
from storesvc.storage.location import parse_root
from storesvc_client._api.groups import Collected, collect, list_uploads, watch
from storesvc_client._api.run import Run
from storesvc_client._rpc.connection import (
    FOLLOWING,
    Connection,
    OnDamage,
    open_connection,
    rows,
)
from storesvc_client._save.saver import RunSaver
from storesvc_client._session import (
    DEFAULT_RESTORE_POOL_BYTES,
    DEFAULT_STAGING_BYTES,
    Session,
    new_blocks,
    new_staging,
)
from storesvc_client._storage.root import LentBucket, check_root, direct_root
from storesvc_client._telemetry.events import StepLogger, Telemetry
from storesvc_client._values.arguments import (
    DurationLike,
    checked_choice,
    checked_duration,
    duration_message,
    is_text,
    namespace_resource,
    parent_resource,
    run_name,
)
from storesvc_client._values.call_kinds import AuditStage, Authentication
from storesvc_client._values.messages import enum_number, read_message
from storesvc_client._values.models import (
    AuditEntry,
    Event,
    Identity,
    Quota,
    RunInfo,
    ServerInfo,
    UploadInfo,
)
from storesvc_client._values.options import DEFAULT_SAVE, SaveOptions
from storesvc_client._views.notebook import list_results
from storesvc_client.errors import DataLossError, InvalidRequestError, UnavailableError
from storesvc_proto.v1 import access_service_pb2 as access_api
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1 import maintenance_service_pb2 as maintenance_api
from storesvc_proto.v1.access_service_pb2_grpc import AccessServiceStub
from storesvc_proto.v1.maintenance_service_pb2_grpc import MaintenanceServiceStub

_FIRST: Final = 100
"""Page size of the first page, whose entries are wanted soon."""


class AuditEntries(Iterator[AuditEntry]):
    """Entries of the audit log of a server, the newest first; returned by
    ``Client.audit_entries``. Nothing is read before the first entry is asked for.

    Iterate over it, or call ``read_page`` to know where a page ends, but not both: an
    iteration reads pages ahead, whose entries ``read_page`` does not return again.
    """

    def __init__(
        self, connection: Connection, request: access_api.ListAuditEntriesRequest
    ) -> None:
        self._connection = connection
        self._request = request
        self._is_over = False
        self._server = ""
        self._ahead = deque[AuditEntry]()

    @property
    def server(self) -> str:
        """Name of the server whose log was read; empty before the first page."""
        return self._server

    @property
    def page_token(self) -> str:
        """Token that continues after the pages that were read, for
        ``Client.audit_entries``; empty: nothing is left to read."""
        return "" if self._is_over else self._request.page_token

    def read_page(self, size: int = _FIRST) -> list[AuditEntry]:
        """Returns the entries of the next page.

        It may have fewer than ``size``, or none, although ``page_token`` is set: a
        server reads a bounded part of its log for a page.

        Raises:
            PermissionDeniedError: This client may not read the log.
            PreconditionError: The server has no audit log.
            InvalidRequestError: The log was rotated since the page before, or another
                server has answered: start again, at the address of one server.
            UnavailableError: The log cannot be read, or the server does not answer for
                longer than a restart takes.
        """
        if self._is_over:
            return []
        self._request.page_size = size
        stub = AccessServiceStub(self._connection.channel)
        page = self._connection.ask(stub.ListAuditEntries, self._request)
        if page.next_page_token and page.next_page_token == self._request.page_token:
            raise DataLossError(
                "the server sent a page of its audit log whose next page is itself; "
                "connect to another server",
                reason="CORRUPT_DATA",
            )
        self._server = page.server
        self._request.page_token = page.next_page_token
        self._is_over = not page.next_page_token
        return [AuditEntry.from_message(each) for each in page.entries]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> AuditEntry:
        while not self._ahead:
            if self._is_over:
                raise StopIteration
            is_first = not self._server
            self._ahead.extend(self.read_page(_FIRST if is_first else FOLLOWING))
        return self._ahead.popleft()

    def __repr__(self) -> str:
        return f"<iterator over audit entries of {self._connection.address}>"


def newest(
    entries: AuditEntries, count: int, *, most_pages: float = math.inf
) -> list[AuditEntry]:
    """Reads entries in as few pages as possible: each may be of another replica.

    Args:
        entries: The entries.
        count: Maximum number of entries.
        most_pages: Number of pages after which there may be fewer.
    """
    found, pages = list[AuditEntry](), 0
    while True:
        found += entries.read_page(min(count - len(found), FOLLOWING))
        pages += 1
        if not entries.page_token or len(found) >= count or pages >= most_pages:
            return found


def _stamp(name: str, time: object) -> Timestamp:
    stamp = Timestamp()
    if isinstance(time, datetime) and time.tzinfo is not None:
        with suppress(ValueError, OverflowError):  # not in the years of UTC
            stamp.FromDatetime(time)
            return stamp
    raise InvalidRequestError(
        f"audit entries: {name} expected a datetime with a time zone, in the years 1 "
        f"to 9999 of UTC, got {time!r}"
    )


DEFAULT_TIMEOUT: Final = 60.0
"""Seconds that a call may take."""

MAX_TIMEOUT: Final = timedelta(days=365)
"""Longest timeout of a call; gRPC ignores timeouts that overflow its counter."""


def connect(
    target: "str | PathLike[str]",
    *,
    ca: "str | PathLike[str] | None" = None,
    cert: "str | PathLike[str] | None" = None,
    key: "str | PathLike[str] | None" = None,
    token: "str | PathLike[str] | Callable[[], str] | None" = None,
    insecure: bool = False,
    timeout: DurationLike = DEFAULT_TIMEOUT,
    direct: "str | PathLike[str] | None" = None,
    lend_credentials: bool = False,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    restore_pool_bytes: int = DEFAULT_RESTORE_POOL_BYTES,
    collect: bool | None = None,
    orbax_events: bool = False,
    step_logger: StepLogger | None = None,
) -> "Client":
    """Connects to a store, and returns its client once the store has answered.

    >>> with connect("ckpt.example:7070", ca="ca.pem") as client:
    ...     run = client.run("prod/llama-8b")

    Args:
        target: ``HOST:PORT`` of a server, or the root of a store, which a server
            in this process then serves: a path, ``file:///PATH``, ``memory://``,
            ``gs://BUCKET/PREFIX`` or ``s3://BUCKET/PREFIX``. If several replicas serve
            one store, calls go round-robin to those that report healthy: to all
            addresses of the name, or of a list, ``HOST:PORT,HOST:PORT``.
        ca: PEM file of the certificate authorities to trust; None trusts the system's
            authorities. Each server of a list needs a certificate for the first name.
        cert: PEM file of this client's certificate, if the server requires one. The
            three files are read again when they change; later calls use the new ones.
        key: PEM file of its private key, without a password.
        token: Bearer token of this client: a text, the path (``Path``) of a file, which
            is read again when it changes, or a function, which is called again before
            its token expires. It is sent over TLS or to this machine only. Calls whose
            token expires are retried with the next one.
        insecure: Whether to use plaintext to another machine. Connections to this
            machine use plaintext unless ``ca`` or ``cert`` is given. Neither this nor
            certificates can be given with a root.
        timeout: How long a call, or opening a root in this process, may take: a
            ``timedelta`` or seconds, above 0. Saves and restores may take longer, but
            not stall for longer than the server's limit.
        direct: Root of the store that the server serves: ``file:///PATH`` if this
            machine mounts it, ``gs://BUCKET/PREFIX`` or ``s3://BUCKET/PREFIX``. Saves
            and restores then write and read its data files in this process, several
            times as fast, and exchange only metadata with the server. A target that is
            such a root implies it.
        lend_credentials: Whether the server lends this process the credentials for the
            bucket of ``direct``, so that it needs none of its own: for each save to
            create its data files, and for each restore to read the files of its run.
            The server must be configured to lend.
        staging_bytes: Maximum host memory for the copies of saves, in bytes, at least
            128 MiB; it is kept for the next save.
        restore_pool_bytes: Maximum host memory, in bytes, that is kept for the next
            restore once the arrays of an earlier one are gone: for a minute, and unless
            the kernel needs it. 0 keeps none.
        collect: Whether this process collects the garbage of the store at a root, every
            10 minutes: without that, deleted checkpoints stay stored. None collects in
            a directory, but not in a bucket, where lists cost money and time of this
            process: run ``storectl gc`` at intervals, or a server, or give True. Of
            several processes one collects at a time.
        orbax_events: Whether saves and restores send ``jax.monitoring`` the events of
            Orbax that dashboards use, in addition to ``/jax/storesvc/...``.
        step_logger: Object whose ``log_entry`` receives a dict for each save and
            restore, with the keys of Orbax's step statistics, as goodput tools read.
            An exception of it is logged once and fails no save.

    Raises:
        InvalidRequestError: The target, a certificate or the timeout is not usable,
            ``direct`` is not the root of this store, or another option is not valid.
        UnauthenticatedError: The server requires a token or a certificate, or the token
            is not usable.
        UnavailableError: The store does not answer, or one side rejects the certificate
            of the other.
        PreconditionError: The bucket denies access to the store, or to this process.
    """
    try:
        target = parse_root(target)
        if isinstance(direct, str | PathLike):
            direct = parse_root(direct)
    except InvalidFieldError as e:
        raise InvalidRequestError(f"connect: {e}") from e
    staging, blocks = new_staging(staging_bytes), new_blocks(restore_pool_bytes)
    telemetry = Telemetry(
        str(direct or target), orbax_events=orbax_events, step_logger=step_logger
    )
    limit = checked_duration("connect: timeout=", timeout, most=MAX_TIMEOUT)
    connection = open_connection(
        target,
        ca=Path(ca) if ca is not None else None,
        cert=Path(cert) if cert is not None else None,
        key=Path(key) if key is not None else None,
        insecure=insecure,
        timeout=limit.total_seconds(),
        token=token,
        collect=collect,
    )
    session = Session(connection, staging, blocks, telemetry)
    return open_client(session, direct=direct, lend_credentials=lend_credentials)


_TRANSFERS: Final = (
    "storesvc_client._pytree.jax_job",
    "storesvc_client._pytree.restore_target",
    "storesvc_client._pytree.save_plan",
    "storesvc_client._restore.checkpoint",
    "storesvc_client._save.items",
    "storesvc_client._save.small",
    "storesvc_client._save.upload",
)
"""Modules that saves and restores import at the latest."""


def open_client(
    session: Session,
    *,
    direct: "str | PathLike[str] | None" = None,
    lend_credentials: bool = False,
) -> "Client":
    """Returns a client once the store has answered; closes the connection if it fails.
    ``direct`` and ``lend_credentials`` are as for ``connect``.

    Raises:
        StoreError: As of ``connect``.
    """
    connection = session.connection
    target = connection.address
    try:
        # Imported while the channel connects, so that the first restore and the first
        # save of a job of jax do not wait for it; other programs may need neither.
        if "jax" in sys.modules:
            for name in _TRANSFERS:
                import_module(name)
        try:  # without retries, as the target may be mistyped
            info = _info(connection, connection.call)
        except UnavailableError as e:
            if e.reason == "ISSUER_UNREACHABLE":  # the server answered: it is no typo
                info = _info(connection, connection.ask)
            elif cause := connection.refusal():
                raise UnavailableError(cause) from e
            else:
                raise
        if lend_credentials:
            lent = LentBucket.open(target, direct, connection)
            return Client(replace(session, data_root=lent))
        root = direct_root(target, direct)
        if root is not None:
            check_root(root, store_uid=info.store_uid, timeout=connection.timeout)
        return Client(replace(session, data_root=root))
    except BaseException:
        connection.close()
        raise


def _info(connection: Connection, ask: Callable[..., Any]) -> ServerInfo:
    stub = MaintenanceServiceStub(connection.channel)
    answer = ask(stub.GetServerInfo, maintenance_api.GetServerInfoRequest())
    return ServerInfo(version=answer.version, store_uid=answer.store_uid)


class Client:
    """A connection to one store; returned by ``connect``. Threads may share it.

    >>> with connect("file:///tmp/ckpts") as client:
    ...     state = client.run("prod/llama-8b").restore()
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._connection = session.connection
        self._stub = session.connection.checkpoints
        self._savers: dict[RunName, RunSaver] = {}
        self._runs: dict[tuple[RunName, SaveOptions], Run] = {}

    def __repr__(self) -> str:
        return f"<Client of {self._connection.address}>"

    def info(self) -> ServerInfo:
        """Returns the version and the store of the server.

        Raises:
            UnavailableError: It does not answer for longer than a restart takes.
        """
        return _info(self._connection, self._connection.ask)

    def identity(self) -> Identity:
        """Returns the identity of this client, as the server sees it.

        Raises:
            UnauthenticatedError: The server rejects its token or its certificate.
            UnavailableError: It does not answer for longer than a restart takes.
        """
        stub = AccessServiceStub(self._connection.channel)
        request = access_api.GetIdentityRequest()
        return read_message(Identity, self._connection.ask(stub.GetIdentity, request))

    def test_permissions(
        self, parent: str | None = None, permissions: Sequence[str] = ()
    ) -> list[str]:
        """Returns which permissions this client has.

        >>> client.test_permissions("prod/llama-8b", ["checkpoints.delete"])
        ['checkpoints.delete']

        Args:
            parent: A run, which need not exist, a namespace, or None for all runs.
            permissions: Names of permissions; empty: all that exist.

        Raises:
            InvalidRequestError: ``parent`` is neither a run nor a namespace, or a
                permission does not exist.
            UnavailableError: The server does not answer for longer than a restart
                takes.
        """
        stub = AccessServiceStub(self._connection.channel)
        request = access_api.TestPermissionsRequest(
            resource=parent_resource(parent), permissions=permissions
        )
        return [*self._connection.ask(stub.TestPermissions, request).permissions]

    def quotas(self, namespace: str) -> list[Quota]:
        """Returns the quotas of a namespace and of this client, and how much is used.

        Raises:
            InvalidRequestError: The name of the namespace is not valid.
            PermissionDeniedError: This client may not see them.
            UnavailableError: The server does not answer for longer than a restart
                takes.
        """
        stub = AccessServiceStub(self._connection.channel)
        request = access_api.GetQuotaRequest(parent=namespace_resource(namespace))
        response = self._connection.ask(stub.GetQuota, request)
        return [read_message(Quota, each) for each in response.quotas]

    def audit_entries(
        self,
        *,
        principal: str | None = None,
        method: str | None = None,
        parent: str | None = None,
        stage: AuditStage | None = None,
        authentication: Authentication | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        page_token: str = "",
    ) -> AuditEntries:
        """Returns entries of the audit log of the server, the newest first.

        Each server has its own log, so connect to the address of one server. Only the
        file that it writes now is read. Entries that match all arguments are returned;
        a line that cannot be read as an entry is returned as one with ``problem``,
        whatever the arguments are. Needs the permission ``audit.read`` on all runs.

        >>> for entry in client.audit_entries(stage="denied"):
        ...     print(entry.time, entry.principal, entry.method, entry.object_name)

        Args:
            principal: Name of the caller.
            method: Name of the rpc, such as ``DeleteCheckpoint``.
            parent: A run, or a namespace for it and its runs; None: all.
            stage: Stage of the entry.
            authentication: How the caller was authenticated; ``"anonymous"`` for
                callers without a name.
            since: Earliest time, with a time zone.
            until: Time, with a time zone, before which the entries were made.
            page_token: ``AuditEntries.page_token`` of a call with the same arguments,
                to continue after its pages.

        Raises:
            InvalidRequestError: An argument is not valid.
        """
        for name, text in (("principal=", principal), ("method=", method)):
            if text is not None and not (is_text(text) and text):
                raise InvalidRequestError(
                    f"audit entries: {name} expected a text, got {text!r}"
                )
        for name, value, choices in (
            ("stage=", stage, AuditStage),
            ("authentication=", authentication, Authentication),
        ):
            if value is not None:
                checked_choice(f"audit entries: {name}", value, choices)
        if not is_text(page_token):
            raise InvalidRequestError(
                f"audit entries: page_token= expected a text, got {page_token!r}"
            )
        request = access_api.ListAuditEntriesRequest(
            principal=principal or "",
            method=method or "",
            resource=parent_resource(parent),
            stage=enum_number(access_api.AuditStage.DESCRIPTOR, stage),
            authentication=enum_number(
                access_api.Authentication.DESCRIPTOR, authentication
            ),
            page_token=page_token,
        )
        if since is not None:
            request.start_time.CopyFrom(_stamp("since=", since))
        if until is not None:
            request.end_time.CopyFrom(_stamp("until=", until))
        return AuditEntries(self._connection, request)

    def run(self, name: str, *, save: SaveOptions = DEFAULT_SAVE) -> Run:
        """Returns a run; sends nothing to the server.

        Args:
            name: ``namespace/run``. The first save creates the run.
            save: Defaults for ``snapshot=`` and ``if_busy=`` of ``Run.save``.

        Raises:
            InvalidRequestError: The name is not valid.
        """
        parsed = run_name(name)
        if not isinstance(save, SaveOptions):
            raise InvalidRequestError(
                f"run {parsed}: save=: expected SaveOptions, got {save!r}"
            )
        # one saver for each run, so that its saves wait for each other
        saver = self._savers.setdefault(parsed, RunSaver(self._session, parsed))
        run = Run(self._session, parsed, saver, save)
        return self._runs.setdefault((parsed, save), run)

    @list_results("run")
    def runs(
        self, namespace: str | None = None, *, on_damage: OnDamage = None
    ) -> Iterator[RunInfo]:
        """Yields the runs of one namespace or of all, by name.

        Args:
            namespace: The namespace; None: all namespaces.
            on_damage: Called with a ``DataLossError`` for each run whose record is
                damaged; None raises the error in its place.

        Raises:
            InvalidRequestError: The name of the namespace is not valid.
            DataLossError: The record of the next run, or of its newest checkpoint, is
                damaged.
            UnavailableError: The server does not answer, for longer than a restart
                takes.
        """
        parent = "namespaces/-"
        if namespace is not None:
            parent = namespace_resource(namespace)
        request = api.ListRunsRequest(parent=parent)
        found = rows(
            partial(self._connection.ask, self._stub.ListRuns),
            request,
            lambda page: page.runs,
            on_damage,
        )
        yield from map(RunInfo.from_message, found)

    def uploads(
        self, parent: str | None = None, *, on_damage: OnDamage = None
    ) -> Iterator[UploadInfo]:
        """Yields live uploads, by run and id; none for a run that does not exist.

        Args:
            parent: A run, a namespace, or None for all. Uploads of a run that has no
                checkpoint yet, which is in no list of runs, are included.
            on_damage: Called with a ``DataLossError`` for each upload whose records are
                damaged; None raises the error in its place.

        Raises:
            InvalidRequestError: ``parent`` is neither a run nor a namespace.
            DataLossError: The records of the next upload are damaged.
            UnavailableError: The server does not answer for longer than a restart
                takes.
        """
        resource = parent_resource(parent)
        return list_uploads(self._connection, resource, on_damage=on_damage)

    def collect(
        self,
        parent: str | None = None,
        *,
        grace: DurationLike | None = None,
        dry_run: bool = False,
    ) -> Iterator[Collected]:
        """Collects garbage run by run, and yields what was done in each.

        Servers do the same by themselves at intervals. Data of checkpoints, holds and
        live uploads is never deleted, whatever runs at the same time. The iterator
        drives the collection: runs that it does not reach are left for the next one. A
        collection that is interrupted, as by a restart of the server, starts again, and
        reports for the current run only what it did after that.

        Args:
            parent: A run, a namespace, or None for all.
            grace: Minimum time since something became garbage, a ``timedelta`` or
                seconds; None: an hour. With less, readers without a hold may lose what
                they read.
            dry_run: Yields what would be done, and changes nothing.

        Raises:
            NotFoundError: There is no such run.
            InvalidRequestError: ``parent`` is neither a run nor a namespace, or
                ``grace`` is negative.
        """
        request = maintenance_api.CollectGarbageRequest(
            parent=parent_resource(parent), validate_only=dry_run
        )
        if grace is not None:
            request.grace.CopyFrom(duration_message(grace, "grace= of a collection"))
        return collect(self._connection, request)

    def upgrade(
        self, version: int | None = None, *, dry_run: bool = False
    ) -> tuple[int, int]:
        """Raises the format of the store; returns the version before and after.

        Releases that do not know the version reject the store from then on.

        Args:
            version: The version; None: the newest that the server writes.
            dry_run: Returns what would be done, and changes nothing.

        Raises:
            InvalidRequestError: The version is lower than that of the store, or the
                server does not write it.
            PermissionDeniedError: This client is no administrator of all runs.
        """
        if version is not None and not (type(version) is int and 0 < version < 1 << 31):
            raise InvalidRequestError(
                "upgrade: expected a version from 1, or None for the newest that the "
                f"server writes, got {version!r}"
            )
        request = maintenance_api.UpgradeStoreRequest(
            format_version=version or 0, validate_only=dry_run
        )
        stub = MaintenanceServiceStub(self._connection.channel)
        answer = self._connection.ask(stub.UpgradeStore, request)
        return answer.previous_version, answer.format_version

    def watch(self, namespace: str, since: str = "now") -> Generator[Event]:
        """Returns an endless iterator over the changes of checkpoints in a namespace.

        It includes runs that are created later; see ``Run.watch``.

        Args:
            namespace: The namespace.
            since: "now"; "latest", which first yields the newest checkpoint of each
                run; or an ``Event.resume_token`` of such a watch.

        Raises:
            InvalidRequestError: The name of the namespace is not valid, or the token
                does not belong to a watch of it.
            PreconditionError: The events after the token were dropped.
            UnavailableError: The server does not answer.
        """
        parent = namespace_resource(namespace)
        # a generator: only "latest" needs the list of runs
        newest = (RunName.parse(run.name).resource for run in self.runs(namespace))
        return watch(self._connection, parent, since, latest_of=newest)

    def close(self) -> None:
        """Waits for the saves in the background, then closes the connection.

        The connection is closed even if saves fail. Ctrl-C abandons running saves; a
        note of the ``KeyboardInterrupt`` names their checkpoints. In a forked child it
        does nothing.

        Raises:
            StoreError: A save failed, and its error was not raised yet.
        """
        if self._connection.is_inherited:
            return  # no thread of the saves is in this process, nor may it end them
        errors = []
        try:
            for saver in list(self._savers.values()):
                try:
                    saver.wait()
                except Exception as e:  # noqa: BLE001 - every other save must end too
                    errors.append(e)
        except KeyboardInterrupt as e:
            for other in errors:
                e.add_note(f"a save in the background failed: {other}")
            for saver in list(self._savers.values()):
                for name in saver.forget():
                    e.add_note(
                        f"{name} was abandoned; a save of the same step resumes it"
                    )
            raise
        finally:
            self._session.close()
        for other in errors[1:]:
            errors[0].add_note(f"another save failed too: {other}")
        if errors:
            raise errors[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self.close()
            return
        # the error that ended the block has precedence
        try:
            self.close()
        except Exception as unseen:  # noqa: BLE001 - it must not hide the first
            error.add_note(f"a save in the background failed too: {unseen}")
        except KeyboardInterrupt as again:
            if not isinstance(error, KeyboardInterrupt):
                raise
            for note in getattr(again, "__notes__", []):
                error.add_note(note)
