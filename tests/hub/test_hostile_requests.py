"""Whatever arrives at the socket is answered or closed, in bounded time, and the next
request is served."""

import json
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import storesvc_client as store
from storesvc_client import _http
from storesvc_client._hub import streaming
from tests.hub.served import ServedHub
from tests.support.examples import examples

NAME = "prod/llama-8b"
FILE = f"/{NAME}/resolve/best/model.safetensors"
SECONDS = 20

HUGE = st.sampled_from(["0", "-1", "1", str(2**63), str(2**64), "9" * 400, "1e9", "٣"])
PIECE = st.one_of(
    st.sampled_from(
        [
            *("prod", "llama-8b", "resolve", "best", "main", "api", "models", "tree"),
            *("revision", "paths-info", "model.safetensors", "config.json", "."),
            *("..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "%00", "%", "%zz", "%c0%ae"),
            *("refs%2Fpr%2F1", "a" * 9000, "prod%2fllama-8b", "latest", "300", "\\"),
        ]
    ),
    HUGE,
    st.text(max_size=9),
)
PATH = st.lists(PIECE, max_size=8).map("/".join)
RANGE = st.one_of(
    st.builds("bytes={}-{}".format, HUGE, HUGE),
    st.builds("bytes=-{}".format, HUGE),
    st.lists(st.builds("{}-{}".format, HUGE, HUGE), max_size=400).map(
        lambda parts: "bytes=" + ",".join(parts)
    ),
    st.text(max_size=20),
)
HEADER = st.one_of(
    st.tuples(st.just("Range"), RANGE),
    st.tuples(st.just("If-Range"), st.text(max_size=9)),
    st.tuples(st.just("If-None-Match"), st.text(max_size=40)),
    st.tuples(st.just("Content-Length"), HUGE),
    st.tuples(
        st.just("Transfer-Encoding"),
        st.sampled_from(["chunked", "identity", "chunked, chunked", "xchunked", ""]),
    ),
    st.tuples(st.just("Expect"), st.sampled_from(["100-continue", "x"])),
    st.tuples(st.just("Upgrade"), st.sampled_from(["h2c", "websocket"])),
    st.tuples(st.just("Host"), st.sampled_from(["evil.example", "localhost:1", ""])),
    st.tuples(st.text(max_size=12), st.text(max_size=12)),
)
METHOD = st.sampled_from(
    ["GET", "HEAD", "POST", "PUT", "CONNECT", "TRACE", "PRI", "get", "G ET", ""]
)
BODY = st.sampled_from(
    [b"", b"0\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"ffffffffffffffff\r\n", b"\0" * 99]
)


def exchange(hub: ServedHub, data: bytes) -> bytes:
    """Sends bytes, ends, and returns all that comes back."""
    with socket.create_connection(("127.0.0.1", hub.port), SECONDS) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))
        except ConnectionError:
            return b""


def check_answers(answer: bytes) -> None:
    """Checks that an answer is none, or has a status that the hub gives."""
    if not answer:
        return
    version, status, *_ = answer.split(b" ", 2)
    assert version == b"HTTP/1.1"
    assert int(status) < 500, answer[:2000]
    assert b"root:" not in answer
    head, _, body = answer.partition(b"\r\n\r\n")
    if int(status) >= 400 and b"application/json" in head and body:
        document, _ = json.JSONDecoder().raw_decode(body.decode())  # another may follow
        assert "error" in document


def await_status(hub: ServedHub, status: int) -> None:
    """Waits until a request is answered with a status."""
    deadline = time.monotonic() + SECONDS
    while (found := hub.http.head(FILE).status_code) != status:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def check_served(hub: ServedHub) -> None:
    assert 200 == hub.http.head(FILE).status_code


@settings(max_examples=examples(300), deadline=None)
@given(METHOD, PATH, st.lists(HEADER, max_size=5), BODY)
def test_any_request_has_an_answer(
    hub: ServedHub, method: str, path: str, headers: list[tuple[str, str]], body: bytes
) -> None:
    lines = [
        f"{method} /{path} HTTP/1.1",
        "Host: localhost",
        "Connection: close",
        f"Authorization: Bearer {hub.token}",
        *(f"{name}: {value}" for name, value in headers),
    ]
    data = "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogatepass")

    began = time.monotonic()
    check_answers(exchange(hub, data + body))

    assert time.monotonic() - began < SECONDS


@settings(max_examples=examples(100), deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_have_an_answer(hub: ServedHub, data: bytes) -> None:
    check_answers(exchange(hub, data))


@pytest.mark.parametrize(
    "added",
    [
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        "Transfer-Encoding : chunked",
        "Content-Length: +5",
        "Content-Length: 0x5",
        " folded: x",
        "X: a\r\n\tb",
        "X: a\nContent-Length: 40",
    ],
)
def test_a_request_within_a_request_is_not_answered_twice(
    hub: ServedHub, added: str
) -> None:
    """Where a proxy could see another end of the body than the hub does."""
    inner = f"GET /api/models/{NAME} HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = f"POST /api/models/{NAME}/paths-info/best HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Authorization: Bearer {hub.token}\r\n{added}\r\n\r\n"

    answer = exchange(hub, (head + "0\r\n\r\n" + inner).encode())

    assert b'"modelId"' not in answer  # the one within has no token of its own
    check_answers(answer)
    check_served(hub)


def test_headers_that_drip_are_cut_off(
    hub: ServedHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_http, "REQUEST_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", hub.port), SECONDS) as connection:
        connection.settimeout(0.05)
        began = time.monotonic()
        for letter in b"GET / HTTP/1.1\r\nX: " + b"a" * 1000:
            try:
                connection.sendall(bytes([letter]))
                if connection.recv(9) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break

    assert time.monotonic() - began < SECONDS
    check_served(hub)


def test_clients_that_take_no_bytes_are_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "STALL_SECONDS", 0.5)
    idle: list[Any] = []
    with store.connect(tmp_path.as_uri()) as client:
        run = client.run(NAME)
        run.save(1, {"w": np.zeros(64 << 20, np.uint8)}).result()
        file = f"/{NAME}/resolve/main/model.safetensors"
        with ServedHub(client) as hub:
            for _ in range(8):  # more than are read at a time
                connection = socket.socket()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
                connection.connect(("127.0.0.1", hub.port))
                head = f"GET {file} HTTP/1.1\r\nHost: localhost\r\n"
                head += f"Authorization: Bearer {hub.token}\r\n\r\n"
                connection.sendall(head.encode())
                idle.append(connection)
            time.sleep(0.5)

            assert (64 << 20) < len(hub.http.get(file).content)
            deadline = time.monotonic() + SECONDS
            while [*run.holds.list()] and time.monotonic() < deadline:
                time.sleep(0.1)
            assert [] == [*run.holds.list()]
            for connection in idle:
                connection.close()


def test_connections_are_limited(
    hub: ServedHub, opened: store.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_http, "MAX_CONNECTIONS", 5)
    with ServedHub(opened) as limited:
        idle = [
            socket.create_connection(("127.0.0.1", limited.port), SECONDS)
            for _ in range(5)
        ]
        await_status(limited, 503)  # once the server has accepted them
        for connection in idle:
            connection.close()
        await_status(limited, 200)
    check_served(hub)
