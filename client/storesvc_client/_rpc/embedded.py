"""The one door to the service: a server inside this process, when asked for."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from storesvc_client.errors import BY_REASON, InvalidRequestError

if TYPE_CHECKING:
    from storesvc.server.embedded import EmbeddedServer


def start_embedded(root: str, *, timeout: float) -> "EmbeddedServer":
    """Returns a started server over the store at a root; one is made where none is.

    Args:
        root: Of the store.
        timeout: Seconds that it may take to open it.

    Raises:
        InvalidRequestError: The root is not a URI of a storage we know, or the
            server's packages are not installed.
        StoreError: The store cannot be opened.
    """
    with _refused(root):
        from storesvc.server.embedded import EmbeddedServer

        return EmbeddedServer(root, timeout=timeout)


def holds_store(root: str, *, timeout: float) -> bool:
    """Returns whether a store is at a root; none is made.

    Args:
        root: Where to look.
        timeout: Seconds that it may take.

    Raises:
        InvalidRequestError: As of ``start_embedded``.
        StoreError: The storage does not answer.
    """
    with _refused(root):
        from storesvc.server import embedded

        return embedded.holds_store(root, timeout=timeout)


@contextmanager
def _refused(root: str) -> Generator[None]:
    """Raises our error for what the service inside refuses, or lacks."""
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
