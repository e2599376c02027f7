"""An issuer with the device authorization grant, on this machine."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from joserfc.jwk import KeySet

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
