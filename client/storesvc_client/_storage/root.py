"""The root of a store whose files this process reads and writes itself."""

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from storesvc.errors import InvalidFieldError
from storesvc.format.layout import STORE
from storesvc.storage.location import Storage, storage_at
from storesvc_client._rpc.connection import Connection
from storesvc_client._rpc.tls import is_root
from storesvc_client.errors import (
    InvalidRequestError,
    PreconditionError,
    UnavailableError,
)
from storesvc_proto.v1 import bucket_pb2 as pb

if TYPE_CHECKING:
    from storesvc_client._storage.bucket import BucketRoot
    from storesvc_client._storage.lending import LentBucket

Root: TypeAlias = "Path | BucketRoot"
"""A directory, or a prefix in a bucket."""


def direct_root(target: str, direct: object) -> "Root | None":
    """Returns the root whose files a client reads itself; None if it reads none.

    Args:
        target: Target of the connection; if it is a root, it is that one.
        direct: Value of ``direct=``.

    Raises:
        InvalidRequestError: The root cannot be reached from this machine, or packages
            that it needs are not installed.
    """
    if direct is None:
        return _reach_root(storage_at(target)) if is_root(target) else None
    if not isinstance(direct, str):
        raise InvalidRequestError(
            f"direct: expected the root of the store, such as file:///PATH, got "
            f"{direct!r}"
        )
    try:
        root = _reach_root(storage_at(direct))
    except InvalidFieldError as e:
        raise InvalidRequestError(f"direct: {e}") from e
    if root is None:
        raise InvalidRequestError(
            f"direct: expected a root on this machine or in a bucket, got {direct!r}; "
            "connect without direct="
        )
    return root


def lent_bucket(target: str, direct: object, connection: Connection) -> "LentBucket":
    """Returns the bucket that a client reaches with lent credentials only.

    Its record is not read: a lent credential does not permit that. Each credential
    names the root that the server lends for.

    Args:
        target: Target of the connection.
        direct: Value of ``direct=``.
        connection: Connection to the server.

    Raises:
        InvalidRequestError: The target is no server, the root is not in a bucket, or a
            package is missing.
    """
    from storesvc_client._storage.lending import LentBucket

    if is_root(target):
        raise InvalidRequestError(
            "connect: lend_credentials=: expected the address of a server, which "
            f"lends, got the root {target!r}, which this process opens itself; leave "
            "it out"
        )
    return LentBucket.open(direct, connection)


def check_root(root: Root, *, store_uid: str, timeout: float) -> None:
    """Checks that a root is that of the server's store.

    Args:
        root: The root.
        store_uid: Uid of the server's store.
        timeout: Limit for a bucket, in seconds.

    Raises:
        InvalidRequestError: The root is not that of the store.
        PreconditionError: The bucket denies access.
        UnavailableError: The bucket does not answer in time.
    """
    # Imported late: commands that only list checkpoints do not need it.
    from storesvc.format.seal import CorruptRecordError, FormatVersionError, unseal

    data = _record(root, store_uid, timeout)
    try:
        found = unseal(data, pb.StoreRecord, place=STORE).uid
    except (CorruptRecordError, FormatVersionError) as e:
        raise InvalidRequestError(
            f"direct: expected the record of store {store_uid} at {root}/{STORE}: {e}; "
            "connect without direct="
        ) from e
    if found != store_uid:
        raise InvalidRequestError(
            f"direct: expected the root of store {store_uid}, which the server serves, "
            f"got that of store {found} at {root}; give the root of the same store, or "
            "connect without direct="
        )


def _record(root: Root, store_uid: str, timeout: float) -> bytes:
    """Returns the sealed record of the store at a root."""
    expected = (
        f"direct: expected the root of store {store_uid}, which the server serves"
    )
    try:
        found = (
            (root / STORE).read_bytes()
            if isinstance(root, Path)
            else root.read(STORE, timeout=timeout)
        )
    except (PreconditionError, UnavailableError) as e:  # some are OSErrors, too
        raise type(e)(
            f"{expected}: {e}, or connect without direct=", reason=e.reason
        ) from e
    except OSError as e:
        raise InvalidRequestError(
            f"{expected}, cannot read {root}/{STORE}: {e.strerror}; give its root on "
            "this machine, or connect without direct="
        ) from e
    if found is None:
        raise InvalidRequestError(
            f"{expected}, found no {root}/{STORE}; give its root, or connect without "
            "direct="
        )
    return found


def _reach_root(storage: Storage) -> "Root | None":
    """Returns the root of a storage; None if other processes cannot reach it."""
    if storage.is_remote:
        from storesvc_client._storage.bucket import BucketRoot

        return BucketRoot.open(storage)
    path = storage.spec.get("path")
    return None if path is None else Path(path)
