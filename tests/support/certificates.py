"""Certificates of an authority for tests, in PEM files."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A certificate and its key, in PEM."""

    certificate: Path
    key: Path

    def replace(self, other: Self) -> None:
        """Replaces both files by the files of another pair, one after the other."""
        for ours, theirs in (
            (self.certificate, other.certificate),
            (self.key, other.key),
        ):
            fresh = ours.with_suffix(".new")
            fresh.write_bytes(theirs.read_bytes())
            fresh.rename(ours)


_SIGNS_CERTIFICATES = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)
"""Python 3.13 verifies as RFC 5280 says."""


class Authority:
    """Issues certificates into a directory."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        """Makes an authority, and the file ``certificate`` that trusts it."""
        self._directory = directory
        self._name = _named(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(self._name, self._key, until=datetime.now(UTC) + DAY)
        own = (
            builder.issuer_name(self._name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
            .add_extension(_SIGNS_CERTIFICATES, True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = directory / f"{name}.pem"
        self.certificate.write_bytes(own.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        *hosts: str,
        until: datetime | None = None,
        file: str = "",
        uris: Sequence[str] = (),
    ) -> Pair:
        """Returns a new certificate and its private key.

        Args:
            name: Common name of the certificate.
            hosts: DNS names and addresses of a server.
            until: Time at which it expires; None: tomorrow.
            file: Name of its files without a suffix; "": ``name``.
            uris: URI names of a client.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        until = until or datetime.now(UTC) + DAY
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(
            self._key.public_key()
        )
        builder = (
            _builder(_named(name), key, until=until)
            .issuer_name(self._name)
            .add_extension(issuer, critical=False)
        )
        if hosts or uris:
            names = x509.SubjectAlternativeName(
                [*map(_general_name, hosts), *map(x509.UniformResourceIdentifier, uris)]
            )
            builder = builder.add_extension(names, critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        file = file or name
        pair = Pair(
            certificate=self._directory / f"{file}.pem",
            key=self._directory / f"{file}.key",
        )
        pair.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return pair


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    name: x509.Name, key: ec.EllipticCurvePrivateKey, *, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(until - 2 * DAY)
        .not_valid_after(until)
        .add_extension(
            x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
        )
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
