"""Signs tokens, good and hostile, and serves the keys of an issuer."""

import base64
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from joserfc import jwt
from joserfc.jwk import ECKey, KeySet, OKPKey, RSAKey

AUDIENCE: Final = "storesvc"

KEYS: Final[dict[str, Any]] = {
    "RS256": RSAKey.generate_key(2048, {"kid": "rsa-1", "use": "sig"}),
    "ES256": ECKey.generate_key("P-256", {"kid": "ec-1", "use": "sig"}),
    "EdDSA": OKPKey.generate_key("Ed25519", {"kid": "ed-1", "use": "sig"}),
}
"""A key for each algorithm."""

OTHER: Final = RSAKey.generate_key(2048, {"kid": "rsa-1", "use": "sig"})
"""A key of a stranger, by the name of the first one."""


def keys_document() -> str:
    """Returns the public keys, as an issuer publishes them."""
    return json.dumps(KeySet([*KEYS.values()]).as_dict(private=False))


def signed(
    subject: str, *, issuer: str = "https://issuer.example", seconds: int = 3600
) -> str:
    """Returns a token of an issuer that only its keys are known of, for some time."""
    now = int(time.time())
    claims = {"iss": issuer, "aud": AUDIENCE, "sub": subject}
    return jwt.encode(
        {"alg": "ES256", "kid": KEYS["ES256"].kid},
        {**claims, "iat": now, "exp": now + seconds},
        KEYS["ES256"],
        algorithms=["ES256"],
    )


class Issuer(ThreadingHTTPServer):
    """An issuer on this machine: a discovery document and keys."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Pages)
        self.keys: list[Any] = [*KEYS.values()]
        self.requests: list[str] = []
        self.is_down = False

    @property
    def url(self) -> str:
        """The value of ``iss``."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def claims(self, **changes: Any) -> dict[str, Any]:
        """Returns the claims of a good token, with changes; None removes one."""
        now = int(time.time())
        claims = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "42",
            "email": "alice@corp.example",
            "groups": ["ml"],
            "iat": now,
            "exp": now + 600,
            **changes,
        }
        return {name: value for name, value in claims.items() if value is not None}

    def token(
        self,
        algorithm: str = "RS256",
        *,
        header: Mapping[str, Any] | None = None,
        key: Any = None,
        **changes: Any,
    ) -> str:
        """Returns a token that is signed."""
        signing = key or KEYS[algorithm]
        full = {"alg": algorithm, "kid": signing.kid, **(header or {})}
        return jwt.encode(
            {k: v for k, v in full.items() if v is not None},
            self.claims(**changes),
            signing,
            algorithms=[algorithm],
        )


class _Pages(BaseHTTPRequestHandler):
    server: Issuer

    def do_GET(self) -> None:
        """Sends the discovery document or the keys."""
        self.server.requests.append(self.path)
        if self.server.is_down:
            self.send_error(503)
            return
        if self.path == "/.well-known/openid-configuration":
            found: Any = {
                "issuer": self.server.url,
                "jwks_uri": f"{self.server.url}/keys",
            }
        else:
            found = KeySet(self.server.keys).as_dict(private=False)
        data = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Logs nothing."""


@contextmanager
def issuing() -> Iterator[Issuer]:
    """Runs an issuer."""
    with Issuer() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def encoded(value: Any) -> str:
    """Returns a part of a token."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
