"""A metadata server, as machines and pods of Google Cloud have it: it hands out the
tokens of their service account."""

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
    """One that listens while it is entered."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.lifetime_seconds = 3600.0
        """Of the tokens from now on."""
        self.has_account = True
        """Whether there is a service account to hand out tokens of."""
        self.is_busy = False
        """Whether it answers nothing else than that it cannot now."""
        self.handed_out = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """What leads the clients of Google Cloud to it."""
        host, port = self._server.server_address[:2]
        address = f"{host!s}:{port}"
        names = ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP")
        return dict.fromkeys(names, address)

    def answer(self, path: str) -> tuple[HTTPStatus, str]:
        """Returns the status and the text of an answer."""
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
        """Returns a new token, as documents have it."""
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
                """Says nothing."""

        return Handler
