"""Roots: where a client finds the files of a store by itself."""

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from storesvc.errors import InvalidFieldError
from storesvc.format.layout import STORE
from storesvc.storage.location import Storage, storage_at
from storesvc_client._rpc.target import is_root
from storesvc_client.errors import (
    InvalidRequestError,
    PreconditionError,
    UnavailableError,
)
from storesvc_proto.v1 import bucket_pb2 as pb

if TYPE_CHECKING:
    from storesvc_client._storage.bucket import BucketRoot

Root: TypeAlias = "Path | BucketRoot"
"""A directory, or a place in a bucket."""


def direct_root(target: str, direct: object) -> "Root | None":
    """Returns the root whose files a client reads by itself; None: it reads none.

    Args:
        target: What it connects to: a root implies itself.
        direct: What it was given beside it.

    Raises:
        InvalidRequestError: It is no root that can be reached from here, or the
            packages that speak to it are not installed.
    """
    if direct is None:
        return _reached(storage_at(target)) if is_root(target) else None
    if not isinstance(direct, str):
        raise InvalidRequestError(
            f"direct: expected the root of the store, such as file:///PATH, got "
            f"{direct!r}"
        )
    try:
        root = _reached(storage_at(direct))
    except InvalidFieldError as e:
        raise InvalidRequestError(f"direct: {e}") from e
    if root is None:
        raise InvalidRequestError(
            f"direct: expected a root on this machine or in a bucket, got {direct!r}; "
            "leave direct= out"
        )
    return root


def check_root(root: Root, *, store_uid: str, timeout: float) -> None:
    """Refuses a root that is not that of the store of a server.

    Args:
        root: To look at.
        store_uid: Of the store.
        timeout: Seconds that a bucket may take to answer.

    Raises:
        InvalidRequestError: It is not.
        PreconditionError: The bucket lets us not in.
        UnavailableError: It does not answer.
    """
    # Late, as all that only some need: lists of checkpoints read no file.
    from storesvc.format.seal import CorruptRecordError, FormatVersionError, unseal

    data = _record(root, store_uid, timeout)
    try:
        found = unseal(data, pb.StoreRecord, place=STORE).uid
    except (CorruptRecordError, FormatVersionError) as e:
        raise InvalidRequestError(
            f"direct: expected the record of store {store_uid} at {root}/{STORE}: {e}; "
            "leave direct= out"
        ) from e
    if found != store_uid:
        raise InvalidRequestError(
            f"direct: expected the root of store {store_uid}, which the server serves, "
            f"got that of store {found} at {root}; give the root of the same store, or "
            "leave direct= out"
        )


def _record(root: Root, store_uid: str, timeout: float) -> bytes:
    """The record of the store at a root."""
    expected = (
        f"direct: expected the root of store {store_uid}, which the server serves"
    )
    try:
        found = (
            (root / STORE).read_bytes()
            if isinstance(root, Path)
            else root.read(STORE, timeout=timeout)
        )
    except (PreconditionError, UnavailableError) as e:  # some are OSErrors too
        raise type(e)(f"{expected}: {e}, or leave direct= out", reason=e.reason) from e
    except OSError as e:
        raise InvalidRequestError(
            f"{expected}, cannot read {root}/{STORE}: {e.strerror}; give its root on "
            "this machine, or leave direct= out"
        ) from e
    if found is None:
        raise InvalidRequestError(
            f"{expected}, found no {root}/{STORE}; give its root, or leave direct= out"
        )
    return found


def _reached(storage: Storage) -> "Root | None":
    """The root of a storage; None where no other process can reach it."""
    if storage.is_remote:
        from storesvc_client._storage.bucket import BucketRoot

        return BucketRoot.open(storage)
    path = storage.spec.get("path")
    return None if path is None else Path(path)
