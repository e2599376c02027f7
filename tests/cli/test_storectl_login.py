"""Logins, identities and permissions in storectl."""

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner, Result

from storesvc.server.security import make_security
from storesvc_client.cli.group import main
from tests.support.device_issuer import DeviceIssuer, device_issuing
from tests.support.faulty_server import serving

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
