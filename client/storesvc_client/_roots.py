"""Roots: where a client finds the files of a store by itself."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from storesvc.format.layout import STORE
from storesvc_client.errors import InvalidRequestError
from storesvc_proto.v1 import bucket_pb2 as pb


def direct_root(target: str, direct: object) -> Path | None:
    """Returns the directory whose files a client reads by itself; None: it reads none.

    Args:
        target: What it connects to: a directory implies itself.
        direct: What it was given beside it.

    Raises:
        InvalidRequestError: It is no directory.
    """
    if direct is None:
        return _directory(target)
    root = _directory(direct) if isinstance(direct, str) else None
    if root is None:
        raise InvalidRequestError(
            f"direct: expected file:///PATH, the root of the store, got {direct!r}; "
            "stores in buckets are read through their server as yet, without direct="
        )
    return root


def check_root(root: Path, *, store_uid: str) -> None:
    """Refuses a directory that is not the root of the store of a server.

    Raises:
        InvalidRequestError: It is not.
    """
    # Late, as all that only some need: lists of checkpoints read no file.
    from storesvc.format.seal import CorruptRecordError, FormatVersionError, unseal

    place = root / STORE
    try:
        found = unseal(place.read_bytes(), pb.StoreRecord).uid
    except OSError as e:
        raise InvalidRequestError(
            f"direct: expected the root of store {store_uid}, which the server serves, "
            f"cannot read {place}: {e.strerror}; give its root on this machine, or "
            "leave direct= out"
        ) from e
    except (CorruptRecordError, FormatVersionError) as e:
        raise InvalidRequestError(
            f"direct: expected the record of store {store_uid} at {place}: {e}; leave "
            "direct= out"
        ) from e
    if found != store_uid:
        raise InvalidRequestError(
            f"direct: expected the root of store {store_uid}, which the server serves, "
            f"got that of store {found} at {root}; give the root of the same store, or "
            "leave direct= out"
        )


def _directory(uri: str) -> Path | None:
    """The directory that a URI means; None where it means none."""
    url = urlsplit(uri)
    is_directory = url.scheme == "file" and not url.netloc and url.path.startswith("/")
    return Path(unquote(url.path)) if is_directory else None
