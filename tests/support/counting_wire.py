"""A proxy between a client and a server that counts the server's bytes."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class CountingWire:
    """Forwards connections to a server."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = [self._listening]
        self._threads: list[threading.Thread] = []
        self.received_bytes = 0
        """Bytes that the server sent."""
        self._lock = threading.Lock()
        self._start(self._accept)

    @property
    def address(self) -> str:
        """Address for clients."""
        return f"127.0.0.1:{self._listening.getsockname()[1]}"

    def close(self) -> None:
        """Breaks all connections."""
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(self._target)
                self._ends += [client, server]
                self._start(self._pass_on, client, server)
                self._start(self._pass_on, server, client)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 18):
                if source.getpeername() == self._target:
                    with self._lock:
                        self.received_bytes += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def _start(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()


@contextmanager
def counted(target: str) -> Iterator[CountingWire]:
    """Yields a proxy to a server."""
    wire = CountingWire(target)
    try:
        yield wire
    finally:
        wire.close()
