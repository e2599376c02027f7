"""Logins, identities and permissions in storectl."""

import json
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import pytest
from click.testing import CliRunner, Result
from joserfc.jwk import KeySet

from storesvc.server.security import make_security
from storesvc_client.cli.group import main
from tests.support.faulty_server import serving
from tests.support.tokens import KEYS, Issuer


class DeviceIssuer(Issuer):
    """Issues tokens to people who confirm a code."""

    def __init__(self) -> None:
        ThreadingHTTPServer.__init__(self, ("127.0.0.1", 0), _Pages)
        self.keys: list[Any] = [*KEYS.values()]
        self.requests: list[str] = []
        self.is_down = False
        self.answers: list[str] = ["authorization_pending"]
        """Errors that the next requests of a token get; then they get one."""
        self.forms: list[dict[str, str]] = []
        self.seconds = 600
        """Life of the tokens."""


class _Pages(BaseHTTPRequestHandler):
    server: DeviceIssuer

    def do_GET(self) -> None:
        """Sends the discovery document or the keys."""
        url = self.server.url
        if self.path == "/keys":
            self._send(200, KeySet(self.server.keys).as_dict(private=False))
            return
        self._send(
            200,
            {
                "issuer": url,
                "jwks_uri": f"{url}/keys",
                "device_authorization_endpoint": f"{url}/device",
                "token_endpoint": f"{url}/token",
            },
        )

    def do_POST(self) -> None:
        """Begins a login, or gives a token."""
        length = int(self.headers["Content-Length"])
        parsed = parse_qs(self.rfile.read(length).decode())
        form = {key: values[0] for key, values in parsed.items()}
        self.server.forms.append(form)
        if self.path == "/device":
            self._send(
                200,
                {
                    "device_code": "secret",
                    "user_code": "ABCD-EFGH",
                    "verification_uri_complete": f"{self.server.url}/confirm",
                    "expires_in": 60,
                    "interval": 0,
                },
            )
            return
        if self.server.answers:
            self._send(400, {"error": self.server.answers.pop(0)})
            return
        expires = int(time.time()) + self.server.seconds
        self._send(
            200,
            {
                "access_token": self.server.token(exp=expires),
                "refresh_token": "again",
                "expires_in": self.server.seconds,
            },
        )

    def _send(self, code: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Logs nothing."""


@contextmanager
def device_issuing() -> Iterator[DeviceIssuer]:
    """Runs an issuer."""
    with DeviceIssuer() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


POLICY = """
[[issuers]]
name = "corp"
issuer = "{url}"
audiences = ["storesvc"]
principal = "user:{{email}}"
groups = "groups"
client_id = "storectl"
scopes = ["groups"]

[[bindings]]
role = "writer"
runs = ["prod/*"]
who = ["group:corp/ml"]
"""


class Login(NamedTuple):
    """A server, its issuer, and the configuration of a person."""

    address: str
    issuer: DeviceIssuer
    config: Path

    def run(self, *arguments: str) -> Result:
        """Runs storectl."""
        return CliRunner().invoke(
            main,
            [*arguments, "--store", self.address],
            env={"STORESVC_CONFIG": str(self.config)},
        )


@pytest.fixture
def login(tmp_path: Path) -> Iterator[Login]:
    with device_issuing() as issuer:
        policy = tmp_path / "policy.toml"
        policy.write_text(POLICY.format(url=issuer.url))
        with serving(tmp_path / "store", security=make_security(policy)) as address:
            yield Login(address, issuer, tmp_path / "config" / "config.toml")


def test_a_person_logs_in_and_out(login: Login) -> None:
    assert "local" in login.run("whoami").output

    done = login.run("login")
    assert done.exit_code == 0, done.output
    assert f"open {login.issuer.url}/confirm and confirm the code ABCD-EFGH" in (
        done.output
    )
    assert f"logged in to {login.address} as user:alice@corp.example" in done.output
    begun = login.issuer.forms[0]
    assert (begun["client_id"], begun["audience"]) == ("storectl", "storesvc")
    assert begun["scope"] == "openid groups offline_access"

    shown = login.run("whoami", "--json")
    assert json.loads(shown.output)["principal"] == "user:alice@corp.example"
    file = login.config.with_name("tokens.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700

    assert login.run("login", "--out").exit_code == 0
    assert "local" in login.run("whoami").output


@pytest.mark.slow
def test_a_login_is_renewed_before_its_token_expires(login: Login) -> None:
    login.issuer.seconds = 30
    assert login.run("login").exit_code == 0
    login.issuer.seconds = 600
    login.issuer.forms.clear()

    assert "user:alice" in login.run("whoami").output
    (form,) = login.issuer.forms
    assert (form["grant_type"], form["refresh_token"]) == ("refresh_token", "again")
    assert "user:alice" in login.run("whoami").output
    assert len(login.issuer.forms) == 1


@pytest.mark.parametrize("error", ["access_denied", "expired_token", "invalid_client"])
def test_a_login_that_is_declined_fails_with_its_reason(
    login: Login, error: str
) -> None:
    login.issuer.answers[:] = ["authorization_pending", error]

    done = login.run("login")

    assert done.exit_code == 1
    assert f"rejected: {error}; log in again" in done.output
    assert not login.config.with_name("tokens.json").exists()


def test_an_issuer_without_a_login_is_named(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[[bindings]]\nrole="reader"\nruns=["**"]\nwho=["local"]\n')
    with serving(tmp_path / "store", security=make_security(policy)) as address:
        done = CliRunner().invoke(main, ["login", "--store", address])

    assert done.exit_code == 1
    assert "expected one issuer to log in at, got 0" in done.output


def test_a_file_of_tokens_that_others_may_read_is_rejected(login: Login) -> None:
    assert login.run("login").exit_code == 0
    login.config.with_name("tokens.json").chmod(0o644)

    done = login.run("whoami")

    assert done.exit_code == 1
    assert "expected a file that only its owner may read, got the mode 644" in (
        done.output
    )


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "\x00"])
def test_a_damaged_file_of_tokens_is_rejected(login: Login, text: str) -> None:
    file = login.config.with_name("tokens.json")
    file.parent.mkdir()
    file.write_text(text)
    file.chmod(0o600)

    done = login.run("whoami")

    assert done.exit_code == 1
    assert "expected the logins of storectl" in done.output


def test_a_token_file_comes_before_a_login(login: Login, tmp_path: Path) -> None:
    assert login.run("login").exit_code == 0
    file = tmp_path / "token"
    file.write_text(login.issuer.token(email="bob@corp.example"))

    assert "user:bob" in login.run("whoami", "--token-file", str(file)).output


def test_permissions_are_shown_by_verb_and_by_name(login: Login) -> None:
    assert login.run("login").exit_code == 0

    can = login.run("auth", "can-i", "save", "prod/llama")
    assert (can.exit_code, can.output) == (0, "yes: uploads.begin on prod/llama\n")
    cannot = login.run("auth", "can-i", "delete", "prod/llama")
    assert (cannot.exit_code, cannot.output) == (
        1,
        "no: checkpoints.delete on prod/llama\n",
    )
    assert login.run("auth", "can-i", "checkpoints.read", "lab").exit_code == 1
    wrong = login.run("auth", "can-i", "checkpoints.reed")
    assert "did you mean checkpoints.read?" in wrong.output
    assert "uploads.begin" in login.run("auth", "list", "prod/llama").output


def test_a_denial_is_one_sentence_with_the_caller(login: Login) -> None:
    assert login.run("login").exit_code == 0

    done = login.run("gc", "prod")

    assert done.exit_code == 1
    assert "garbage.collect" in done.output
    assert "user:alice@corp.example" in done.output
    assert "Traceback" not in done.output
