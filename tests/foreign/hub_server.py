"""A Hugging Face Hub on loopback, for tests: the part of its HTTP API that reads
repositories, and the storage that it redirects large files to.

It answers as the Hub does: names by pages, sizes, revisions, ranges of files, errors
with ``X-Error-Code``; without a token, the status is 401 for a private repository and
for one that does not exist. The storage is another server (port), to which no token may
be sent.

>>> with serving() as hub:  # doctest: +SKIP
...     hub.commit("org/model", {"config.json": b"{}"})
...     hub.url  # HF_ENDPOINT
"""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, quote, unquote, urlsplit

PAGE: Final = 3
"""Names in a page of a list; 1000 at the Hub."""

LARGE_BYTES: Final = 1000
"""Files of this size are in the other storage."""

_API: Final = re.compile(
    r"/api/(?P<kind>models|datasets|spaces)/(?P<name>[^/]+/[^/]+)"
    r"(?:/(?P<call>revision|tree|paths-info)/(?P<revision>[^/]+)(?:/(?P<path>.*))?)?"
)
_FILE: Final = re.compile(
    r"/(?:(?P<kind>datasets|spaces)/)?(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.*)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that was answered."""

    server: str
    """``hub`` or ``storage``."""
    method: str
    path: str
    status: int
    body_bytes: int
    """Bytes of the answer that were sent."""
    authorization: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong with requests of some paths."""

    pattern: str
    """Regex of the path."""
    status: int = 200
    """Status of the answer; 200: its second half is not sent."""
    is_honest: bool = False
    """Whether the announced length is that of the half that is sent."""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Repository:
    """Commits, and the branches that name some of them."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    """Token that may read it; None: it is public."""
    is_gated: bool = False
    """Whether only its names may be read."""


class Hub:
    """The two servers; what they answered is in ``requests``."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        """Each is used once, by the first request that fits."""
        self.on_request: Callable[[str], object] = lambda path: None
        """Runs before a request is answered."""
        self._lock = threading.Lock()
        self._api = ThreadingHTTPServer(("127.0.0.1", 0), self._handler("hub"))
        self._storage = ThreadingHTTPServer(("127.0.0.1", 0), self._handler("storage"))
        self.url = f"http://127.0.0.1:{self._api.server_port}"
        self._storage_url = f"http://127.0.0.1:{self._storage.server_port}"

    def commit(
        self, name: str, files: Mapping[str, bytes], *, branch: str = "main"
    ) -> str:
        """Adds a commit with these files to a branch; returns its id."""
        repository = self.repositories.setdefault(name, Repository())
        text = f"{len(repository.commits)} {sorted(files.items())}"
        sha = hashlib.sha1(text.encode()).hexdigest()
        repository.commits[sha] = dict(files)
        repository.branches[branch] = sha
        return sha

    def read_bytes(self, pattern: str) -> int:
        """Returns the bytes sent in answers for paths that a regex finds."""
        return sum(
            each.body_bytes for each in self.requests if re.search(pattern, each.path)
        )

    def authorizations(self) -> dict[str, set[str | None]]:
        """Returns what requests to each server had as authorization."""
        sent: dict[str, set[str | None]] = {"hub": set(), "storage": set()}
        for request in self.requests:
            sent[request.server].add(request.authorization)
        return sent

    @contextmanager
    def running(self) -> Iterator[None]:
        """Serves until the block ends."""
        servers = (self._api, self._storage)
        for each in servers:
            serve = partial(each.serve_forever, poll_interval=0.01)
            threading.Thread(target=serve, daemon=True).start()
        try:
            yield
        finally:
            for each in servers:
                each.shutdown()
                each.server_close()

    def _handler(self, server: str) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(_Handler):
            def _answer(self) -> "_Answer":
                hub.on_request(self.path)
                if server == "storage":
                    return hub._stored(self.path, self.headers.get("Range"))
                token = (self.headers.get("Authorization") or "").removeprefix(
                    "Bearer "
                )
                length = int(self.headers.get("Content-Length") or 0)
                form = parse_qs(self.rfile.read(length).decode())
                return hub._called(self.path, token, self.headers.get("Range"), form)

            def _fault(self) -> Fault | None:
                with hub._lock:
                    for each in hub.faults:
                        if re.search(each.pattern, self.path):
                            hub.faults.remove(each)
                            return each
                return None

            def _record(self, status: int, body_bytes: int) -> None:
                with hub._lock:
                    hub.requests.append(
                        Request(
                            server=server,
                            method=self.command,
                            path=self.path,
                            status=status,
                            body_bytes=body_bytes,
                            authorization=self.headers.get("Authorization"),
                        )
                    )

        return Handler

    def _called(
        self, path: str, token: str, span: str | None, form: Mapping[str, list[str]]
    ) -> "_Answer":
        """Answers a request to the Hub."""
        parts = urlsplit(path)
        match = _API.fullmatch(parts.path) or _FILE.fullmatch(parts.path)
        if match is None:
            return _error(404, "", "Not found")
        found = match.groupdict()
        kind = found["kind"] or "models"
        name = found["name"] if kind == "models" else f"{kind}/{found['name']}"
        repository = self.repositories.get(name)
        if repository is None or repository.token not in (None, token):
            if token:
                return _error(404, "RepoNotFound", "Repository not found")
            return _error(401, "", "Invalid username or password.")
        revision = unquote(found["revision"] or "main")
        sha = repository.branches.get(revision, revision)
        files = repository.commits.get(sha)
        if files is None:
            return _error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        inside = unquote(found["path"] or "")
        if "call" not in found:
            if repository.is_gated:
                return _error(403, "GatedRepo", "Access to this model is restricted.")
            return self._file(files, inside, sha, span)
        match found["call"]:
            case "tree":
                return self._tree(files, inside, parts.path, parse_qs(parts.query))
            case "paths-info":
                rows = [
                    _row(each, files[each]) for each in form["paths"] if each in files
                ]
                return _json(rows)
            case _:
                info = {"_id": "1", "id": found["name"], "modelId": found["name"]}
                return _json(
                    {
                        **info,
                        "sha": sha,
                        "private": repository.token is not None,
                        "tags": [],
                        "downloads": 0,
                        "likes": 0,
                        "siblings": [{"rfilename": each} for each in files],
                    }
                )

    def _tree(
        self,
        files: Mapping[str, bytes],
        folder: str,
        path: str,
        query: Mapping[str, list[str]],
    ) -> "_Answer":
        """Answers with a page of the names in a folder."""
        start = f"{folder}/" if folder else ""
        rows: dict[str, Any] = {}
        for name in sorted(files):
            if name.startswith(start):
                first, slash, _ = name.removeprefix(start).partition("/")
                row = _row(name, files[name])
                if slash:
                    oid = hashlib.sha1(first.encode()).hexdigest()
                    row = {"type": "directory", "oid": oid, "size": 0}
                rows[start + first] = {**row, "path": start + first}
        if not rows:
            return _error(404, "EntryNotFound", f"{folder} does not exist")
        skipped = int(query.get("cursor", ["0"])[0])
        page = list(rows.values())[skipped : skipped + PAGE]
        more = f"{self.url}{path}?cursor={skipped + PAGE}"
        link = {"Link": f'<{more}>; rel="next"'} if skipped + PAGE < len(rows) else {}
        return _json(page, link)

    def _file(
        self, files: Mapping[str, bytes], path: str, sha: str, span: str | None
    ) -> "_Answer":
        """Answers with a range of a file, or the address of a large one."""
        data = files.get(path)
        if data is None:
            return _error(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": sha, "ETag": f'"{_oid(data)}"'}
        if len(data) < LARGE_BYTES:
            return _span(data, span, headers)
        oid = hashlib.sha256(data).hexdigest()
        linked = {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{oid}"'}
        where = f"{self._storage_url}/{oid}?signature=x&file={quote(path, safe='')}"
        return _Answer(302, b"", {**headers, **linked, "Location": where})

    def _stored(self, path: str, span: str | None) -> "_Answer":
        """Answers a request to the storage of large files."""
        wanted = urlsplit(path).path.removeprefix("/")
        for repository in self.repositories.values():
            for files in repository.commits.values():
                for data in files.values():
                    if hashlib.sha256(data).hexdigest() == wanted:
                        return _span(data, span, {"ETag": f'"{wanted}"'})
        return _error(404, "", "Not found")


@contextmanager
def serving() -> Iterator[Hub]:
    """Yields a Hub that serves until the block ends."""
    hub = Hub()
    with hub.running():
        yield hub


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes
    headers: Mapping[str, str]


class _Handler(BaseHTTPRequestHandler):
    """Sends what ``_answer`` returns, and logs nothing on the terminal."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body after its headers would wait 40 ms

    def _answer(self) -> _Answer:
        raise NotImplementedError

    def _fault(self) -> Fault | None:
        raise NotImplementedError

    def _record(self, status: int, body_bytes: int) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        answer, is_cut = self._answer(), False
        fault = self._fault()
        if fault is not None and fault.status == 200:
            is_cut = not fault.is_honest
            if fault.is_honest:
                half = answer.body[: len(answer.body) // 2]
                answer = replace(answer, body=half)
        elif fault is not None:
            answer = _error(fault.status, "", "Fault of a test", fault.headers)
        body = b"" if self.command == "HEAD" else answer.body
        sent = body[: len(body) // 2] if is_cut else body
        self._record(answer.status, len(sent))  # before the client goes on
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(sent)
        self.close_connection = self.close_connection or is_cut

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *arguments: object) -> None:
        """Logs nothing."""


def _row(path: str, data: bytes) -> dict[str, Any]:
    row = {"type": "file", "oid": _oid(data), "size": len(data), "path": path}
    if len(data) >= LARGE_BYTES:
        oid = hashlib.sha256(data).hexdigest()
        row["lfs"] = {"oid": oid, "size": len(data), "pointerSize": 130}
    return row


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _json(value: Any, headers: Mapping[str, str] | None = None) -> _Answer:
    kind = {"Content-Type": "application/json"}
    return _Answer(200, json.dumps(value).encode(), {**kind, **(headers or {})})


def _error(
    status: int, code: str, message: str, headers: Mapping[str, str] | None = None
) -> _Answer:
    named = {"X-Error-Code": code} if code else {}
    said = {"Content-Type": "application/json", "X-Error-Message": message}
    body = json.dumps({"error": message}).encode()
    return _Answer(status, body, {**named, **said, **(headers or {})})


def _span(data: bytes, span: str | None, headers: Mapping[str, str]) -> _Answer:
    """Answers with a range of some bytes."""
    general = {**headers, "Accept-Ranges": "bytes"}
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", span or "")
    if match is None:
        return _Answer(200, data, general)
    start = int(match[1])
    stop = min(len(data), int(match[2]) + 1 if match[2] else len(data))
    if start >= len(data):
        return _Answer(416, b"", {**general, "Content-Range": f"bytes */{len(data)}"})
    which = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
    return _Answer(206, data[start:stop], {**general, **which})
