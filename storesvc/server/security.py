"""Puts together what decides about the callers of a server."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from storesvc.audit.log import AuditLog, AuditObserver
from storesvc.audit.reader import AuditReader
from storesvc.auth.authenticator import Authenticator
from storesvc.auth.policy import Policy
from storesvc.auth.policy_file import PolicyDocument, PolicyFile, QuotaRule
from storesvc.errors import InvalidFieldError, StoreError
from storesvc.lending.lender import Lender
from storesvc.rpc.security import OPEN, Security
from storesvc.storage.location import storage_at
from storesvc_proto.v1 import access_service_pb2 as access_api


def make_security(
    policy: Path | None,
    *,
    anonymous: str = "",
    root: str = "",
    has_local: bool = True,
) -> Security:
    """Returns the security of a server.

    Args:
        policy: File with the policy; None: there is none.
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

    if document().issuers or document().trust_domains:
        _check_installed()
    return Security(
        authenticate=Authenticator(document, has_local=has_local).authenticate,
        policy=lambda: document().policy,
        quota_rules=lambda: parse_quota_rules(document()),
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

    Raises:
        InvalidFieldError: The file cannot be written.
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
            security,
            observers=(*security.observers, observer),
            audit=AuditReader(log),
        )
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        await observer.close()
        await log.close()


def error_reason(error: BaseException) -> str:
    """Returns the reason of an error in the contract; for others, its class."""
    return error.reason if isinstance(error, StoreError) else type(error).__name__


def parse_quota_rules(
    document: PolicyDocument,
) -> tuple[Sequence[QuotaRule], QuotaRule | None]:
    """Returns the quotas of namespaces, and the one of each principal."""
    return document.quotas, document.principal_quota


def _check_installed() -> None:
    try:
        import joserfc  # noqa: F401
    except ModuleNotFoundError as e:
        raise InvalidFieldError(
            "policy: issuers: expected joserfc, which validates tokens and is not "
            "installed: pip install 'storesvc[auth]'"
        ) from e
