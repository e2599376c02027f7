"""A metadata server of Google Cloud, which issues tokens of the service account of a
machine or pod."""

import json
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, Self
from urllib.parse import urlsplit

from tests.fake_gcs import Tokens

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
