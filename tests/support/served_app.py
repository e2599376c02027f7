"""An application of ASGI on a real socket, in a thread of this process."""

from collections.abc import Mapping
from types import TracebackType
from typing import Self

import httpx
from starlette.types import ASGIApp

from storesvc_client._http import bound_socket, serve_in_thread

SECONDS = 120.0
"""Maximum time of a request."""


class ServedApp:
    """Serves an application while the context lasts."""

    def __init__(self) -> None:
        """Binds the socket; ``serve`` sets the application."""
        self._socket = bound_socket(0)
        self.port: int = self._socket.getsockname()[1]
        """Port on this machine."""
        self.address = f"http://127.0.0.1:{self.port}"

    def serve(
        self,
        app: ASGIApp,
        *,
        headers: Mapping[str, str],
        cookies: dict[str, str] | None = None,
    ) -> None:
        """Sets the application, and what ``http`` sends with each request."""
        self._serving = serve_in_thread(app, self._socket)
        # to load certificates takes longer than most tests, and none is used
        self.http = httpx.Client(
            base_url=self.address,
            cookies=cookies,
            headers=headers,
            timeout=SECONDS,
            verify=False,
        )

    def __enter__(self) -> Self:
        self._serving.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.http.close()
        self._serving.__exit__(kind, error, traceback)
        self._socket.close()
