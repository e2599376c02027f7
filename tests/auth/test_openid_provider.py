"""A real OpenID provider: tokens of jobs, logins of people, rotation, outages."""

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from html import unescape
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner
from joserfc.jwk import RSAKey

import storesvc_client as store
from storesvc.auth import tokens
from storesvc.server.security import make_security
from storesvc_client.cli.group import main
from tests.support.faulty_server import serving
from tests.support.sockets import free_port

HERE: Final = Path(__file__).parent / "oidc"

POLICY: Final = """
[[issuers]]
name = "provider"
issuer = "{url}"
audiences = ["storesvc"]
principal = "user:{{email}}"
groups = "groups"
client_id = "storectl"
scopes = ["api"]

[[bindings]]
role = "writer"
runs = ["prod/*"]
who = ["group:provider/ml"]
"""

pytestmark = pytest.mark.slow


class OpenIdProvider:
    """``oidc-provider`` on Node.js, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._process: subprocess.Popen[str] | None = None
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self, *kids: str) -> None:
        """Starts it with keys, the first of which signs."""
        self.stop()
        keys = [RSAKey.generate_key(2048, {"kid": kid, "use": "sig"}) for kid in kids]
        jwks = json.dumps({"keys": [key.as_dict(private=True) for key in keys]})
        self._process = subprocess.Popen(
            ["node", "provider.mjs", str(self._port), jwks],
            cwd=self._folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def stop(self) -> None:
        """Stops it."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def job_token(self) -> str:
        """Returns a token of the client credentials grant."""
        form = {
            "grant_type": "client_credentials",
            "client_id": "job",
            "client_secret": "secret",
            "scope": "api",
        }
        data = urllib.parse.urlencode(form).encode()
        with urllib.request.urlopen(f"{self.url}/token", data) as response:
            return str(json.load(response)["access_token"])

    def confirm(self, url: str, person: str) -> None:
        """Confirms a code as a person does in a browser: signs in, and consents."""
        browser = urllib.request.build_opener(
            urllib.request.HTTPCookieProcessor(CookieJar())
        )
        with browser.open(url) as response:
            page, place = response.read().decode(), response.url
        for _ in range(10):
            if "Sign-in Success" in page:
                return
            form = re.search(r'<form[^>]*action="([^"]+)"', page)
            assert form is not None, page
            fields = {}
            for tag in re.findall(r"<input[^>]*>", page):
                values = dict(re.findall(r'(name|value)="([^"]*)"', tag))
                if "name" in values:
                    fields[values["name"]] = values.get("value", "")
            fields |= {"login": person, "password": "any"}
            action = urllib.parse.urljoin(place, unescape(form[1]))
            data = urllib.parse.urlencode(fields).encode()
            with browser.open(action, data) as response:
                page, place = response.read().decode(), response.url
        raise AssertionError(page)


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenIdProvider]:
    if shutil.which("npm") is None:
        pytest.skip("the provider needs Node.js and npm")
    folder = tmp_path_factory.mktemp("oidc")
    for file in HERE.iterdir():
        shutil.copy(file, folder)
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"]
    subprocess.run(install, cwd=folder, check=True, capture_output=True)
    made = OpenIdProvider(folder)
    yield made
    made.stop()


@pytest.fixture
def address(provider: OpenIdProvider, tmp_path: Path) -> Iterator[str]:
    """The address of a server that trusts the provider."""
    provider.start("first")
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY.format(url=provider.url))
    with serving(tmp_path / "store", security=make_security(policy)) as found:
        yield found


def test_a_job_saves_with_its_client_credentials(
    provider: OpenIdProvider, address: str
) -> None:
    with store.connect(address, token=provider.job_token) as client:
        assert client.identity().principal == "user:job@corp.example"
        client.run("prod/llama").save(1, {"w": 1}).result()
        assert client.run("prod/llama").latest().principal == "user:job@corp.example"


def test_a_person_logs_in_with_a_code(
    provider: OpenIdProvider, address: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("STORESVC_CONFIG", str(tmp_path / "config.toml"))
    shown: list[str] = []
    monkeypatch.setattr(
        "storesvc_client.cli.commands.auth._show",
        lambda prompt: shown.append(prompt.url),
    )

    def confirm() -> None:
        while not shown:
            time.sleep(0.05)
        provider.confirm(shown[0], "alice")

    person = threading.Thread(target=confirm)
    person.start()
    done = CliRunner().invoke(main, ["login", "--store", address])
    person.join()

    assert done.exit_code == 0, done.output
    assert "as user:alice@corp.example" in done.output
    can = CliRunner().invoke(
        main, ["auth", "can-i", "save", "prod/llama", "--store", address]
    )
    assert can.output == "yes: uploads.begin on prod/llama\n"


def test_keys_are_rotated_without_a_restart(
    provider: OpenIdProvider, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "RETRY_SECONDS", 0.0)
    old = provider.job_token()
    with store.connect(address, token=old) as client:
        assert client.identity().groups == ("provider/ml",)

    provider.start("second")

    with store.connect(address, token=provider.job_token()) as client:
        assert client.identity().groups == ("provider/ml",)
    fresh = old[:-4] + ("AAAA" if not old.endswith("AAAA") else "BBBB")
    with pytest.raises(store.UnauthenticatedError):
        store.connect(address, token=fresh)


def test_a_provider_that_is_down_fails_no_caller_with_known_keys(
    provider: OpenIdProvider, address: str
) -> None:
    first, second = provider.job_token(), provider.job_token()
    store.connect(address, token=first).close()
    provider.stop()

    with store.connect(address, token=second) as client:
        assert client.identity().principal == "user:job@corp.example"
