"""Client certificates: which names they may have, and who may issue them."""

from pathlib import Path

import pytest

from storesvc.auth.authenticator import certificate_principal
from storesvc.errors import InvalidCertificateError
from tests.support.certificates import Authority


def name_of(
    certificate: bytes, names: list[str], domains: dict[str, str] | None = None
) -> str:
    """Returns the principal of a certificate with URI names."""
    context = {
        "x509_pem_cert": [certificate],
        "peer_uri": [name.encode() for name in names],
    }
    found = certificate_principal(context, [*(domains or {}).items()])
    assert found is not None
    return found.name


@pytest.mark.parametrize(
    "name",
    [
        "spiffe://td/a",
        "spiffe://example.org/ns/train/sa/job-1",
        "spiffe://a_b/..a/b..c/.d/_",
        "spiffe://td/" + "x" * 2036,
    ],
)
def test_a_spiffe_id_is_a_principal(name: str) -> None:
    assert name_of(b"any", [name]) == name


@pytest.mark.parametrize(
    "name",
    [
        "spiffe://",
        "spiffe://td",
        "spiffe://td/",
        "spiffe:///a",
        "spiffe://td/a/",
        "spiffe://td//a",
        "spiffe://td/./a",
        "spiffe://td/a/..",
        "spiffe://td/../other/a",
        "spiffe://td/ns/train/*",
        "spiffe://td/a?b",
        "spiffe://td/a#b",
        "spiffe://td/a%2Fb",
        "spiffe://td/\u00e9",
        "spiffe://td/a\n",
        "spiffe://user@td/a",
        "spiffe://td:1/a",
        "spiffe://TD/a",
        "SPIFFE://td/a",
        "https://td/a",
        "group:corp/ml",
        "spiffe://td/" + "x" * 3000,
    ],
)
def test_another_name_is_no_principal(name: str) -> None:
    with pytest.raises(InvalidCertificateError, match="exactly one URI name"):
        name_of(b"any", [name])


def test_a_trust_domain_is_issued_by_its_own_authorities(tmp_path: Path) -> None:
    names = ("spiffe://one/a", "spiffe://two/a", "spiffe://three/a")
    one, two = Authority(tmp_path, "one"), Authority(tmp_path, "two")
    renewed = Authority(tmp_path, "renewed")
    domains = {
        "one": one.certificate.read_text() + renewed.certificate.read_text(),
        "two": two.certificate.read_text(),
        "four": "no certificate",
    }
    for authority, own in ((one, 0), (renewed, 0), (two, 1)):
        pair = authority.issue("job", uris=["spiffe://any/a"])
        issued = pair.certificate.read_bytes()
        assert name_of(issued, [names[own]], domains) == names[own]
        assert name_of(issued, [names[2]]) == names[2]  # without trust domains
        for name in {*names, "spiffe://four/a"} - {names[own]}:
            with pytest.raises(InvalidCertificateError, match="of the trust domain"):
                name_of(issued, [name], domains)
