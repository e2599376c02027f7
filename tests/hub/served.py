"""A hub on a real socket, in a thread of this process."""

import threading
from secrets import token_urlsafe
from types import TracebackType
from typing import Self

import httpx
import uvicorn

import storesvc_client as store
from storesvc_client._http import bound_socket, configuration
from storesvc_client._hub.app import create_app
from storesvc_client._hub.snapshots import View

SECONDS = 60.0


class ServedHub:
    """Serves the checkpoints of a store while the context lasts."""

    def __init__(self, client: store.Client, view: View | None = None) -> None:
        self._socket = bound_socket(0)
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.token = token_urlsafe(32)
        app = create_app(client, view or View(), token=self.token)
        self._server = uvicorn.Server(configuration(app))
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), daemon=True
        )
        self.http = httpx.Client(
            base_url=self.address,
            timeout=SECONDS,
            headers={"Authorization": f"Bearer {self.token}"},
        )

    @property
    def port(self) -> int:
        """Port on this machine."""
        port: int = self._socket.getsockname()[1]
        return port

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
