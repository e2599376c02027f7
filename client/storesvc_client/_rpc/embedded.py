"""Starts a server inside this process; the only import of the service's code."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from storesvc_client.errors import BY_REASON, InvalidRequestError

if TYPE_CHECKING:
    from storesvc.server.embedded import EmbeddedServer


def start_embedded(root: str, *, timeout: float) -> "EmbeddedServer":
    """Starts a server for the store at a root, which is created if it does not exist.

    Args:
        root: URI of the root.
        timeout: Limit for opening the store, in seconds.

    Raises:
        InvalidRequestError: The root is not a URI of a supported storage, or the
            server's packages are not installed.
        StoreError: The store cannot be opened.
    """
    with _refused(root):
        from storesvc.server.embedded import EmbeddedServer

        return EmbeddedServer(root, timeout=timeout)


def holds_store(root: str, *, timeout: float) -> bool:
    """Returns whether a store exists at a root; creates none.

    Args:
        root: URI of the root.
        timeout: Limit in seconds.

    Raises:
        InvalidRequestError: See ``start_embedded``.
        StoreError: The storage does not answer.
    """
    with _refused(root):
        from storesvc.server import embedded

        return embedded.holds_store(root, timeout=timeout)


@contextmanager
def _refused(root: str) -> Generator[None]:
    """Translates errors of the embedded server to errors of this library."""
    try:
        from storesvc.server.embedded import StartError
    except ModuleNotFoundError as e:
        raise InvalidRequestError(
            f"store {root!r}: an embedded store needs {e.name}; "
            "pip install 'storesvc[server]'"
        ) from e
    try:
        yield
    except StartError as e:
        kind = BY_REASON[e.reason]
        raise kind(str(e), reason=e.reason, metadata=e.metadata) from None
