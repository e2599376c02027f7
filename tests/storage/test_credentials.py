"""A store in a bucket finds its credentials, and reports missing ones.

TensorStore searches credentials once per process, so each test needs a new server. With
the key file of a service account it requests tokens from www.googleapis.com, whatever
address the file has, so only ``make test-gcs`` covers these.
"""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

import numpy as np
import pytest

import storesvc_client as store
from storesvc.errors import InvalidFieldError
from storesvc.storage import remote
from storesvc.storage.object_bucket import TensorStoreBucket
from tests.conftest import gcs_root
from tests.fake_gcs import FakeGcs, Tokens
from tests.support.gcs_calls import BUCKET
from tests.support.server_process import ServerProcess

EMAIL: Final = "trainer@project-1.iam.gserviceaccount.com"

_ACCOUNT: Final = "/computeMetadata/v1/instance/service-accounts"


class MetadataServer:
    """A metadata server; a context manager that listens inside its block."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.lifetime_seconds = 3600.0
        """Lifetime of new tokens."""
        self.has_account = True
        """True if there is a service account."""
        self.is_busy = False
        """True if it answers every request with 503."""
        self.handed_out = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for clients of Google Cloud."""
        host, port = self._server.server_address[:2]
        address = f"{host!s}:{port}"
        names = ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP")
        return dict.fromkeys(names, address)

    def answer(self, path: str) -> tuple[HTTPStatus, str]:
        """Returns the status and the text of a response."""
        if self.is_busy:
            return HTTPStatus.SERVICE_UNAVAILABLE, "busy"
        if path == "/":
            return HTTPStatus.OK, "computeMetadata/\n"
        if path == "/computeMetadata/v1/project/project-id":
            return HTTPStatus.OK, "project-1"
        if not self.has_account:
            return HTTPStatus.NOT_FOUND, "no service account"
        account = {"aliases": ["default"], "email": EMAIL, "scopes": ["cloud-platform"]}
        if path in (f"{_ACCOUNT}/default/", f"{_ACCOUNT}/{EMAIL}/"):
            return HTTPStatus.OK, json.dumps(account)
        if path in (f"{_ACCOUNT}/default/token", f"{_ACCOUNT}/{EMAIL}/token"):
            return HTTPStatus.OK, json.dumps(self.token())
        return HTTPStatus.NOT_FOUND, path

    def token(self) -> dict[str, object]:
        """Returns a new token, as JSON fields."""
        self.handed_out += 1
        return {
            "access_token": self.tokens.hand_out(self.lifetime_seconds),
            "expires_in": int(self.lifetime_seconds),
            "token_type": "Bearer",
        }

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self.answer

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, text = answer(urlsplit(self.path).path)
                if self.headers.get("metadata-flavor") != "Google":
                    status, text = HTTPStatus.FORBIDDEN, "Metadata-Flavor: Google"
                self._send(status, text)

            def _send(self, status: HTTPStatus, text: str) -> None:
                is_document = text.startswith("{")
                kind = "application/json" if is_document else "application/text"
                self.send_response(status)
                self.send_header("metadata-flavor", "Google")
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_request(self, *about: object) -> None:
                """Logs nothing."""

        return Handler


MARGIN_SECONDS = 60
"""TensorStore renews a token so long before its expiry; google-auth does it earlier."""

pytestmark = pytest.mark.emulated


@pytest.fixture
def tokens(
    gcs: FakeGcs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Tokens]:
    """Credentials that the storage requires; no process has any by default."""
    del gcs
    tokens = Tokens()
    with FakeGcs(buckets=[BUCKET], tokens=tokens) as strict:
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", strict.url)
        monkeypatch.delenv("GOOGLE_AUTH_TOKEN_FOR_TESTING")
        monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
        monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
        yield tokens


@pytest.fixture
def metadata(tokens: Tokens) -> Iterator[MetadataServer]:
    """A metadata server that issues the credentials."""
    with MetadataServer(tokens) as server:
        yield server


@pytest.fixture
def client(tmp_path: Path, metadata: MetadataServer) -> Iterator[store.Client]:
    """Environment of a server whose workload has an identity."""
    metadata.lifetime_seconds = MARGIN_SECONDS + 1
    server = ServerProcess(tmp_path, tmp_path, uri=gcs_root())
    server.environment = metadata.environment
    server.start()
    with store.connect(server.address) as connected:
        yield connected
    server.kill()


@pytest.mark.slow
def test_workload_identity_renews_its_tokens_without_a_key_file(
    client: store.Client, metadata: MetadataServer
) -> None:
    run = client.run("tests/identity")
    # Larger than what the server writes in one call, with its other client.
    x = np.arange(200_000)
    run.save(1, {"x": x}).result()
    first = metadata.handed_out

    time.sleep(1.1)  # now they have to be renewed
    metadata.tokens.revoke()
    run.save(2, {"x": x + 1}).result()

    assert metadata.handed_out >= first + 2  # one for each of the two clients
    assert [2, 1] == [found.step for found in run.checkpoints()]
    assert np.array_equal(x + 1, run.restore("latest")["x"])


SAVE = """
import sys, numpy as np, storesvc_client as store
with store.connect(sys.argv[1]) as client:
    run = client.run("tests/identity")
    run.save(1, {"x": np.arange(200_000)}).result()
    assert np.array_equal(np.arange(200_000), run.restore(1)["x"])
"""


@pytest.mark.slow
def test_data_files_are_created_with_the_identity_of_the_workload(
    metadata: MetadataServer,
) -> None:
    saved = subprocess.run(
        [sys.executable, "-c", SAVE, gcs_root()],
        env={**os.environ, **metadata.environment},
        capture_output=True,
        text=True,
        check=False,
    )

    assert 0 == saved.returncode, saved.stderr
    created = [line for _, line in metadata.tokens.uses if line.startswith("PUT ")]
    assert created
    assert all("/pool/" in line for line in created)


@pytest.mark.slow
def test_revoked_credentials_are_reported_at_once(
    client: store.Client, metadata: MetadataServer
) -> None:
    run = client.run("tests/identity")
    run.save(1, {"x": 1}).result()

    metadata.has_account = False
    metadata.tokens.revoke()

    began = time.monotonic()
    for ask in (lambda: run.checkpoint(1), lambda: list(run.checkpoints())):
        with pytest.raises(
            store.PreconditionError, match="accept our cred"
        ) as reported:
            ask()
        assert re.match(f"gs://{BUCKET}/[^ ]*: ", str(reported.value))
        assert "STORAGE_DENIED" == reported.value.reason
        assert "\n" not in str(reported.value)
    assert time.monotonic() - began < 20

    metadata.has_account = True
    time.sleep(1.1)  # a token that still lasts is not renewed
    assert 1 == run.latest().step


@pytest.mark.slow
def test_transient_errors_of_a_metadata_server_are_retried(
    client: store.Client, metadata: MetadataServer
) -> None:
    run = client.run("tests/identity")
    run.save(1, {"x": 1}).result()

    metadata.is_busy = True
    metadata.tokens.revoke()
    time.sleep(1.1)  # now they have to be renewed
    ends = threading.Timer(3.0, lambda: setattr(metadata, "is_busy", False))
    ends.start()

    assert 1 == run.checkpoint(1).step
    assert [1] == [found.step for found in run.checkpoints()]
    ends.join()


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["gcs", "gcs_grpc"])
def test_missing_credentials_are_an_error_that_names_the_expected_ones(
    tokens: Tokens, monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    """The error also appears if the network drops requests to a metadata server, and
    with gRPC, where TensorStore alone would abort the process."""
    del tokens
    if driver == "gcs_grpc":
        monkeypatch.delenv("TENSORSTORE_GCS_HTTP_URL")
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "any")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        monkeypatch.setenv("GCE_METADATA_IP", f"{host}:{port}")
        monkeypatch.setattr(remote, "SEARCH_SECONDS", 0.3)
        began = time.monotonic()
        with pytest.raises(InvalidFieldError, match="expected Application Default Cr"):
            asyncio.run(TensorStoreBucket.open(f"{gcs_root()}?driver={driver}"))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "No such file or directory"),
        ("secret", "it is no JSON"),
        ('["secret"]', "it is JSON, and not of whole credentials"),
        ('{"type": "secret"}', "it is JSON, and not of whole credentials"),
        ('{"type": "service_account"}', "it is JSON, and not of whole credentials"),
    ],
)
def test_an_invalid_credentials_file_is_reported_without_its_content(
    tokens: Tokens,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: str | None,
    fault: str,
) -> None:
    del tokens
    file, root = tmp_path / "key.json", gcs_root()
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))

    with pytest.raises(store.InvalidRequestError) as reported:
        store.connect(root)

    assert (
        f"root {root}: expected credentials in the file that "
        f"GOOGLE_APPLICATION_CREDENTIALS names, got {file} ({fault}); correct one of "
        "them, or unset the variable"
    ) == str(reported.value)


def test_grpc_needs_both_endpoints_or_neither(gcs: FakeGcs) -> None:
    """Otherwise lists would use another storage."""
    del gcs
    with pytest.raises(InvalidFieldError, match="expected both endpoint= "):
        asyncio.run(TensorStoreBucket.open(f"{gcs_root()}?driver=gcs_grpc"))
