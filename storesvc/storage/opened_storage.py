"""Opens the storage at a root: credentials, bucket, TensorStore's key-value store."""

from typing import Final, NamedTuple

import tensorstore as ts

from storesvc.storage import kvstore
from storesvc.storage.bucket import no_bucket, translate_errors
from storesvc.storage.location import Storage, storage_at
from storesvc.storage.remote import GcsLists, S3Deletes, endpoint_in_environment
from storesvc.storage.requests import answer, await_future

_NOWHERE: Final = "nowhere/"
"""A prefix of no path: its list is one page."""


class OpenedStorage(NamedTuple):
    """An open storage."""

    storage: Storage
    root: ts.KvStore
    context: ts.Context
    extra: GcsLists | S3Deletes | None
    """Calls of a bucket that TensorStore cannot make."""


async def open_storage(root: str) -> OpenedStorage:
    """Opens the storage at a root.

    Raises:
        InvalidFieldError: The root is not a URI of a known storage, or its bucket does
            not exist.
        StorageDeniedError: The storage rejects the credentials.
        StorageUnavailableError: The storage does not answer.
    """
    storage = storage_at(root)
    extra: GcsLists | S3Deletes | None = None
    # 1. Google's client first: TensorStore ends the process where gcs_grpc finds no
    #    credentials (seen in 0.1.86).
    if storage.is_gcs:
        extra = await GcsLists.for_storage(storage)
        await extra.check_bucket()
    # 2. TensorStore's own store.
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}, **storage.context})
    with translate_errors(storage, ""):
        with endpoint_in_environment(storage):
            opening = ts.KvStore.open(dict(storage.spec), context=context)
        store = await answer(storage, await_future(opening))
    # 3. Credentials and bucket of S3.
    if storage.is_s3:
        extra = await S3Deletes.for_storage(storage)
        await _check_bucket(storage, store)
    return OpenedStorage(storage, store, context, extra)


async def _check_bucket(storage: Storage, root: ts.KvStore) -> None:
    """Rejects a bucket on S3 that does not exist: reads from it would find nothing."""
    with translate_errors(storage, ""):
        try:
            await answer(storage, kvstore.names(root, _NOWHERE))
        except ValueError as e:
            if not str(e).startswith("NOT_FOUND"):
                raise
            raise no_bucket(storage) from e
