"""R13: the connection breaks after N bytes of the server's responses."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from soak import promises
from soak.outcomes import Outcome
from tests.support.restrictions import connect, note_proxy

CUTS = 200
BYTES_APART = 11
"""Distance of the cuts; the responses to a save have some 800 bytes together."""


class CuttingProxy:
    """Forwards connections to an address, and cuts the first after N bytes."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._left: int | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.has_cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, count: int) -> None:
        """Cuts a connection once, after ``count`` more bytes of responses."""
        self.has_cut = False
        self._left = count

    def close(self) -> None:
        """Accepts no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                for source, target, is_answer in (
                    (near, far, False),
                    (far, near, True),
                ):
                    threading.Thread(
                        target=self._pump, args=(source, target, is_answer), daemon=True
                    ).start()

    def _pump(self, source: socket.socket, target: socket.socket, answer: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if answer and self._left is not None:
                    if len(data) >= self._left:
                        target.sendall(data[: self._left])
                        self._left = None
                        self.has_cut = True
                        break
                    self._left -= len(data)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def _proxied(address: str) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(address)
    note_proxy(proxy.address, address)
    try:
        yield proxy
    finally:
        proxy.close()


def lost_replies() -> Outcome:
    """Cuts the connection of a save at many points; the save retries in a new one."""
    outcome = Outcome()
    with (
        promises.served() as server,
        _proxied(server.address) as proxy,
        server.connect() as near,
    ):
        for number in range(CUTS):
            with connect(proxy.address) as client:
                proxy.cut_after(1 + number * BYTES_APART)
                promises.save(client, number)
            lost = promises.losses(near, kept=set(range(number + 1)))
            if not proxy.has_cut:
                break
            outcome.add(f"cut after {1 + number * BYTES_APART} bytes", lost)
    return outcome
