"""The application: the part of the Hub's API that clients read models with.

>>> app = create_app(TokenHolders(client, View(rules=rules), token="secret"))

Source of the API: the requests that ``huggingface_hub`` 2.4 makes. Errors have the
headers X-Error-Code and X-Error-Message, from which it makes its exceptions. Nothing is
changed by any request, and no name of a request is ever a path: files are looked up
among those that the checkpoint has.
"""

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from storesvc_client import NotFoundError, StoreError, UnauthenticatedError
from storesvc_client._http import http_status, is_loopback
from storesvc_client._hub.callers import Callers
from storesvc_client._hub.ranges import has_tag, parse_range
from storesvc_client._hub.served_files import ServedFile
from storesvc_client._hub.snapshots import Snapshot, Snapshots
from storesvc_client._hub.streaming import StreamedResponse

_SLOTS: Final = 4
"""Files that are read at a time; other requests for bytes wait."""

_FORM_BYTES: Final = 1 << 20
"""Maximum size of the body of a request."""

_MAX_PATHS: Final = 1000
"""Maximum of paths in a request."""

_MESSAGE_LETTERS: Final = 500
"""Maximum length of a message in a header."""

_REVISION_REASONS: Final = frozenset(
    {"CHECKPOINT_NOT_FOUND", "CHECKPOINT_DELETED", "TAG_NOT_FOUND"}
)

_log = logging.getLogger("storesvc_client")


def create_app(callers: Callers, *, is_local: bool = True) -> ASGIApp:
    """Returns the hub as an ASGI application.

    Args:
        callers: Finds what the caller of a request reads, by its token.
        is_local: True if only this machine can connect: requests must name it.
    """
    hub = _Hub()
    model = "/api/models/{namespace}/{run}"
    file = "/{namespace}/{run}/resolve/{revision}/{file:path}"
    app = Starlette(
        routes=[
            Route(model, hub.show_model),
            Route(f"{model}/revision/{{revision}}", hub.show_model),
            Route(f"{model}/tree/{{revision}}", hub.list_files),
            Route(f"{model}/tree/{{revision}}/{{path:path}}", hub.list_files),
            Route(f"{model}/paths-info/{{revision}}", hub.list_paths, methods=["POST"]),
            Route(file, hub.send_file),
        ],
        exception_handlers={
            StoreError: _answer_store_error,
            HTTPException: _answer_http_error,
            Exception: _answer_defect,
        },
    )
    return _Guard(app, callers, is_local=is_local)


class _Guard:
    """Lets requests pass of callers that are known; other sites cannot make a browser
    of this machine read for them."""

    def __init__(self, app: ASGIApp, callers: Callers, *, is_local: bool) -> None:
        self._app = app
        self._callers = callers
        self._is_local = is_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or passes it on with what its caller reads."""
        request = Request(scope)
        if self._is_local and not is_loopback(request.headers.get("host", "")):
            message = "expected the name of this machine as the host"
            await _make_error(403, "", message)(scope, receive, send)
            return
        try:
            token = _parse_bearer(request.headers.getlist("authorization"))
            snapshots = await run_in_threadpool(self._callers.open, token)
        except StoreError as e:
            await _answer_store_error(request, e)(scope, receive, send)
            return
        try:
            request.state.snapshots = snapshots
            await self._app(scope, receive, send)
        finally:
            self._callers.release(token)


def _parse_bearer(given: Sequence[str]) -> str:
    """Returns the token of the Authorization headers; "" without any."""
    if not given:
        return ""
    scheme, _, token = given[0].partition(" ")
    if len(given) > 1 or scheme.lower() != "bearer" or not token.strip():
        raise UnauthenticatedError(
            "authorization: expected one bearer token, got another text; set HF_TOKEN"
        )
    return token.strip()


class _Hub:
    """State that all requests share."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(_SLOTS)

    def show_model(self, request: Request) -> Response:
        """Returns what the Hub says about a repository."""
        found = self._find(request)
        name, with_sizes = found.checkpoint.run, "blobs" in request.query_params
        siblings = [
            {"rfilename": file.name}
            | ({"size": file.size_bytes, "blobId": file.tag} if with_sizes else {})
            for file in found.files.values()
        ]
        created = found.checkpoint.create_time.isoformat(timespec="milliseconds")
        moment = created.replace("+00:00", "Z")
        document = {
            "_id": found.checkpoint.uid,
            "id": name,
            "modelId": name,
            "author": name.partition("/")[0],
            "sha": found.commit,
            "createdAt": moment,
            "lastModified": moment,
            "private": True,
            "gated": False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": ["safetensors"],
            "siblings": siblings,
        }
        return JSONResponse(document, headers=_commit_header(found))

    def list_files(self, request: Request) -> Response:
        """Returns the files of a repository, all of which are in its root."""
        found = self._find(request)
        if path := request.path_params.get("path", "").strip("/"):
            return _make_missing_entry(found, path)
        entries = [_describe_file(file) for file in found.files.values()]
        return JSONResponse(entries, headers=_commit_header(found))

    async def list_paths(self, request: Request) -> Response:
        """Returns those files that a form names."""
        paths = await _read_paths(request)
        found = await run_in_threadpool(self._find, request)
        files = [
            found.files[path] for path in dict.fromkeys(paths) if path in found.files
        ]
        return JSONResponse(
            [*map(_describe_file, files)], headers=_commit_header(found)
        )

    async def send_file(self, request: Request) -> Response:
        """Returns bytes of a file, or only its headers."""
        found = await run_in_threadpool(self._find, request)
        name = request.path_params["file"]
        if name not in found.files:
            return _make_missing_entry(found, name)
        file = found.files[name]
        size, tag = file.size_bytes, f'"{file.tag}"'
        headers = {
            "Accept-Ranges": "bytes",
            "Cache-Control": "no-cache",
            "Content-Type": "application/octet-stream",
            "ETag": tag,
            **_commit_header(found),
        }
        if has_tag(request.headers.get("if-none-match", ""), file.tag):
            return Response(None, 304, headers)
        if request.method == "HEAD":
            return Response(None, 200, headers | {"Content-Length": str(size)})
        wanted = request.headers.get("range", "")
        if request.headers.get("if-range", tag) != tag:
            wanted = ""
        if (byte_range := parse_range(wanted, size)) is None:
            headers |= {"Content-Range": f"bytes */{size}"}
            message = (
                f"{found.reader.name} {name}: expected a range of its {size} bytes, "
                f"got {wanted!r}; ask for bytes before its end"
            )
            return _make_error(416, "", message, headers)
        status, (start, stop) = 200, byte_range
        if stop - start < size:
            status = 206
            headers |= {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}
        headers["Content-Length"] = str(stop - start)
        what = f"{found.reader.name} {name} bytes {start}-{stop} of {size}"
        _log.info("%s: is served", what)
        return StreamedResponse(
            found.read(file, start, stop),
            status=status,
            headers=headers,
            slots=self._slots,
            what=what,
        )

    def _find(self, request: Request) -> Snapshot:
        given = request.path_params
        repository = f"{given['namespace']}/{given['run']}"
        snapshots: Snapshots = request.state.snapshots
        return snapshots.find(repository, given.get("revision", "main"))


def _describe_file(file: ServedFile) -> dict[str, Any]:
    return {
        "type": "file",
        "path": file.name,
        "size": file.size_bytes,
        "oid": file.tag,
    }


def _commit_header(found: Snapshot) -> dict[str, str]:
    return {"X-Repo-Commit": found.commit}


async def _read_paths(request: Request) -> Sequence[str]:
    """Returns the paths of a form."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _FORM_BYTES:
            raise HTTPException(413, f"expected at most {_FORM_BYTES} bytes, got more")
    try:
        fields = parse_qsl(body.decode(), max_num_fields=_MAX_PATHS)
    except ValueError as e:
        raise HTTPException(400, f"expected a form of paths, got {e}") from e
    return [value for name, value in fields if name == "paths"]


def _make_error(
    status: int, code: str, message: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns an error as ``huggingface_hub`` understands it."""
    line = " ".join(message.encode("ascii", "replace").decode().split())
    given = {"X-Error-Message": line[:_MESSAGE_LETTERS], **(headers or {})}
    if code:
        given["X-Error-Code"] = code
    given.pop("Content-Type", None)
    return JSONResponse({"error": message}, status, given)


def _make_missing_entry(found: Snapshot, path: str) -> Response:
    message = f"{found.reader.name} has no file {path[:_MESSAGE_LETTERS]!r}"
    return _make_error(404, "EntryNotFound", message, _commit_header(found))


def _answer_store_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, StoreError)
    code, status = "", http_status(error)
    if isinstance(error, NotFoundError):
        code = "RepoNotFound" if error.reason == "RUN_NOT_FOUND" else "EntryNotFound"
        if error.reason in _REVISION_REASONS:
            code = "RevisionNotFound"
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    # callers of a server cannot connect to the socket by which its hub reads
    message = re.sub(r"\bstore unix:[^\s:]+", "this store", str(error))
    return _make_error(status, code, message, headers)


def _answer_http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message, code = error.detail, ""
    if error.status_code == 404:
        # such as a repository without a namespace
        message, code = "the hub of storesvc has no such address", "RepoNotFound"
    return _make_error(error.status_code, code, message, error.headers)


def _answer_defect(request: Request, error: Exception) -> Response:
    _log.error("hub: %s failed", request.url.path[:_MESSAGE_LETTERS], exc_info=error)
    return _make_error(500, "", "the hub failed; its log has the cause")
