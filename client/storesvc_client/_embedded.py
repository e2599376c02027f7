"""The one door to the service: a server inside this process, when asked for."""

from typing import TYPE_CHECKING

from storesvc_client.errors import BY_REASON, InvalidRequestError

if TYPE_CHECKING:
    from storesvc.embedded import EmbeddedServer


def start_embedded(root: str) -> "EmbeddedServer":
    """Returns a started server over the store at a root.

    Raises:
        InvalidRequestError: The root is not a URI of a storage we know, or the
            server's packages are not installed.
        StoreError: The store cannot be opened.
    """
    try:
        from storesvc.embedded import EmbeddedServer, StartError
    except ModuleNotFoundError as e:
        raise InvalidRequestError(
            f"store {root!r}: an embedded store needs {e.name}; "
            "pip install 'storesvc[server]'"
        ) from e
    try:
        return EmbeddedServer(root)
    except StartError as e:
        raise BY_REASON[e.reason](str(e), reason=e.reason, metadata=e.metadata) from e
