"""Authenticates the callers of a server.

A bearer token decides if there is one, then a client certificate, then the machine: a
caller on a loopback address or a Unix socket is ``local``, unless other machines can
reach the server: then proxies and sidecars call from this machine, too. A token or a
certificate that is not valid rejects the call; nothing weaker is tried instead.

A client certificate names its principal by its only URI subject alternative name, a
SPIFFE ID, as in X.509 SVIDs (X509-SVID, 2 and 5.2). Other URIs are rejected: one could
be the name of a group, or of a principal of a token. Common names and DNS names are
ignored: authorities check them for servers, not for clients.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import unquote

import grpc.aio
from cachetools import TTLCache

from storesvc.auth import tokens
from storesvc.auth.policy import ANONYMOUS, LOCAL, Authentication, Principal
from storesvc.auth.policy_file import PolicyDocument
from storesvc.auth.tokens import Issuer, IssuerKeys, verify
from storesvc.errors import (
    IdentityRequiredError,
    InvalidCertificateError,
    InvalidTokenError,
    UnknownIssuerError,
)
from storesvc.storage.location import is_this_machine

_SCHEME: Final = "spiffe://"
_SPIFFE: Final = re.compile(
    _SCHEME + r"([a-z0-9._-]{1,255})(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._-]+)+"
)
_MAX_BYTES: Final = 2048
"""Maximum bytes of a SPIFFE ID, by its specification."""


def certificate_principal(
    context: Mapping[str, Iterable[bytes]], trust_domains: Iterable[tuple[str, str]]
) -> Principal | None:
    """Returns the principal of a client certificate; None without a certificate.

    Args:
        trust_domains: Authorities of each trust domain, in PEM; empty: each authority
            that the server trusts may issue any of them.
    """
    certificate = b"".join(context.get("x509_pem_cert", ()))
    if not certificate:
        return None
    names = [name.decode(errors="replace") for name in context.get("peer_uri", ())]
    found = _SPIFFE.fullmatch(names[0]) if len(names) == 1 else None
    if found is None or len(names[0]) > _MAX_BYTES:
        raise InvalidCertificateError(
            "client certificate: expected exactly one URI name, such as "
            f"spiffe://example/ns/train/sa/job, got {len(names)} of which "
            f"{sum(name.startswith(_SCHEME) for name in names)} begin so; issue one "
            "with it, or connect with a token instead"
        )
    authorities = dict(trust_domains).get(found[1], "")
    if trust_domains and not _is_issued(certificate, authorities):
        raise InvalidCertificateError(
            f"client certificate: expected an authority of the trust domain {found[1]} "
            "that the policy lists to have issued it, got another one; issue one by it"
        )
    return Principal(name=names[0], authentication=Authentication.CERTIFICATE)


@lru_cache(1000)
def _is_issued(certificate: bytes, authorities: str) -> bool:
    """Returns whether one of some authorities has issued a certificate directly."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    issued = x509.load_pem_x509_certificate(certificate)
    with suppress(ValueError):  # there are none
        for authority in x509.load_pem_x509_certificates(authorities.encode()):
            with suppress(ValueError, TypeError, InvalidSignature):
                issued.verify_directly_issued_by(authority)
                return True
    return False


KNOWN_TOKENS: Final = 10_000
"""Maximum verified tokens that are remembered."""

KNOWN_SECONDS: Final = 300.0
"""Time for which a verified token is remembered."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_BEARER: Final = "bearer "


class _Known(NamedTuple):
    """A verified token."""

    document: PolicyDocument
    """The policy by which it was verified."""
    principal: Principal
    until: datetime
    """When it is no longer accepted."""


@dataclass(eq=False, repr=False)
class Authenticator:
    """Authenticates callers by the policy in force."""

    document: Callable[[], PolicyDocument]
    """Returns the policy in force."""
    has_local: bool = True
    """True if callers of this machine are ``local``."""
    _issuers: dict[Issuer, IssuerKeys] = field(default_factory=dict)
    _known: TTLCache[bytes, _Known] = field(
        default_factory=lambda: TTLCache(KNOWN_TOKENS, KNOWN_SECONDS)
    )

    async def authenticate(self, context: Context) -> Principal:
        """Returns the caller of a call.

        Raises:
            IdentityRequiredError: It has no credentials, and needs some.
            InvalidCertificateError: Its certificate has no single URI name.
            InvalidTokenError: Its token is malformed or breaks a rule.
            TokenExpiredError: Its token has expired.
            TokenAudienceError: Its token is for another audience.
            UnknownIssuerError: Its token is of another issuer.
            IssuerUnreachableError: The keys of the issuer cannot be read now.
        """
        token = find_bearer(context.invocation_metadata() or ())
        if token is not None:
            return await self._token_principal(token)
        by_certificate = certificate_principal(
            context.auth_context(), self.document().trust_domains
        )
        if by_certificate is not None:
            return by_certificate
        if self.has_local and is_local(context.peer()):
            return LOCAL
        if self.document().policy.anonymous:
            return ANONYMOUS
        raise IdentityRequiredError(
            "the call has no identity: expected a token or a client certificate, got "
            "neither; connect with token= or cert=, or run `storectl login`"
        )

    async def _token_principal(self, token: str) -> Principal:
        """Returns the principal of a token, verified now or recently."""
        document, now = self.document(), datetime.now(UTC)
        key = hashlib.sha256(token.encode()).digest()
        known = self._known.get(key)
        # A changed policy verifies again.
        if known is not None and known.document is document and now < known.until:
            return known.principal
        found = tokens.parse_unverified(token)
        named = found.claims.get("iss")
        issuers = (each for each in document.issuers if each.issuer == named)
        if (issuer := next(issuers, None)) is None:
            raise UnknownIssuerError(
                "token: expected one of an issuer that the policy of this server "
                "lists, got one of another; get a token of one of them, or ask an "
                "administrator of the store",
                claim="iss",
            )
        if issuer not in self._issuers:
            # Forgets the keys of issuers that are configured no more.
            known_keys = self._issuers.items()
            kept = {each: keys for each, keys in known_keys if each in document.issuers}
            self._issuers = {**kept, issuer: IssuerKeys(issuer)}
        verify(token, await self._issuers[issuer].keys(found.kid), issuer)
        principal = tokens.make_principal(issuer, found.claims, now=now)
        assert principal.expire_time is not None, "tokens expire"
        until = principal.expire_time + issuer.leeway
        self._known[key] = _Known(document, principal, until)
        return principal


def find_bearer(metadata: Any) -> str | None:
    """Returns the bearer token in the metadata of a call; None: there is none."""
    found = [value for key, value in metadata if key == "authorization"]
    if not found:
        return None
    text = found[0] if isinstance(found[0], str) else ""
    if len(found) > 1 or text[: len(_BEARER)].lower() != _BEARER:
        raise InvalidTokenError(
            "authorization: expected one bearer token, got several values or another "
            "scheme; send `authorization: Bearer TOKEN` once",
            claim="",
        )
    return text[len(_BEARER) :].strip()


def is_local(peer: str) -> bool:
    """Returns whether a peer, in gRPC's notation, is on this machine."""
    kind, _, address = unquote(peer).partition(":")
    if kind == "unix":
        return True
    return kind in ("ipv4", "ipv6") and is_this_machine(address.rpartition(":")[0])
