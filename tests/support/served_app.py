"""An application of ASGI on a real socket, in a thread of this process."""

import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import httpx
import uvicorn
from starlette.types import ASGIApp

from storesvc_client._http import bound_socket, configuration

SECONDS = 120.0
"""Maximum time of a request, and of the end."""


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
        self._server = uvicorn.Server(configuration(app))
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), daemon=True
        )
        self.http = httpx.Client(
            base_url=self.address, cookies=cookies, headers=headers, timeout=SECONDS
        )

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
