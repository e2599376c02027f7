"""A console on a real socket, in a thread of this process."""

from html.parser import HTMLParser
from typing import Any

import httpx

import storesvc_client as store
from storesvc_client.console.app import create_app
from tests.support.served_app import ServedApp

KEY = "key-of-the-tests"


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


class ServedConsole(ServedApp):
    """Serves the console of a store while the context lasts."""

    def __init__(self, client: store.Client, *, name: str = "the store") -> None:
        super().__init__()
        self.serve(
            create_app(client, key=KEY, store=name),
            cookies={self.cookie: KEY},
            headers={"Origin": self.address},
        )

    @property
    def cookie(self) -> str:
        """Name of the cookie with the key."""
        return f"storesvc-console-{self.port}"

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
