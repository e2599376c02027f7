"""Puts together what decides about the callers of a server, and its TLS certificates.

Certificates are reloaded when their files change. gRPC requests them at each handshake,
so a new connection uses the current files; open connections continue. Files that do not
match each other, such as between two renames during a rotation, are ignored: the
previous certificates stay in use until the files change again.
"""

import asyncio
import logging
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc

from storesvc.audit.log import AuditLog, AuditObserver
from storesvc.audit.reader import AuditReader
from storesvc.auth.authenticator import Authenticator
from storesvc.auth.policy import Policy
from storesvc.auth.policy_file import PolicyDocument, PolicyFile, QuotaRule
from storesvc.errors import InvalidFieldError, StoreError
from storesvc.lending.lender import Lender
from storesvc.rpc.calls import OPEN, Security
from storesvc.storage.config_files import FileCheck, FileState, file_state, read_file
from storesvc.storage.location import storage_at
from storesvc_proto.v1 import access_service_pb2 as access_api

T = TypeVar("T")

_log = logging.getLogger(__name__)


def make_security(
    policy: Path | None, *, anonymous: str = "", root: str = "", has_local: bool = True
) -> Security:
    """Returns the security of a server.

    Args:
        anonymous: Role of every caller, in addition to the policy; empty: none.
        root: Root of the store, to lend credentials for; empty: none are lent.
        has_local: True if callers of this machine are ``local``.

    Raises:
        InvalidFieldError: The file cannot be read or parsed, or needs a package that is
            not installed.
    """
    if policy is None and not anonymous:
        return OPEN
    file = PolicyFile(policy, has_local=has_local) if policy is not None else None

    none = PolicyDocument(policy=Policy())

    @lru_cache(1)
    def with_anonymous(found: PolicyDocument) -> PolicyDocument:
        return replace(found, policy=replace(found.policy, anonymous=anonymous))

    def document() -> PolicyDocument:
        found = file.current() if file is not None else none
        return with_anonymous(found) if anonymous else found

    def find_quotas() -> tuple[Sequence[QuotaRule], QuotaRule | None]:
        found = document()
        return found.quotas, found.principal_quota

    needs_tokens = document().issuers or document().trust_domains
    if needs_tokens and find_spec("joserfc") is None:
        raise InvalidFieldError(
            "policy: issuers: expected joserfc, which validates tokens and is not "
            "installed: pip install 'storesvc[auth]'"
        )
    return Security(
        authenticate=Authenticator(document, has_local=has_local).authenticate,
        policy=lambda: document().policy,
        quota_rules=find_quotas,
        lender=Lender(storage_at(root), lambda: document().lending) if root else None,
        login_options=lambda: [
            access_api.LoginOption(
                issuer=each.issuer,
                client_id=each.client_id,
                audience=each.audiences[0],
                scopes=each.scopes,
            )
            for each in document().issuers
            if each.client_id
        ],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Configuration of the audit log."""

    file: Path
    reads: bool = False
    """True to record calls that only read, too."""
    best_effort: bool = False
    """True to continue calls that cannot be recorded."""


@asynccontextmanager
async def record_audit(
    security: Security, audit: Audit | None
) -> AsyncIterator[Security]:
    """Yields the security of a server that records its calls while the context lasts.

    SIGHUP opens the log again.
    """
    if audit is None:
        yield security
        return
    log = AuditLog(audit.file, server=socket.gethostname())
    observer = AuditObserver(
        log, reason_of=error_reason, reads=audit.reads, best_effort=audit.best_effort
    )
    loop = asyncio.get_running_loop()
    reopening = set[asyncio.Task[None]]()

    def reopen() -> None:
        task = loop.create_task(log.reopen())
        reopening.add(task)
        task.add_done_callback(reopening.discard)

    loop.add_signal_handler(signal.SIGHUP, reopen)
    try:
        yield replace(
            security, observers=(*security.observers, observer), audit=AuditReader(log)
        )
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        await observer.close()
        await log.close()


def error_reason(error: BaseException) -> str:
    """Returns the reason of an error in the contract; for others, its class."""
    return error.reason if isinstance(error, StoreError) else type(error).__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Paths of a server's certificate files in PEM format."""

    certificate: Path
    """The server's certificate, followed by the intermediate certificates."""
    key: Path
    client_ca: Path | None = None
    """Authorities that must have issued client certificates; None: clients need
    none."""

    def credentials(self) -> grpc.ServerCredentials:
        """Returns gRPC credentials that reload the files.

        Raises:
            InvalidFieldError: The files are unusable.
        """
        current = _Current(self, self.read)
        return grpc.dynamic_ssl_server_credentials(
            current.configuration,
            current.fetch,  # type: ignore[arg-type]  # the stubs forbid None
            require_client_authentication=self.client_ca is not None,
        )

    def make_context(self) -> ssl.SSLContext:
        """Returns the context of a server of HTTPS, which reloads the files, too."""
        current = _Current(self, self._check)

        def renew(connection: ssl.SSLObject, _name: str | None, _context: Any) -> None:
            current.fetch()
            connection.context = current.configuration

        context = current.configuration
        context.sni_callback = renew  # called at each handshake
        return context

    def state(self) -> tuple[FileState | None, ...]:
        """Returns a value that changes whenever the files change."""
        return tuple(map(file_state, self._files()))

    def read(self) -> grpc.ServerCertificateConfiguration:
        self._check()
        certificate, key, *client_ca = (read_file(file) for file in self._files())
        return grpc.ssl_server_certificate_configuration(
            [(key, certificate)], client_ca[0] if client_ca else None
        )

    def _files(self) -> tuple[Path, ...]:
        files = (self.certificate, self.key)
        return files if self.client_ca is None else (*files, self.client_ca)

    def _check(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for file in self._files():
            try:  # ssl's own error does not name the file
                read_file(file)
            except OSError as e:
                raise InvalidFieldError(f"TLS: cannot read {file}: {e.strerror}") from e
        try:
            # Without a password argument, OpenSSL would prompt for one.
            context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError) as e:  # ssl.SSLError is an OSError
            raise InvalidFieldError(
                "TLS: expected a certificate and its key without a password, in PEM, "
                f"got {self.certificate} and {self.key} ({_cause(e)})"
            ) from e
        if self.client_ca is None:
            return context
        try:
            context.load_verify_locations(self.client_ca)
        except OSError as e:
            raise InvalidFieldError(
                f"TLS: expected certificates in PEM, got {self.client_ca} ({_cause(e)})"
            ) from e
        return context


class _Current(Generic[T]):
    """The certificates that were read last."""

    def __init__(self, tls: Tls, read: Callable[[], T]) -> None:
        self._tls = tls
        self._read = read
        self._state = tls.state()
        self.configuration = read()
        self._changed: T | None = None
        self._check = FileCheck(self._reload, what=f"TLS {tls.certificate}")

    def fetch(self) -> T | None:
        """Returns the certificates if they changed and are usable, else None.

        A server calls it in its own threads, one at a time.
        """
        self._check.run()
        found, self._changed = self._changed, None
        return found

    def _reload(self) -> None:
        state = self._tls.state()
        if state == self._state:
            return
        self._state = state
        try:
            self.configuration = self._changed = self._read()
        except (InvalidFieldError, OSError) as e:
            _log.warning("keeping the previous certificates: %s", e)
        else:
            _log.info("reloaded the certificates: %s", self._tls.certificate)


def _cause(e: Exception) -> str:
    return (isinstance(e, ssl.SSLError) and e.reason) or str(e)
