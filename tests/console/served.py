"""A console on a real socket, in a thread of this process."""

import threading
from html.parser import HTMLParser
from types import TracebackType
from typing import Any, Self

import httpx
import uvicorn

import storesvc_client as store
from storesvc_client._http import bound_socket, configuration
from storesvc_client.console.app import create_app

KEY = "key-of-the-tests"

SECONDS = 120.0


class Elements(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        """All text, in one line."""
        return " ".join(" ".join(self.words).split())


class ServedConsole:
    """Serves the console of a store while the context lasts."""

    def __init__(self, client: store.Client, *, name: str = "the store") -> None:
        self._socket = bound_socket(0)
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        app = create_app(client, key=KEY, store=name)
        self._server = uvicorn.Server(configuration(app))
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), daemon=True
        )
        self.http = httpx.Client(
            base_url=self.address,
            cookies={self.cookie: KEY},
            headers={"Origin": self.address},
            timeout=SECONDS,
        )

    @property
    def cookie(self) -> str:
        """Name of the cookie with the key."""
        return f"storesvc-console-{self._socket.getsockname()[1]}"

    @property
    def entrance(self) -> str:
        """Address that ``storectl console`` prints."""
        return f"{self.address}/?key={KEY}"

    def get(self, path: str) -> httpx.Response:
        """Gets a page, whatever its status."""
        return self.http.get(path)

    def text(self, path: str) -> str:
        """Returns the HTML of a page that exists."""
        response = self.http.get(path)
        assert 200 == response.status_code, response.text
        return response.text

    def words(self, path: str) -> str:
        """Returns the words of a page that exists, in one line."""
        return Elements(self.text(path)).text

    def document(self, path: str) -> Any:
        """Returns the JSON of a page that exists."""
        response = self.http.get(f"{path}{'&' if '?' in path else '?'}json")
        assert 200 == response.status_code, response.text
        return response.json()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join(SECONDS)
        self._socket.close()
