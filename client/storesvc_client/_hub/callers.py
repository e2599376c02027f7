"""Identities of the requests: whose client of the store reads for each of them.

``storectl hub`` has one client, and a token of its own, which requests must have.
In a server, the token of a request is passed on: the server authenticates it at
each call, and decides, counts and records as for callers of gRPC. Clients are kept, as
connecting takes longer than a small file.
"""

import hmac
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, Protocol

from storesvc_client import Client, UnauthenticatedError, connect
from storesvc_client._hub.snapshots import Snapshots, View

_KEPT: Final = 16
"""Clients that are kept without a request."""

_POOL_BYTES: Final = 128 << 20
"""Memory that a client keeps for its next read."""


class Callers(Protocol):
    """Finds what the caller of a request reads; threads may share it."""

    def open(self, token: str) -> Snapshots:
        """Returns what a caller reads, until ``release``.

        Args:
            token: The bearer token; "" if the request has none.

        Raises:
            UnauthenticatedError: The token is not valid, or one is required.
            StoreError: The store does not answer.
        """

    def release(self, token: str) -> None:
        """Ends a request that ``open`` began."""


class TokenHolders(Callers):
    """All who have one token read as one client."""

    def __init__(self, client: Client, view: View, *, token: str) -> None:
        self._snapshots = Snapshots(client, view)
        self._token = token.encode()

    def open(self, token: str) -> Snapshots:
        if not hmac.compare_digest(token.encode(), self._token):
            raise UnauthenticatedError(
                "expected the token of this hub; set HF_TOKEN as storectl hub prints it"
            )
        return self._snapshots

    def release(self, token: str) -> None:
        """Does nothing: the client stays open."""


@dataclass(slots=True, eq=False)
class _Caller:
    client: Client
    snapshots: Snapshots
    requests: int = 0
    """Requests in flight."""


class ServerCallers(Callers):
    """Each caller reads by its own token."""

    def __init__(self, address: str, view: View) -> None:
        """Connects to nothing yet.

        Args:
            address: Address of the server.
            view: What makes files of a checkpoint.
        """
        self._address, self._view = address, view
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Caller] = OrderedDict()

    def open(self, token: str) -> Snapshots:
        with self._lock:
            if (known := self._begin(token)) is not None:
                return known
        # a token that the server rejects fails here, and displaces no other client
        client = connect(
            self._address, token=token or None, restore_pool_bytes=_POOL_BYTES
        )
        with self._lock:
            if (known := self._begin(token)) is None:
                snapshots = Snapshots(client, self._view)
                self._known[token] = _Caller(client, snapshots, requests=1)
                return snapshots
        client.close()
        return known

    def _begin(self, token: str) -> Snapshots | None:
        if (caller := self._known.get(token)) is None:
            return None
        caller.requests += 1
        self._known.move_to_end(token)
        return caller.snapshots

    def release(self, token: str) -> None:
        with self._lock:
            self._known[token].requests -= 1
            idle = [each for each, c in self._known.items() if not c.requests]
            left_out = [self._known.pop(each) for each in idle[:-_KEPT]]
        for caller in left_out:
            caller.client.close()

    def close(self) -> None:
        """Closes all clients; no request is in flight."""
        for caller in self._known.values():
            caller.client.close()
