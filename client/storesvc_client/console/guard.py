"""Guards the console: who may ask, and what a browser may do with the answers.

1. The Host header must name this machine, so that no other site can point its own name
   at this address and read the pages (DNS rebinding).
2. A browser must have the key that ``storectl console`` prints, because other users of
   the machine reach the address too. The first address has it in its query; a cookie
   keeps it.
3. A change must come from a page of the console: the Origin header is checked here, and
   the token of the form in `app.py`.
4. The content security policy allows scripts and styles from files of the console only,
   so that a name that slipped through the escaping would still do nothing.
"""

import hmac
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

from starlette.datastructures import URL, Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Names of this machine in a Host header."""

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; "
        "img-src 'self' data:; connect-src 'self'; form-action 'self'; "
        "frame-ancestors 'none'; base-uri 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    # not no-referrer, with which browsers send no Origin with forms
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every response."""

_SAFE: Final = frozenset({"GET", "HEAD"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The browsers that are let in."""

    key: str = field(repr=False)
    """Secret that the address has which ``storectl console`` prints."""
    hosts: frozenset[str] = LOOPBACK
    """Host names, without ports, under which the console is reached."""

    @property
    def form_token(self) -> str:
        """Token that forms send; does not reveal the key."""
        return hmac.new(self.key.encode(), b"form", sha256).hexdigest()

    def is_form_token(self, token: object) -> bool:
        """Returns whether a form of this console sent the token."""
        return isinstance(token, str) and _equal(token, self.form_token)


class Guard:
    """Lets requests pass that the rules above permit; adds headers to all responses."""

    def __init__(self, app: ASGIApp, *, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or passes it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refused = self._refusal(Request(scope))
        answering = self._app if refused is None else refused
        await answering(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """Returns the response to a request that may not pass; None if it may."""
        if _host_of(request.headers) not in self._access.hosts:
            return PlainTextResponse(
                "expected the name of this machine as the host; open the address that "
                "storectl console printed\n",
                403,
            )
        if request.url.path.startswith("/static/"):
            return None
        if not _equal(
            request.cookies.get(cookie_name(request.url), ""), self._access.key
        ):
            return self._admission(request)
        if request.method not in _SAFE and not _is_same_origin(request):
            return PlainTextResponse(
                "expected a change from a page of this console, got one of another "
                "site; nothing was changed\n",
                403,
            )
        return None

    def _admission(self, request: Request) -> Response:
        """Returns the response to a browser without the cookie."""
        key = request.query_params.get("key", "")
        if request.method not in _SAFE or not _equal(key, self._access.key):
            return PlainTextResponse(
                "expected the key of this console; open the address that storectl "
                "console printed\n",
                403,
            )
        # 303 to the address without the key, so that no history or bookmark keeps it
        # and with one slash first: more would name another host
        response = RedirectResponse(f"/{request.url.path.lstrip('/')}", 303)
        # one cookie for each port, as cookies do not separate ports
        response.set_cookie(
            cookie_name(request.url),
            self._access.key,
            httponly=True,
            samesite="lax",
            path="/",
        )
        return response


def cookie_name(url: URL) -> str:
    """Returns the name of the cookie of the console at an address."""
    return f"storesvc-console-{url.port or 80}"


def _host_of(headers: Headers) -> str:
    """Returns the name in the Host header, without its port."""
    host = headers.get("host", "")
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host


def _is_same_origin(request: Request) -> bool:
    origin = request.headers.get("origin")
    return origin == f"{request.url.scheme}://{request.headers.get('host')}"


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
