"""Serves files of a location to TensorStore, which reads them as from a web server.

TensorStore itself reads file systems, buckets and web servers. What only fsspec or
huggingface_hub read, it reads here: a server on loopback answers GET and HEAD, with or
without a range (RFC 9110). A process has one such server, and each location a path on
it that other users of the machine cannot guess.
"""

import hashlib
import json
import os
import re
import secrets
import sys
import threading
import urllib.request
from collections import OrderedDict
from copy import copy
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import unquote

from storesvc_client._foreign.locations import Location
from storesvc_client.errors import NotFoundError, PreconditionError, StoreError

_HOST: Final = "127.0.0.1"

_PROXIES: Final = ("http_proxy", "all_proxy", "ALL_PROXY")
"""Variables from which curl, in TensorStore, takes the proxy for http."""

_RANGE: Final = re.compile(r"bytes=(?:(?P<first>\d+)-(?P<last>\d*)|-(?P<length>\d+))")

_IDLE_SECONDS: Final = 60.0
"""Time after which an unused connection is closed."""

_MAX_ERRORS: Final = 1000
"""Maximum of errors that are kept for ``error_in``."""

_ERROR: Final = re.compile(r"storesvc error ([0-9a-f]{32})-(\d+)")


def kvstore(location: Location, folder: str = "") -> dict[str, Any]:
    """Returns the spec of TensorStore's key-value store at a folder of a location."""
    found = next((name for name in _PROXIES if os.environ.get(name)), None)
    if found is not None and not urllib.request.proxy_bypass(_HOST):
        exceptions = "no_proxy" if "no_proxy" in os.environ else "NO_PROXY"
        raise PreconditionError(
            f"{location.url}: expected no proxy for {_HOST}, where TensorStore reads "
            f"this location, got one from the variable {found}; add {_HOST} to the "
            f"variable {exceptions}"
        )
    return _Server.process_server().kvstore(location, f"{folder}/" if folder else "")


def error_in(text: str) -> Exception | None:
    """Returns the error of a location that made a read of TensorStore fail."""
    found = _ERROR.search(text)
    server = _Server.find_started()
    return server.error(found[1], int(found[2])) if found and server else None


def with_urls(text: str) -> str:
    """Returns a message of TensorStore with the URL of each location in place of its
    path on this server."""
    server = _Server.find_started()
    return server.with_urls(text) if server else text


class _Server(ThreadingHTTPServer):
    """Serves locations until the process ends."""

    daemon_threads = True
    request_queue_size = 128

    _lock = threading.Lock()
    _found: "tuple[int, _Server] | None" = None

    def __init__(self) -> None:
        super().__init__((_HOST, 0), _Handler)
        self._folders: dict[Location, str] = {}
        self._locations: dict[str, Location] = {}
        self._errors: OrderedDict[int, Exception] = OrderedDict()
        self._failures = 0
        self._secret = secrets.token_hex(16)
        """Marks what is an error of this server in messages of TensorStore."""

    @classmethod
    def process_server(cls) -> "_Server":
        """Returns the server of this process, not that of one it was forked from."""
        with cls._lock:
            if cls._found is None or cls._found[0] != os.getpid():
                server = cls()
                cls._found = os.getpid(), server
                threading.Thread(
                    target=server.serve_forever, name="storesvc-loopback", daemon=True
                ).start()
            return cls._found[1]

    @classmethod
    def find_started(cls) -> "_Server | None":
        """Returns the server of this process if there is one."""
        found = cls._found
        return found[1] if found is not None and found[0] == os.getpid() else None

    def kvstore(self, location: Location, below: str) -> dict[str, Any]:
        """See ``kvstore``; `below` is empty or ends in "/"."""
        with self._lock:
            folder = self._folders.setdefault(location, secrets.token_hex(16))
            self._locations[folder] = location
        url = f"http://{_HOST}:{self.server_port}"
        return {"driver": "http", "base_url": url, "path": f"/{folder}/{below}"}

    def location(self, folder: str) -> Location | None:
        """Returns the location that has the path ``/FOLDER/``."""
        return self._locations.get(folder)

    def failed(self, error: Exception) -> str:
        """Keeps an error; returns the text by which ``error_in`` finds it.

        A copy is kept, and each reader gets one: a traceback would keep the arrays of
        its frames in memory.
        """
        with self._lock:
            self._failures += 1
            self._errors[self._failures] = _bare(error)
            if len(self._errors) > _MAX_ERRORS:
                self._errors.popitem(last=False)
            return f"storesvc error {self._secret}-{self._failures}"

    def error(self, secret: str, number: int) -> Exception | None:
        """Returns an error that was kept."""
        found = self._errors.get(number) if secret == self._secret else None
        return None if found is None else _bare(found)

    def with_urls(self, text: str) -> str:
        """See ``with_urls``."""

        def url(found: re.Match[str]) -> str:
            location = self.location(found[1])
            return found[0] if location is None else location.url.rstrip("/")

        start = re.escape(f"http://{_HOST}:{self.server_port}/")
        return re.sub(start + "([0-9a-f]{32})", url, text)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs nothing: a connection that TensorStore closed is no error."""


class _Handler(BaseHTTPRequestHandler):
    """Answers requests for files."""

    protocol_version = "HTTP/1.1"
    timeout = _IDLE_SECONDS
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        """Sends a file or a range of it."""
        name, _, path = self.path.removeprefix("/").partition("/")
        location = self.server.location(name)
        if location is None:
            answer = _Answer(HTTPStatus.NOT_FOUND)
        else:
            try:
                answer = self._answer(location, unquote(path))
            except NotFoundError:
                answer = _Answer(HTTPStatus.NOT_FOUND)
            except Exception as e:  # noqa: BLE001
                # a status that TensorStore does not retry, as the location has done so
                text = self.server.failed(e)
                answer = _Answer(HTTPStatus.FORBIDDEN, text.encode())
        self._send(answer)

    def do_HEAD(self) -> None:
        """Sends the size of a file."""
        self.do_GET()

    def _answer(self, location: Location, path: str) -> "_Answer":
        # The files of a location with labels, such as one of a commit, do not change:
        # with an ETag, TensorStore reads the manifest of a database once.
        version = None
        if labels := location.labels():
            found = hashlib.sha256(json.dumps(sorted(labels.items())).encode())
            version = f'"{found.hexdigest()[:32]}"'
        if version is not None and version == self.headers.get("If-None-Match"):
            return _Answer(HTTPStatus.NOT_MODIFIED, version=version)
        return replace(self._contents(location, path), version=version)

    def _contents(self, location: Location, path: str) -> "_Answer":
        size = location.size(path)
        if size is None:
            return _Answer(HTTPStatus.NOT_FOUND)
        if self.command == "HEAD":
            return _Answer(HTTPStatus.OK, length=size)
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        if asked is None:
            return _Answer(HTTPStatus.OK, location.read(path, limit=sys.maxsize))
        if asked["length"]:
            start, stop = max(0, size - int(asked["length"])), size
        else:
            last = int(asked["last"]) if asked["last"] else size - 1
            start, stop = int(asked["first"]), min(last + 1, size)
        if start >= stop:
            status = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
            return _Answer(status, content_range=f"bytes */{size}")
        data = location.read_range(path, start, stop)
        span = f"bytes {start}-{stop - 1}/{size}"
        return _Answer(HTTPStatus.PARTIAL_CONTENT, data, content_range=span)

    def _send(self, answer: "_Answer") -> None:
        self.send_response(answer.status)
        if answer.content_range is not None:
            self.send_header("Content-Range", answer.content_range)
        if answer.version is not None:
            self.send_header("ETag", answer.version)
        length = len(answer.data) if answer.length is None else answer.length
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.data)

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


@dataclass(frozen=True, slots=True)
class _Answer:
    status: HTTPStatus
    data: bytes = b""
    length: int | None = None
    """Length that is announced instead of that of the data."""
    content_range: str | None = field(default=None, kw_only=True)
    version: str | None = field(default=None, kw_only=True)
    """ETag; None if the file may change."""


def _bare(error: Exception) -> Exception:
    """Returns a copy of an error, without its traceback and what caused it; an error
    that no location raises may not be one that can be copied."""
    if isinstance(error, StoreError):
        return copy(error)
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
