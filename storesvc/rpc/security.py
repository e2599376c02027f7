"""The parts of a server that decide about its callers."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from storesvc.audit.reader import AuditReader
from storesvc.auth.authenticator import is_local
from storesvc.auth.call import CallObserver
from storesvc.auth.policy import ANONYMOUS, LOCAL, Policy, Principal
from storesvc.auth.policy_file import QuotaRule
from storesvc.format.names import HoldName, UploadName
from storesvc.lending.lender import LentCredential
from storesvc.rpc.status import Context
from storesvc_proto.v1 import access_service_pb2 as access_api


class Lender(Protocol):
    """Lends credentials; see ``storesvc.lending.lender``."""

    async def lend_write(self, upload: UploadName) -> LentCredential:
        """Lends a credential that permits to create data files of an upload.

        Raises:
            LendingUnsupportedError: The storage has no such credentials.
        """

    async def lend_read(self, hold: HoldName) -> LentCredential:
        """Lends a credential that permits to read the data files of a run.

        Raises:
            LendingUnsupportedError: The storage has no such credentials.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Authentication, authorization, and the parts that depend on the caller."""

    authenticate: Callable[[Context], Awaitable[Principal]]
    """Returns the caller of a call, or raises why its credentials are rejected."""
    policy: Callable[[], Policy | None]
    """Returns the policy in force; None permits everything."""
    observers: tuple[CallObserver, ...] = ()
    """Take part in each call, in this order."""
    login_options: Callable[[], Sequence[access_api.LoginOption]] = list
    """Returns the issuers that people can log in with."""
    lender: Lender | None = None
    """Lends credentials; None: none are lent."""
    audit: AuditReader | None = None
    """Reads the audit log; None: there is none."""
    quota_rules: Callable[[], tuple[Sequence[QuotaRule], QuotaRule | None]] = lambda: (
        (),
        None,
    )
    """Returns the quotas of namespaces, and the one of each principal."""


async def _by_machine(context: Context) -> Principal:
    return LOCAL if is_local(context.peer()) else ANONYMOUS


OPEN: Final = Security(authenticate=_by_machine, policy=lambda: None)
"""Permits everything to every caller that can connect."""
