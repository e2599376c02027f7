"""The application: routes, errors as pages, and the two forms of a page.

Functions of pages are synchronous, as the client is; Starlette runs them in threads.

>>> app = create_app(client, key="secret", store="file:///ckpts")

It checks who may ask, and what a browser may do with the answers:

1. The Host header must name this machine, so that no other site can point its own name
   at this address and read the pages (DNS rebinding).
2. A browser must have the key that ``storectl console`` prints, because other users of
   the machine reach the address too. The first address has it in its query; a cookie
   keeps it.
3. A change must come from a page of the console: the Origin header is checked here, and
   the token of the form in the function of the page.
4. The content security policy allows scripts and styles from files of the console only,
   so that a name that slipped through the escaping would still do nothing.
"""

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.datastructures import URL, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from storesvc_client import Client, StoreError
from storesvc_client._http import http_status, is_loopback
from storesvc_client._views.texts import json_value
from storesvc_client.console import changes, checkpoint_pages, run_pages, store_pages
from storesvc_client.console.rendering import (
    FOLDER,
    Crumb,
    Navigation,
    Page,
    Renderer,
    checkpoint_url,
    leaf_url,
    run_url,
    with_values,
)
from storesvc_client.console.visit import (
    EventFeed,
    EventFeeds,
    OpenedCheckpoints,
    Visit,
    parse_number,
)

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
        host = request.headers.get("host", "")
        if not is_loopback(host):
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
        own = f"{request.url.scheme}://{host}"
        if request.method not in _SAFE and request.headers.get("origin") != own:
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
    return f"storesvc-console-{url.port or 80}"


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


PageFunction: TypeAlias = Callable[[Visit], Page]

_log = logging.getLogger(__name__)

_FORM_BYTES: Final = 64 << 10
"""Maximum size of a form."""

_POLL_SECONDS: Final = 0.25
"""Interval at which a stream of events looks for new ones."""

_SILENT_POLLS: Final = 60
"""Polls after which a silent stream sends a comment, so that it is seen to live."""


class _Assets(StaticFiles):
    """The files of `static/`, whose addresses change with their content."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response


def create_app(client: Client, *, key: str, store: str) -> ASGIApp:
    """Returns the console as an ASGI application.

    Args:
        client: Client of the store, with the token of the user; stays open.
        key: Secret that a browser must have.
        store: Name of the store, for people.
    """
    console = _Console(client, Access(key=key), Renderer(store=store))
    shown = console.shown
    app = Starlette(
        routes=[
            Route("/", shown(run_pages.show_runs)),
            Route("/r/{namespace}/{name}", shown(show_named_page)),
            Route("/tree/{namespace}/{name}", shown(checkpoint_pages.show_tree_rows)),
            Route("/plot/{namespace}/{name}", console.points),
            Route("/trace/{namespace}/{name}", shown(checkpoint_pages.show_trace)),
            Route("/diff", shown(checkpoint_pages.show_difference)),
            Route("/uploads", shown(store_pages.show_uploads)),
            Route("/storage", shown(store_pages.show_storage)),
            Route("/events", shown(store_pages.show_events)),
            Route("/events/stream", console.stream),
            Route("/audit", shown(store_pages.show_audit_log)),
            Route("/me", shown(store_pages.show_identity)),
            Route("/help", shown(store_pages.show_help)),
            Route("/change/{action}", shown(changes.show_change), methods=["GET"]),
            Route("/change/{action}", console.change, methods=["POST"]),
            Mount("/static", _Assets(directory=FOLDER / "static")),
        ],
        exception_handlers={
            StoreError: console.store_error,
            HTTPException: console.http_error,
            Exception: console.unforeseen_error,
        },
    )
    # around all of it, so that responses to unforeseen errors have the headers too
    return Guard(app, access=console.access)


def show_named_page(visit: Visit) -> Page:
    """Returns the page of a run, a checkpoint or a leaf, as the address says."""
    if "@" not in visit.path["name"]:
        return run_pages.show_run(visit)
    if "key" in visit.query:
        return checkpoint_pages.show_leaf(visit)
    return checkpoint_pages.show_checkpoint(visit)


class _Console:
    """State that all requests share."""

    def __init__(self, client: Client, access: Access, renderer: Renderer) -> None:
        self.access = access
        self._client = client
        self._opened = OpenedCheckpoints()
        self._feeds = EventFeeds(client)
        self._navigation = Navigation(client)
        self._renderer = renderer

    def shown(self, function: PageFunction) -> Callable[[Request], Response]:
        def endpoint(request: Request) -> Response:
            return self._response(request, function(self._visit(request)))

        return endpoint

    def points(self, request: Request) -> Response:
        """Returns the points of a metric, for the interactive plot."""
        return JSONResponse(json_value(run_pages.metric_points(self._visit(request))))

    async def change(self, request: Request) -> Response:
        """Makes the change that a form names, and leads back to its page."""
        fields = await _fields(request)
        if not self.access.is_form_token(fields.get("token")):
            raise HTTPException(
                403,
                "expected a change from a page of this console, got a form without "
                "its token; nothing was changed",
            )
        visit = self._visit(request)
        address = await asyncio.to_thread(changes.make_change, visit, fields)
        return RedirectResponse(address, 303)

    async def stream(self, request: Request) -> Response:
        """Streams events of a namespace or a run to the page of events."""
        parent = request.query_params.get("of", "")
        feed = await asyncio.to_thread(self._feeds.find_feed, parent)
        after = request.headers.get("last-event-id") or request.query_params.get(
            "after", "0"
        )
        last = parse_number("after", after, remedy="reload the page")
        return StreamingResponse(
            self._messages(feed, last), media_type="text/event-stream"
        )

    async def _messages(self, feed: EventFeed, last: int) -> AsyncIterator[str]:
        silent = 0
        while True:
            for number, event in feed.after(last):
                last, silent = number, 0
                html = self._renderer.row("event_row.html", event=event)
                yield f"id: {number}\ndata: {json.dumps(html)}\n\n"
            if feed.problem:
                return
            silent += 1
            if silent % _SILENT_POLLS == 0:
                yield ": nothing new\n\n"
            await asyncio.sleep(_POLL_SECONDS)

    def store_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, StoreError)
        return self._error(
            request,
            http_status(error),
            kind=type(error).__name__,
            reason=error.reason,
            message=str(error),
            metadata=dict(error.metadata),
        )

    def http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = error.detail
        if error.status_code == 404:
            message = (
                f"there is no page {request.url.path}; begin with the list of runs"
            )
        return self._error(
            request,
            error.status_code,
            kind="HTTPException",
            reason="",
            message=message,
            metadata={},
        )

    def unforeseen_error(self, request: Request, error: Exception) -> Response:
        """Returns the page of a defect of the console, and logs it."""
        _log.error("page %s failed", request.url.path, exc_info=error)
        return self._error(
            request,
            500,
            kind=type(error).__name__,
            reason="",
            message="the console failed; its log on stderr has the cause",
            metadata={},
        )

    def _error(self, request: Request, status: int, **error: Any) -> Response:
        page = Page(
            template="error.html",
            title=_TITLES.get(status, "That did not work"),
            document={"error": error},
            section="",
            values={
                "message": error["message"],
                "nearest": [*_nearest_links(error["metadata"])],
            },
            status=status,
        )
        return self._response(request, page)

    def _visit(self, request: Request) -> Visit:
        return Visit(
            client=self._client,
            opened=self._opened,
            feeds=self._feeds,
            now=datetime.now(UTC),
            path=request.path_params,
            query=dict(request.query_params),
        )

    def _response(self, request: Request, page: Page) -> Response:
        if "json" in request.query_params:
            return JSONResponse(json_value(page.document), page.status)
        navigation = self._navigation
        html = self._renderer.html(
            page,
            # after an error, the server may not answer
            sections=navigation.current() if page.status == 200 else navigation.known,
            token=self.access.form_token,
            now=datetime.now(UTC),
            address=with_values(request.url.path, request.query_params),
        )
        return HTMLResponse(html, page.status)


_TITLES: Final = {
    400: "The request is not valid",
    401: "The store needs another token",
    403: "Not permitted",
    404: "Not found",
    409: "Not possible as things are",
    429: "A limit is exceeded",
    500: "The store failed",
    503: "The store does not answer",
}


def _nearest_links(metadata: Mapping[str, str]) -> Iterator[Crumb]:
    """Yields links to what has a name similar to one that does not exist."""
    run, names = metadata.get("run", ""), metadata.get("nearest", "")
    for name in filter(None, names.split(",")):
        is_run = "/" in name
        address = run_url(name) if is_run else checkpoint_url(run, name)
        yield Crumb(name=name if is_run else f"{run}@{name}", address=address)
    run, _, step = metadata.get("checkpoint", "").partition("@")
    for key in filter(None, metadata.get("nearest_keys", "").split("\n")):
        yield Crumb(name=key, address=leaf_url(run, step, key))


async def _fields(request: Request) -> dict[str, str]:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _FORM_BYTES:
            raise HTTPException(
                413,
                f"expected a form of at most {_FORM_BYTES:,} bytes, got more; use "
                "storectl",
            )
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=64))
    except ValueError as e:  # no UTF-8, or too many fields
        raise HTTPException(400, f"expected a form of this console, got {e}") from e
