"""Sends requests of the JSON API, also ones that no client library sends."""

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any, Self, TypeAlias
from urllib.parse import quote, urlencode, urlsplit

import crc32c as crc32c_of

BUCKET = "bucket"
BOUNDARY = "between"
CHUNK = 1 << 18
"""Chunks of a resumable upload are multiples of it."""

Parameter: TypeAlias = str | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A response, received in full."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        """Parsed body."""
        parsed: dict[str, Any] = json.loads(self.body)
        return parsed

    @property
    def generation(self) -> int:
        """Generation of the object in the response."""
        return int(self.document["generation"])


class GcsCalls:
    """A connection to a server, for calls on one bucket."""

    def __init__(self, url: str, *, timeout_seconds: float = 30) -> None:
        address = urlsplit(url).netloc
        self._connection = HTTPConnection(address, timeout=timeout_seconds)
        self.headers: dict[str, str] = {}
        """Headers that are added to every request."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._connection.close()

    def ask(
        self,
        method: str,
        target: str,
        body: Any = b"",
        headers: Mapping[str, str] | None = None,
        /,
        **query: Parameter,
    ) -> Reply:
        """Sends a request, and returns the response."""
        asked = f"{target}?{urlencode(query)}" if query else target
        self._connection.request(
            method, asked, body, {**self.headers, **(headers or {})}
        )
        try:
            got = self._connection.getresponse()
            body = got.read()
        except (HTTPException, OSError):
            # the next request begins a new one
            self._connection.close()
            raise
        lower = {name.lower(): value for name, value in got.getheaders()}
        return Reply(status=got.status, headers=lower, body=body)

    def post(
        self, target: str, document: Mapping[str, Any], **query: Parameter
    ) -> Reply:
        """Sends a document."""
        return self.ask("POST", target, json.dumps(document), **query)

    def upload(self, name: str, data: bytes, **query: Parameter) -> Reply:
        """Uploads an object in one piece."""
        return self.ask("POST", UPLOADS, data, uploadType="media", name=name, **query)

    def upload_with_metadata(
        self,
        name: str,
        data: bytes,
        *,
        newline: str = "\r\n",
        metadata: Mapping[str, Any] | None = None,
        **query: Parameter,
    ) -> Reply:
        """Uploads an object after its metadata, in one request."""
        about = json.dumps({"name": name, **(metadata or {})})
        parts = [
            f"--{BOUNDARY}",
            *("Content-Type: application/json", "", about, f"--{BOUNDARY}"),
            *("Content-Type: text/plain", "", ""),
        ]
        end = f"{newline}--{BOUNDARY}--{newline}"
        body = newline.join(parts).encode() + data + end.encode()
        headers = {"content-type": f'multipart/related; boundary="{BOUNDARY}"'}
        return self.ask("POST", UPLOADS, body, headers, uploadType="multipart", **query)

    def upload_in_chunks(self, name: str, data: bytes, **query: Parameter) -> Reply:
        """Uploads an object in two chunks."""
        begun = self.begin_upload(name, **query)
        middle = min(CHUNK, len(data) // 2 // CHUNK * CHUNK)
        if middle:
            self.send_chunk(begun, data[:middle])
        return self.send_chunk(begun, data[middle:], at=middle, total=len(data))

    def begin_upload(self, name: str, **query: Parameter) -> str:
        """Begins a resumable upload; returns its location."""
        begun = self.ask("POST", UPLOADS, uploadType="resumable", name=name, **query)
        place = urlsplit(begun.headers["location"])
        return f"{place.path}?{place.query}"

    def send_chunk(
        self, place: str, chunk: bytes, *, at: int = 0, total: Parameter = "*"
    ) -> Reply:
        """Sends a chunk; it is the last one if the total is given."""
        sent = f"bytes {at}-{at + len(chunk) - 1}/{total}"
        return self.ask("PUT", place, chunk, {"content-range": sent})

    def ask_progress(self, place: str) -> Reply:
        """Requests the received bytes of a resumable upload."""
        return self.ask("PUT", place, b"", {"content-range": "bytes */*"})

    def about(self, name: str, **query: Parameter) -> Reply:
        """Requests the metadata of an object."""
        return self.ask("GET", place_of(name), **query)

    def read(self, name: str, asked_range: str = "", **query: Parameter) -> Reply:
        """Reads an object, or a range of it."""
        headers = {"range": asked_range} if asked_range else {}
        return self.ask("GET", place_of(name), b"", headers, alt="media", **query)

    def delete(self, name: str, **query: Parameter) -> Reply:
        """Deletes an object."""
        return self.ask("DELETE", place_of(name), **query)

    def list(self, **query: Parameter) -> Reply:
        """Requests a page of names."""
        return self.ask("GET", OBJECTS, **query)

    def delete_in_a_batch(self, *names: str) -> Reply:
        """Deletes objects with one request."""
        parts = "".join(
            f"--{BOUNDARY}\nContent-Type: application/http\n"
            f"Content-ID: <{at}>\n\nDELETE {place_of(name)} HTTP/1.1\n\n\n"
            for at, name in enumerate(names)
        )
        headers = {"content-type": f'multipart/mixed; boundary="{BOUNDARY}"'}
        body = f"{parts}--{BOUNDARY}--\n"
        return self.ask("POST", "/batch/storage/v1", body, headers)


OBJECTS = f"/storage/v1/b/{BUCKET}/o"
UPLOADS = f"/upload{OBJECTS}"


def place_of(name: str) -> str:
    """Returns the path of an object."""
    return f"{OBJECTS}/{quote(name, safe='')}"


def crc32c(data: bytes) -> str:
    """Returns a CRC-32C as in resources, in base64."""
    return base64.b64encode(crc32c_of.crc32c(data).to_bytes(4, "big")).decode()


def md5(data: bytes) -> str:
    """Returns an MD5 as in resources, in base64."""
    return base64.b64encode(hashlib.md5(data).digest()).decode()
