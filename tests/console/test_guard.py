"""The console lets its user in and no other site, and restricts what pages may do."""

import http.client
import socket

import httpx
import pytest

import storesvc_client as store
from storesvc_client import _http as server
from tests.console.served import KEY, ServedConsole


@pytest.mark.slow
def test_the_printed_address_lets_a_browser_in(console: ServedConsole) -> None:
    with httpx.Client(base_url=console.address, verify=False) as browser:
        first = browser.get(f"/?key={KEY}")
        then = browser.get("/")

    assert 303 == first.status_code
    assert "/" == first.headers["location"]  # no history keeps the key
    assert "HttpOnly" in first.headers["set-cookie"]
    assert "SameSite=lax" in first.headers["set-cookie"]
    assert 200 == then.status_code


@pytest.mark.parametrize(
    "path", ["//evil.example", "///evil.example", "/\\evil.example"]
)
def test_an_address_with_the_key_leads_to_no_other_host(
    console: ServedConsole, path: str
) -> None:
    host, port = console.address.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port))
    connection.request("GET", f"{path}?key={KEY}")
    response = connection.getresponse()
    connection.close()

    assert 303 == response.status
    assert "/evil.example" == (response.headers["location"] or "").replace("%5C", "")


@pytest.mark.slow
def test_a_request_that_does_not_arrive_is_not_waited_for(
    seeded: store.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.2)
    with ServedConsole(seeded) as console:
        host, port = console.address.removeprefix("http://").split(":")
        form = (
            f"POST /change/pin HTTP/1.1\r\nHost: {host}:{port}\r\n"
            f"Origin: {console.address}\r\nCookie: {console.cookie}={KEY}\r\n"
            "Content-Length: 10\r\n\r\na=b"
        )
        for half in ("", "GET / HTTP/1.1\r\nHost: localhost\r\n", form):
            with socket.create_connection((host, int(port)), 5) as opened:
                opened.sendall(half.encode())
                assert b"" == opened.recv(1)


@pytest.mark.parametrize("query", ["", "?key=", "?key=wrong", f"?key={KEY}x"])
def test_another_user_of_the_machine_is_rejected(
    console: ServedConsole, query: str
) -> None:
    response = httpx.get(f"{console.address}/{query}", verify=False)

    assert 403 == response.status_code
    assert "storectl console" in response.text
    assert "llama" not in response.text
    assert KEY not in response.text


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", ""],
)
def test_a_name_of_another_site_is_rejected(console: ServedConsole, host: str) -> None:
    response = console.http.get("/", headers={"Host": host})

    assert response.status_code in (400, 403)  # 400: uvicorn itself
    assert "llama" not in response.text


def test_a_name_of_another_site_is_rejected_at_the_port_of_the_console(
    console: ServedConsole,
) -> None:
    """As after DNS rebinding: the browser would send the cookie of that name."""
    port = console.address.rpartition(":")[2]
    response = httpx.get(
        console.address,
        headers={"Host": f"evil.example:{port}"},
        cookies={f"storesvc-console-{port}": KEY},
        verify=False,
    )

    assert 403 == response.status_code
    assert "expected the name of this machine" in response.text


@pytest.mark.parametrize("host", ["localhost", "[::1]", "127.0.0.1"])
def test_the_names_of_this_machine_are_accepted(
    console: ServedConsole, host: str
) -> None:
    port = console.address.rpartition(":")[2]
    cookies = {f"storesvc-console-{port}": KEY}

    response = httpx.get(
        console.address,
        headers={"Host": f"{host}:{port}"},
        cookies=cookies,
        verify=False,
    )

    assert 200 == response.status_code


@pytest.mark.parametrize(
    "path", ["/", "/r/prod/llama-8b", "/nothing", "/static/console.css", "/static/no"]
)
def test_every_response_has_the_security_headers(
    console: ServedConsole, path: str
) -> None:
    headers = console.get(path).headers

    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert "nosniff" == headers["x-content-type-options"]
    assert "same-origin" == headers["cross-origin-resource-policy"]
    assert "same-origin" == headers["referrer-policy"]


def test_a_rejection_has_the_security_headers_too(console: ServedConsole) -> None:
    headers = httpx.get(console.address, verify=False).headers

    assert "default-src 'none'" in headers["content-security-policy"]


def test_pages_are_not_stored_and_assets_are(console: ServedConsole) -> None:
    assert "no-store" == console.get("/").headers["cache-control"]
    assert "immutable" in console.get("/static/console.css").headers["cache-control"]


@pytest.mark.parametrize("origin", [None, "null", "http://evil.example", ""])
def test_a_change_of_another_site_is_rejected(
    console: ServedConsole, seeded: store.Client, origin: str | None
) -> None:
    token = _token(console)
    headers = {} if origin is None else {"Origin": origin}

    response = httpx.post(
        f"{console.address}/change/unpin",
        headers=headers,
        cookies={console.cookie: KEY},
        data={"run": "prod/llama-8b", "step": "300", "token": token},
        verify=False,
    )

    assert 403 == response.status_code
    assert seeded.run("prod/llama-8b").checkpoint(300).pinned


@pytest.mark.parametrize("token", ["", "wrong", KEY])
def test_a_form_without_its_token_is_rejected(
    console: ServedConsole, seeded: store.Client, token: str
) -> None:
    response = console.http.post(
        "/change/unpin", data={"run": "prod/llama-8b", "step": "300", "token": token}
    )

    assert 403 == response.status_code
    assert seeded.run("prod/llama-8b").checkpoint(300).pinned


def test_a_change_without_the_cookie_is_rejected(console: ServedConsole) -> None:
    response = httpx.post(
        f"{console.address}/change/unpin?key={KEY}",
        headers={"Origin": console.address},
        data={"run": "prod/llama-8b", "step": "300", "token": _token(console)},
        verify=False,
    )

    assert 403 == response.status_code


def test_a_form_that_is_too_large_is_rejected(console: ServedConsole) -> None:
    response = console.http.post("/change/pin", data={"run": "x" * 100_000})

    assert 413 == response.status_code


def test_a_question_changes_nothing(
    console: ServedConsole, seeded: store.Client
) -> None:
    console.text("/change/unpin?run=prod/llama-8b&step=300")

    assert seeded.run("prod/llama-8b").checkpoint(300).pinned


@pytest.mark.slow
def test_no_page_shows_the_key(console: ServedConsole) -> None:
    for path in ("/", "/me", "/help", "/change/pin?run=prod/llama-8b&step=300"):
        assert KEY not in console.text(path)


def _token(console: ServedConsole) -> str:
    html = console.text("/change/pin?run=prod/llama-8b&step=300")
    return html.partition('name="token" value="')[2].partition('"')[0]
