"""Tokens, good and hostile, of a real server on a real socket."""

import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from joserfc import jws
from joserfc.jwk import RSAKey

import storesvc_client as store
from storesvc.auth import tokens
from storesvc.auth.tokens import MAX_TOKEN_BYTES, make_principal
from storesvc.errors import InvalidTokenError
from storesvc.server.security import make_security
from storesvc_proto.v1 import access_service_pb2 as api
from storesvc_proto.v1.access_service_pb2_grpc import AccessServiceStub
from tests.support.faulty_server import serving
from tests.support.rpcs import reason_of
from tests.support.tokens import AUDIENCE, KEYS, OTHER, Issuer, encoded, issuing

POLICY: Final = """
[[issuers]]
name = "corp"
issuer = "{url}"
audiences = ["storesvc"]
principal = "user:{{email}}"
groups = "groups"

[[bindings]]
role = "writer"
runs = ["prod/*"]
who = ["group:corp/ml"]
"""


class Served(NamedTuple):
    """A server, and the issuer that it trusts."""

    address: str
    issuer: Issuer

    def identity(self, *authorization: str) -> Any:
        """Returns the identity that values of ``authorization`` give."""
        stub = AccessServiceStub(grpc.insecure_channel(self.address))
        metadata = tuple(("authorization", value) for value in authorization)
        request = api.GetIdentityRequest()
        return stub.GetIdentity(request, metadata=metadata, timeout=20)

    def outcome(self, *authorization: str) -> str:
        """Returns the principal, or the reason of the error."""
        try:
            return str(self.identity(*authorization).principal)
        except grpc.RpcError as e:
            return reason_of(e)


@contextmanager
def trusting(folder: Path, issuer: Issuer, text: str = POLICY) -> Iterator[Served]:
    """Serves a store with a policy that names an issuer."""
    policy = folder / "policy.toml"
    policy.write_text(text.format(url=issuer.url))
    with serving(folder / "store", security=make_security(policy)) as address:
        yield Served(address, issuer)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tokens")
    with issuing() as issuer, trusting(folder, issuer) as server:
        yield server


@pytest.mark.filterwarnings("ignore:EdDSA is deprecated")  # issuers use it
@pytest.mark.parametrize("algorithm", sorted(KEYS))
def test_a_token_gives_a_principal_and_groups(served: Served, algorithm: str) -> None:
    found = served.identity(f"Bearer {served.issuer.token(algorithm)}")

    assert found.principal == "user:alice@corp.example"
    assert [*found.groups] == ["corp/ml"]
    assert found.authentication == api.AUTHENTICATION_TOKEN
    assert found.expire_time.seconds > time.time()


def test_a_caller_of_this_machine_without_a_token_is_local(served: Served) -> None:
    assert served.outcome() == "local"


@pytest.mark.parametrize(
    "changes",
    [
        {"aud": [AUDIENCE, "another"]},
        {"header": {"typ": "at+jwt"}},
        {"header": {"typ": None, "kid": "rsa-1"}},
        {"header": {"jku": "http://127.0.0.1:1/keys", "x5u": "http://127.0.0.1:1/"}},
        {"nbf": 1},
        {"email_verified": True},
        {"email_verified": "true"},
        {"groups": []},
        {"groups": None},
        {"extra": {"deep": [1, 2]}},
    ],
    ids=str,
)
def test_tokens_within_the_rules_are_accepted(
    served: Served, changes: dict[str, Any]
) -> None:
    token = served.issuer.token(**changes)

    assert served.outcome(f"bearer {token}") == "user:alice@corp.example"


def test_clocks_may_differ_by_the_leeway(served: Served) -> None:
    now = int(time.time())
    late = served.issuer.token(iat=now - 60, exp=now - 20)
    early = served.issuer.token(iat=now + 20, nbf=now + 20)

    for token in (late, early):
        assert served.outcome(f"Bearer {token}") == "user:alice@corp.example"


def unsigned(issuer: Issuer, header: dict[str, Any]) -> str:
    """Returns a token without a signature."""
    return f"{encoded(header)}.{encoded(issuer.claims())}."


def confused(issuer: Issuer) -> str:
    """Returns a token whose HMAC key is the public key of the issuer."""
    public = KEYS["RS256"].as_pem(private=False)
    text = (
        f"{encoded({'alg': 'HS256', 'kid': 'rsa-1', 'typ': 'JWT'})}"
        f".{encoded(issuer.claims())}"
    )
    signature = hmac.new(public, text.encode(), hashlib.sha256).digest()
    return f"{text}.{encoded(signature)}"


def twice(issuer: Issuer) -> str:
    """Returns a token that has a claim twice, with a good signature."""
    data = ('{"sub": "root", ' + json.dumps(issuer.claims())[1:]).encode()
    header = {"alg": "ES256", "kid": "ec-1"}
    return jws.serialize_compact(header, data, KEYS["ES256"], algorithms=["ES256"])


def changed(issuer: Issuer) -> str:
    """Returns a token whose claims were changed after it was signed."""
    header, _, signature = issuer.token().split(".")
    return f"{header}.{encoded(issuer.claims(email='root@corp.example'))}.{signature}"


NOW: Final = int(time.time())

INVALID: Final[dict[str, Callable[[Issuer], str]]] = {
    "empty": lambda _: "",
    "two parts": lambda i: i.token().rpartition(".")[0],
    "four parts": lambda i: i.token() + ".x",
    "no base64": lambda _: "!.!.!",
    "no JSON": lambda _: f"{encoded(b'x')}.{encoded(b'y')}.z",
    "JSON list": lambda _: f"{encoded([])}.{encoded([])}.z",
    "deep JSON": lambda _: f"{encoded(b'[' * 2900)}.{encoded({})}.",
    "huge": lambda i: i.token(extra="x" * 6000),
    "alg none": lambda i: unsigned(i, {"alg": "none"}),
    "alg None": lambda i: unsigned(i, {"alg": "None"}),
    "no alg": lambda i: unsigned(i, {"typ": "JWT"}),
    "alg number": lambda i: unsigned(i, {"alg": 7}),
    "HS256 with the public key": confused,
    "key of a stranger": lambda i: i.token(key=OTHER),
    "changed claims": changed,
    "no signature": lambda i: i.token().rpartition(".")[0] + ".",
    "kid number": lambda i: unsigned(i, {"alg": "RS256", "kid": 1}),
    "crit": lambda i: unsigned(i, {"alg": "RS256", "crit": ["exp"], "exp": 1}),
    "other typ": lambda i: i.token(header={"typ": "logout+jwt"}),
    "claim twice": twice,
    "no aud": lambda i: i.token(aud=None),
    "no exp": lambda i: i.token(exp=None),
    "exp text": lambda i: i.token(exp="tomorrow"),
    "exp true": lambda i: i.token(exp=True),
    "exp far": lambda i: i.token(exp=1e300),
    "no iat": lambda i: i.token(iat=None),
    "future iat": lambda i: i.token(iat=NOW + 900, exp=NOW + 1500),
    "future nbf": lambda i: i.token(nbf=NOW + 900),
    "a lifetime of years": lambda i: i.token(exp=NOW + 10**8),
    "no sub": lambda i: i.token(sub=None),
    "sub number": lambda i: i.token(sub=7),
    "no email": lambda i: i.token(email=None),
    "email list": lambda i: i.token(email=["a@b"]),
    "email with a star": lambda i: i.token(email="*"),
    "email with a line": lambda i: i.token(email="a\nb@c"),
    "email too long": lambda i: i.token(email="a" * 300),
    "email that is not verified": lambda i: i.token(email_verified=False),
    "email with a text": lambda i: i.token(email_verified="no"),
    "groups text": lambda i: i.token(groups="ml"),
    "groups of all": lambda i: i.token(groups=["*"]),
    "too many groups": lambda i: i.token(groups=["g"] * 257),
}

HOSTILE: Final[dict[str, tuple[str, Callable[[Issuer], str]]]] = {
    **{name: ("TOKEN_INVALID", make) for name, make in INVALID.items()},
    "no iss": ("ISSUER_UNKNOWN", lambda i: i.token(iss=None)),
    "other iss": ("ISSUER_UNKNOWN", lambda i: i.token(iss="https://evil.example")),
    "iss with a slash": ("ISSUER_UNKNOWN", lambda i: i.token(iss=i.url + "/")),
    "iss list": ("ISSUER_UNKNOWN", lambda i: i.token(iss=[i.url])),
    "other aud": ("TOKEN_AUDIENCE_MISMATCH", lambda i: i.token(aud="grafana")),
    "aud prefix": ("TOKEN_AUDIENCE_MISMATCH", lambda i: i.token(aud="storesvc2")),
    "aud numbers": ("TOKEN_AUDIENCE_MISMATCH", lambda i: i.token(aud=[1])),
    "expired": ("TOKEN_EXPIRED", lambda i: i.token(iat=NOW - 900, exp=NOW - 300)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_token_is_rejected_with_its_reason(served: Served, name: str) -> None:
    reason, make = HOSTILE[name]

    assert served.outcome(f"Bearer {make(served.issuer)}") == reason


def test_a_token_of_the_maximum_size_is_always_accepted(served: Served) -> None:
    size = len(served.issuer.token(extra=""))
    token = served.issuer.token(extra="x" * ((MAX_TOKEN_BYTES - size) * 3 // 4 - 2))
    assert MAX_TOKEN_BYTES - 8 < len(token) <= MAX_TOKEN_BYTES

    found = {served.outcome(f"Bearer {token}") for _ in range(20)}

    assert found == {"user:alice@corp.example"}


@pytest.mark.parametrize("scheme", ["Basic {}", "{}", "Bearer", "Token {}"])
def test_another_scheme_is_rejected(served: Served, scheme: str) -> None:
    assert served.outcome(scheme.format(served.issuer.token())) == "TOKEN_INVALID"


def test_two_tokens_are_rejected(served: Served) -> None:
    token = f"Bearer {served.issuer.token()}"

    assert served.outcome(token, token) == "TOKEN_INVALID"


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=200))
def test_no_text_is_a_token(served: Served, text: str) -> None:
    assert served.outcome(f"Bearer {text}") in ("TOKEN_INVALID", "ISSUER_UNKNOWN")


@given(at=st.integers(0, 10**6), to=st.characters(min_codepoint=45, max_codepoint=122))
def test_a_changed_character_of_a_token_gives_no_other_principal(
    served: Served, at: int, to: str
) -> None:
    token = served.issuer.token()
    place = at % len(token)

    found = served.outcome(f"Bearer {token[:place]}{to}{token[place + 1 :]}")

    # The last bits of base64url are padding, and may change.
    assert found == "user:alice@corp.example" or found.isupper()


def test_unknown_keys_cause_one_read_of_the_issuer(tmp_path: Path) -> None:
    with issuing() as issuer, trusting(tmp_path, issuer) as server:
        assert server.outcome(f"Bearer {issuer.token()}").startswith("user:")
        before = len(issuer.requests)
        for number in range(20):
            token = issuer.token(header={"kid": f"../../unknown-{number}"})
            assert server.outcome(f"Bearer {token}") == "ISSUER_UNREACHABLE"

        assert len(issuer.requests) - before <= 2


@pytest.mark.slow
def test_a_new_key_after_an_unknown_one_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "RETRY_SECONDS", 1.0)
    new = RSAKey.generate_key(2048, {"kid": "rsa-2", "use": "sig"})
    file = tmp_path / "token"
    with issuing() as issuer, trusting(tmp_path, issuer) as server:
        file.write_text(issuer.token())
        with store.connect(server.address, token=file) as client:
            time.sleep(1)
            forged = issuer.token(header={"kid": "unknown"})
            assert server.outcome(f"Bearer {forged}") == "TOKEN_INVALID"
            issuer.keys.append(new)
            file.write_text(issuer.token(key=new))
            found = server.outcome(f"Bearer {file.read_text()}")
            assert found == "ISSUER_UNREACHABLE"

            client.run("prod/a").save(1, {"w": 1}).result()

        newer = RSAKey.generate_key(2048, {"kid": "rsa-3", "use": "sig"})
        assert server.outcome(f"Bearer {forged}") == "ISSUER_UNREACHABLE"
        issuer.keys.append(newer)
        with store.connect(server.address, token=issuer.token(key=newer)) as client:
            assert client.run("prod/a").steps() == [1]


def test_a_key_that_was_withdrawn_serves_no_token_after_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(tokens, "FRESH_SECONDS", 0.0)
    with issuing() as issuer, trusting(tmp_path, issuer) as server:
        assert server.outcome(f"Bearer {issuer.token()}").startswith("user:")
        issuer.keys.remove(KEYS["RS256"])

        token = issuer.token(email="bob@corp.example")
        assert server.outcome(f"Bearer {token}") == "TOKEN_INVALID"


def test_an_issuer_that_is_down_fails_its_calls_and_no_start(tmp_path: Path) -> None:
    with issuing() as issuer:
        issuer.is_down = True
        with trusting(tmp_path, issuer) as server:
            assert server.outcome(f"Bearer {issuer.token()}") == "ISSUER_UNREACHABLE"
            assert server.outcome() == "local"


def test_keys_that_were_read_serve_while_the_issuer_is_down(tmp_path: Path) -> None:
    with issuing() as issuer, trusting(tmp_path, issuer) as server:
        assert server.outcome(f"Bearer {issuer.token()}").startswith("user:")
        issuer.is_down = True

        token = issuer.token(email="bob@corp.example")
        assert server.outcome(f"Bearer {token}") == "user:bob@corp.example"


def test_a_file_of_keys_needs_no_issuer(tmp_path: Path) -> None:
    from joserfc.jwk import KeySet

    with issuing() as issuer:
        keys = tmp_path / "keys.json"
        keys.write_text(json.dumps(KeySet(issuer.keys).as_dict(private=False)))
        text = POLICY.replace('groups = "groups"', f'jwks_file = "{keys}"')
        with trusting(tmp_path, issuer, text) as server:
            assert server.outcome(f"Bearer {issuer.token()}").startswith("user:")
        assert issuer.requests == []


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"no HTTP at all",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 60_000,
        b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 70_000,
        b'HTTP/1.1 200 OK\r\n\r\n{"issuer": "https://evil.example"}',
    ],
    ids=range(7),
)
def test_a_broken_issuer_is_unreachable_and_no_bug(
    tmp_path: Path, answer: bytes
) -> None:
    def serve(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(10_000)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        policy = tmp_path / "policy.toml"
        policy.write_text(POLICY.format(url=url))
        with (
            issuing() as issuer,
            serving(tmp_path / "store", security=make_security(policy)) as address,
        ):
            token = issuer.token(iss=url)
            found = Served(address, issuer).outcome(f"Bearer {token}")
        listener.shutdown(socket.SHUT_RDWR)

    assert found == "ISSUER_UNREACHABLE"


def configured(principal: str, **keys: Any) -> tokens.Issuer:
    """Returns an issuer."""
    return tokens.Issuer(
        name="corp",
        issuer="https://issuer.example",
        audiences=(AUDIENCE,),
        principal=principal,
        **keys,
    )


def name_of(issuer: tokens.Issuer, **claims: Any) -> str:
    """Returns the principal of claims."""
    now = datetime.now(UTC)
    times = {"iat": now.timestamp(), "exp": now.timestamp() + 60}
    found = {"sub": "42", "aud": AUDIENCE, **times, **claims}
    return make_principal(issuer, found, now=now).name


def test_a_claim_cannot_hold_the_text_that_ends_it() -> None:
    issuer = configured("k8s:{a}/{b}")

    assert name_of(issuer, a="x", b="y/z") == "k8s:x/y/z"
    with pytest.raises(InvalidTokenError, match=r"claim a: expected.*without '/'"):
        name_of(issuer, a="x/y", b="z")


@pytest.mark.parametrize("claims", [{}, {"hd": "evil"}, {"hd": ["corp"]}, {"hd": None}])
def test_required_claims_must_have_their_values(claims: dict[str, Any]) -> None:
    issuer = configured("user:{sub}", require=(("hd", "corp"),))

    assert name_of(issuer, hd="corp") == "user:42"
    with pytest.raises(InvalidTokenError, match="claim hd: expected the text 'corp'"):
        name_of(issuer, **claims)


def test_groups_of_another_issuer_are_not_those_of_the_first(tmp_path: Path) -> None:
    with issuing() as corp, issuing() as partner:
        other = POLICY.replace("{url}", partner.url).partition("[[bindings]]")[0]
        other = other.replace('"corp"', '"partner"').replace("user:", "partner:")
        with trusting(tmp_path, corp, other + POLICY) as server:
            stub = AccessServiceStub(grpc.insecure_channel(server.address))
            request = api.TestPermissionsRequest(
                resource="namespaces/prod", permissions=["uploads.begin"]
            )
            for issuer, expected in ((corp, ["uploads.begin"]), (partner, [])):
                metadata = (("authorization", f"Bearer {issuer.token()}"),)
                found = stub.TestPermissions(request, metadata=metadata, timeout=20)
                assert [*found.permissions] == expected
