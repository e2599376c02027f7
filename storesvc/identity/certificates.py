"""Principals of client certificates.

The name is the certificate's only URI subject alternative name, as in SPIFFE X.509
SVIDs (X509-SVID, 2 and 5.2). Common names and DNS names are ignored: authorities check
them for servers, not for clients.
"""

from collections.abc import Iterable, Mapping

from storesvc.access.principals import Authentication, Principal
from storesvc.errors import InvalidCertificateError

_URI: str = "peer_uri"
_CERTIFICATE: str = "x509_pem_cert"


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
    if len(names) != 1 or not names[0].isprintable():
        raise InvalidCertificateError(
            "client certificate: expected exactly one URI name, such as "
            f"spiffe://example/ns/train/sa/job, got {len(names)}; issue one with it, "
            "or connect with a token instead"
        )
    return Principal(name=names[0], authentication=Authentication.CERTIFICATE)
