"""Principals of client certificates.

The name is the certificate's only URI subject alternative name, a SPIFFE ID, as in
X.509 SVIDs (X509-SVID, 2 and 5.2). Other URIs are rejected: one could be the name of a
group, or of a principal of a token. Common names and DNS names are ignored: authorities
check them for servers, not for clients.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from storesvc.access.principals import Authentication, Principal
from storesvc.errors import InvalidCertificateError

_URI: Final = "peer_uri"
_CERTIFICATE: Final = "x509_pem_cert"
_SPIFFE: Final = "spiffe://"


def principal_of(context: Mapping[str, Iterable[bytes]]) -> Principal | None:
    """Returns the principal of a client certificate; None without a certificate.

    Args:
        context: ``ServicerContext.auth_context()`` of the call.

    Raises:
        InvalidCertificateError: It has no URI name, or several.
    """
    if not any(context.get(_CERTIFICATE, ())):
        return None
    names = [name.decode(errors="replace") for name in context.get(_URI, ())]
    is_one = len(names) == 1 and names[0].startswith(_SPIFFE)
    if not is_one or not names[0].isprintable():
        raise InvalidCertificateError(
            "client certificate: expected exactly one URI name, such as "
            f"spiffe://example/ns/train/sa/job, got {len(names)} of which "
            f"{sum(name.startswith(_SPIFFE) for name in names)} are SPIFFE IDs; issue "
            "one with it, or connect with a token instead"
        )
    return Principal(name=names[0], authentication=Authentication.CERTIFICATE)
