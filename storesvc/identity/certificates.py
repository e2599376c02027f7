"""Principals of client certificates.

The name is the certificate's only URI subject alternative name, a SPIFFE ID, as in
X.509 SVIDs (X509-SVID, 2 and 5.2). Other URIs are rejected: one could be the name of a
group, or of a principal of a token. Common names and DNS names are ignored: authorities
check them for servers, not for clients.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Final

from storesvc.access.principals import Authentication, Principal
from storesvc.errors import InvalidCertificateError

_URI: Final = "peer_uri"
_CERTIFICATE: Final = "x509_pem_cert"
_SCHEME: Final = "spiffe://"
_SPIFFE: Final = re.compile(
    _SCHEME + r"([a-z0-9._-]{1,255})(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._-]+)+"
)
_MAX_BYTES: Final = 2048
"""Maximum bytes of a SPIFFE ID, by its specification."""


def principal_of(
    context: Mapping[str, Iterable[bytes]], trust_domains: Iterable[tuple[str, str]]
) -> Principal | None:
    """Returns the principal of a client certificate; None without a certificate.

    Args:
        context: ``ServicerContext.auth_context()`` of the call.
        trust_domains: Authorities of each trust domain, in PEM; empty: each authority
            that the server trusts may issue any of them.

    Raises:
        InvalidCertificateError: It has no URI name, several, or an invalid one, or
            another authority than that of its trust domain issued it.
    """
    certificate = b"".join(context.get(_CERTIFICATE, ()))
    if not certificate:
        return None
    names = [name.decode(errors="replace") for name in context.get(_URI, ())]
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
