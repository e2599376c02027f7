"""Puts together what decides about the callers of a server."""

from dataclasses import replace
from pathlib import Path

from storesvc.access.policy import Policy
from storesvc.errors import InvalidFieldError
from storesvc.identity.authenticator import Authenticator
from storesvc.identity.issuer_config import Issuer
from storesvc.identity.policy_document import PolicyDocument
from storesvc.identity.policy_file import PolicyFile
from storesvc.rpc.security import OPEN, Security
from storesvc_proto.v1 import access_service_pb2 as access_api


def security_of(policy: Path | None, *, anonymous: str = "") -> Security:
    """Returns the security of a server.

    Args:
        policy: File with the policy; None: there is none.
        anonymous: Role of every caller, in addition to the policy; empty: none.

    Raises:
        InvalidFieldError: The file cannot be read or parsed, or needs a package that is
            not installed.
    """
    if policy is None and not anonymous:
        return OPEN
    file = PolicyFile(policy) if policy is not None else None

    def document() -> PolicyDocument:
        found = file.current() if file is not None else PolicyDocument(policy=Policy())
        if not anonymous:
            return found
        return replace(found, policy=replace(found.policy, anonymous=anonymous))

    if document().issuers:
        _check_installed()
    return Security(
        authenticate=Authenticator(document).authenticate,
        policy=lambda: document().policy,
        login_options=lambda: [
            login_option(each) for each in document().issuers if each.client_id
        ],
    )


def login_option(issuer: Issuer) -> access_api.LoginOption:
    """Returns the message for an issuer that people can log in with."""
    return access_api.LoginOption(
        issuer=issuer.issuer,
        client_id=issuer.client_id,
        audience=issuer.audiences[0],
        scopes=issuer.scopes,
    )


def _check_installed() -> None:
    try:
        import joserfc  # noqa: F401
    except ModuleNotFoundError as e:
        raise InvalidFieldError(
            "policy: issuers: expected joserfc, which validates tokens and is not "
            "installed: pip install 'storesvc[auth]'"
        ) from e
