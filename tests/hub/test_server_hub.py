"""``storectl serve --hub-port``: the server decides about callers."""

import json
import re
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from safetensors import safe_open

import storesvc_client as store
from tests.hub.conftest import CONFIG, model
from tests.support.certificates import Authority, Pair
from tests.support.command_line import invoke
from tests.support.server_process import ServerProcess
from tests.support.tokens import keys_document, signed

NAME = "prod/llama-8b"
FILE = f"/{NAME}/resolve/main/model.safetensors"

POLICY = """
[[issuers]]
name = "corp"
issuer = "https://issuer.example"
audiences = ["storesvc"]
jwks_file = "{keys}"
principal = "user:{{sub}}"

[[bindings]]
role = "admin"
runs = ["prod/*"]
who = ["user:trainer"]
"""
READER = """
[[bindings]]
role = "reader"
runs = ["prod/*"]
who = ["user:reader"]
"""


class HubServer:
    """A server with a hub, a policy and an audit log."""

    def __init__(self, folder: Path, *arguments: str, scheme: str = "http") -> None:
        keys = folder / "keys.json"
        keys.write_text(keys_document())
        self._text = POLICY.format(keys=keys)
        self._policy = folder / "policy.toml"
        self.allow(READER)
        self.audit = folder / "audit.log"
        self.server = ServerProcess(
            folder / "store",
            folder,
            *("--hub-port", "0", "--policy", str(self._policy)),
            *("--audit-log", str(self.audit), "--audit-reads"),
            *arguments,
        )
        self.server.start()
        found = re.search(rf"hub at ({scheme}://127\.0\.0\.1:\d+)", self.server.log)
        assert found, self.server.log
        self.address = found[1]

    def allow(self, bindings: str) -> None:
        """Replaces who may read."""
        self._policy.write_text(self._text + bindings)

    def get(self, path: str = FILE, who: str = "reader") -> httpx.Response:
        """Requests something as a user."""
        headers = {"Authorization": f"Bearer {signed(who)}"}
        return httpx.get(self.address + path, headers=headers, timeout=60, verify=False)

    def entries(self) -> list[dict[str, str]]:
        """Returns the lines of the audit log."""
        return [json.loads(line) for line in self.audit.read_text().splitlines()]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("hub")
    served = HubServer(folder)
    token = signed("trainer")
    with store.connect(served.server.address, token=token) as client:
        client.run(NAME).save(300, model(), items={"config": CONFIG}).result()
    yield served
    served.server.kill()


def test_the_caller_is_that_of_the_token(served: HubServer, tmp_path: Path) -> None:
    folder = snapshot_download(
        NAME,
        endpoint=served.address,
        cache_dir=tmp_path,
        token=signed("reader"),
    )

    with safe_open(Path(folder) / "model.safetensors", framework="np") as opened:
        found = opened.get_tensor("params.embed")
    assert np.array_equal(model()["params"]["embed"], found)
    read = [e for e in served.entries() if e.get("principal") == "user:reader"]
    assert {"GetCheckpoint", "ReadManifest", "ReadChunks"} <= {
        e["method"] for e in read
    }
    assert NAME in json.dumps(read)


def test_a_caller_without_a_role_learns_nothing(served: HubServer) -> None:
    api = HfApi(endpoint=served.address, token=signed("stranger"))
    with pytest.raises((RepositoryNotFoundError, HfHubHTTPError)) as hidden:
        api.model_info(NAME)
    with pytest.raises((RepositoryNotFoundError, HfHubHTTPError)) as absent:
        api.model_info("prod/absent")
    answers = {served.get(path, "stranger").status_code for path in (FILE, "/a/b/x")}

    assert answers <= {403, 404}
    assert type(hidden.value) is type(absent.value)
    denied = [e for e in served.entries() if e.get("principal") == "user:stranger"]
    assert "denied" in {e["stage"] for e in denied}


@pytest.mark.parametrize(
    "sent", ["Bearer x.y.z", "Bearer", "Basic eDp5", "", "Bearer é"]
)
def test_a_token_that_is_none_is_denied(served: HubServer, sent: str) -> None:
    headers = {b"Authorization": sent.encode("latin-1")}

    answer = httpx.get(served.address + FILE, headers=headers, verify=False)

    assert 401 == answer.status_code
    assert "Bearer" == answer.headers["www-authenticate"]


def test_two_tokens_are_denied(served: HubServer) -> None:
    both = [("Authorization", f"Bearer {signed(who)}") for who in ("reader", "trainer")]

    answer = httpx.get(served.address + FILE, headers=both, verify=False)

    assert 401 == answer.status_code


def test_a_role_that_is_revoked_ends_a_download(served: HubServer) -> None:
    size = 160 << 20
    token = signed("trainer")
    with store.connect(served.server.address, token=token) as client:
        client.run("prod/large").save(1, {"w": np.zeros(size, np.uint8)}).result()
    large = "/api/models/prod/large"
    file = f"{served.address}/prod/large/resolve/main/model.safetensors"
    headers = {"Authorization": f"Bearer {signed('reader')}"}
    got = 0
    try:
        with httpx.stream("GET", file, headers=headers, timeout=60) as answer:
            pieces = answer.iter_raw()
            got += len(next(pieces))
            served.allow("# none reads\n")
            while 200 == served.get(large).status_code:
                pass  # the server looks at its policy at intervals
            with pytest.raises(httpx.RemoteProtocolError):  # noqa: PT012 - counts
                for piece in pieces:
                    got += len(piece)
        again = served.get(large).status_code
    finally:
        served.allow(READER)

    assert 0 < got < size
    assert again in (403, 404)


@pytest.mark.slow
def test_a_server_of_tls_serves_its_hub_by_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    good = authority.issue("good", "localhost", "127.0.0.1")
    files = Pair(certificate=tmp_path / "s.pem", key=tmp_path / "s.key")
    files.replace(good)
    options = ("--tls-cert", str(files.certificate), "--tls-key", str(files.key))
    served = HubServer(tmp_path, *options, scheme="https")
    try:
        context = ssl.create_default_context(cafile=authority.certificate)
        headers = {"Authorization": f"Bearer {signed('reader')}"}

        def ask() -> int:
            path = f"{served.address}/api/models/prod/absent"
            return httpx.get(path, headers=headers, verify=context).status_code

        before = ask()
        other = Authority(tmp_path, "other").issue("late", "localhost", "127.0.0.1")
        files.replace(other)
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            ask()
        files.replace(good)
        after = ask()
    finally:
        served.server.stop()

    assert (404, 404) == (before, after)


def test_an_error_shows_no_address_of_the_server(served: HubServer) -> None:
    answer = served.get("/api/models/prod/zzzzzzzz", "trainer")

    assert 404 == answer.status_code
    assert answer.json()["error"].startswith("this store: ")
    assert "unix:" not in answer.text


def test_it_drains_with_the_server(tmp_path: Path) -> None:
    """This one maps by a table, as ``storectl hub --map`` does."""
    served = HubServer(tmp_path, "--hub-map", "llama-inverse")

    assert served.get("/api/models/prod/absent").status_code in (403, 404)
    assert 0 == served.server.stop()
    with pytest.raises(httpx.ConnectError):
        served.get()


@pytest.mark.parametrize(
    "options",
    [
        ("--hub-select", "a"),
        ("--hub-map", "llama"),
        ("--hub-port", "0", "--unix", "/tmp/d/s"),
        ("--hub-port", "0", "--collect-only"),
    ],
)
def test_what_does_not_fit_is_rejected(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    result = invoke("serve", "--root", str(tmp_path), *options)

    assert 2 == result.exit_code
    assert "hub" in result.stderr


@pytest.mark.parametrize("rules", ["absent.toml", "lama"])
def test_rules_that_are_none_are_named(tmp_path: Path, rules: str) -> None:
    options = ("--hub-port", "0", "--hub-map", rules)
    result = invoke("serve", "--root", str(tmp_path), *options)

    assert 1 == result.exit_code
    assert f"got '{rules}'" in result.stderr


def test_a_port_that_is_taken_is_named(served: HubServer, tmp_path: Path) -> None:
    port = served.address.rpartition(":")[2]
    result = invoke("serve", "--root", str(tmp_path), "--hub-port", port)

    assert 1 == result.exit_code
    assert "--hub-port" in result.stderr
