"""The record of the store: its creation, and the format in which the store is written.

A new store gets the newest format that this release writes. Afterwards only an operator
raises it (`StoreFormat.upgrade`), and it is never lowered: a release that does not know
it rejects the store. So an upgrade of a server changes no format, and the jobs of the
release before go on.
"""

import hashlib
import logging
import uuid
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from storesvc import __version__
from storesvc.catalog.records import read_stored, timestamp, update_record, write_record
from storesvc.clock import Clock
from storesvc.errors import (
    CorruptDataError,
    FormatUnsupportedError,
    InvalidFieldError,
    StorageDeniedError,
    StorageUnavailableError,
)
from storesvc.format import layout
from storesvc.format.seal import FORMAT_VERSION, OLDEST_VERSION, OLDEST_WRITTEN
from storesvc.storage.bucket import (
    IF_ABSENT,
    Bucket,
    PreconditionError,
    Stored,
    check_conditions,
)
from storesvc.storage.location import LOCK_SUFFIX
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc_proto.v1 import bucket_pb2 as pb

NOTICE_SECONDS: Final = 60.0
"""Time after which a process that may write reads the format again."""

_WRITTEN: Final = range(OLDEST_WRITTEN, FORMAT_VERSION + 1)
"""The formats that this release writes."""

_CHECKED_ENTRIES: Final = 100
"""Maximum entries of a root that are read to find foreign files."""

_SHOWN: Final = 2
"""Maximum foreign names in an error message."""

_OWN: Final = (layout.STORE, layout.RESERVE, layout.PROBES.removesuffix("/"))
"""Entries that a store's creation leaves if its process is killed."""

_log = logging.getLogger(__name__)


class StoreFormat:
    """The format of an open store. Each method raises ``FormatUnsupportedError`` if
    this release does not know it."""

    def __init__(self, bucket: Bucket, record: pb.StoreRecord, *, clock: Clock) -> None:
        self._bucket, self._clock = bucket, clock
        self._version = _check_known(record)
        self._read_seconds = clock.elapsed()

    async def check(self) -> None:
        """Checks that this release writes the format, before it changes the store."""
        age_seconds = self._clock.elapsed() - self._read_seconds
        if age_seconds >= NOTICE_SECONDS or self._version not in _WRITTEN:
            record, _ = await read_store(self._bucket)
            self._version = record.format_version
            self._read_seconds = self._clock.elapsed()
            _check_known(record)
        if self._version not in _WRITTEN:
            raise FormatUnsupportedError(
                f"{layout.STORE}: expected a store of format {_list_written()} to "
                f"write to, got format {self._version}, which storesvc {__version__} "
                "only reads; raise it with storectl upgrade"
            )

    async def upgrade(self, version: int, *, is_preview: bool) -> tuple[int, int]:
        """Raises the format to a version, 0 for the newest; returns the ones before and
        after. A preview changes nothing.

        Raises:
            InvalidFieldError: It is lower than that of the store, or not written.
        """
        version = version or FORMAT_VERSION

        async def attempt() -> tuple[int, int]:
            record, stored = await read_store(self._bucket)
            before = _check_known(record)
            _check_raise(before, version)
            if before != version and not is_preview:
                record.format_version, record.release = version, __version__
                record.token_key = token_key(record, stored)
                await write_record(
                    self._bucket, layout.STORE, record, condition=stored.generation
                )
                self._version = version
            return before, version

        return await update_record(attempt, record="the record of the store")


def token_key(record: pb.StoreRecord, stored: Stored) -> bytes:
    """Returns the key of resume tokens. All servers of a store have it, and clients
    cannot read it: the object has a random nonce."""
    return record.token_key or hashlib.blake2b(stored.data, digest_size=32).digest()


async def read_store(bucket: Bucket) -> tuple[pb.StoreRecord, Stored]:
    """Returns the record of an open store and its object; raises if it is gone."""
    found = await _find(bucket)
    if found is None:
        raise CorruptDataError(f"{layout.STORE} is missing; restore it from a copy")
    return found


async def open_record(
    bucket: TensorStoreBucket, clock: Clock, *, is_read_only: bool
) -> pb.StoreRecord:
    """Returns the record of a store, which is created if there is none."""
    found = await _find(bucket)
    if found is None:
        return await _create(bucket, clock)
    if not (bucket.is_first_party or is_read_only):
        # The storage may have been replaced since the store was created on it.
        # A process without permission to write cannot lose a write.
        with suppress(StorageDeniedError):
            await check_conditions(bucket)
    return found[0]


async def _find(bucket: Bucket) -> tuple[pb.StoreRecord, Stored] | None:
    found = await read_stored(bucket, layout.STORE, pb.StoreRecord)
    if found is not None and not found[0].format_version:  # of an early store
        sealed = pb.Sealed.FromString(found[1].data)
        found[0].format_version = sealed.format_version
    return found


def _check_known(record: pb.StoreRecord) -> int:
    """Returns the format of a store; rejects an unknown one."""
    if record.format_version > FORMAT_VERSION:
        raise FormatUnsupportedError(
            f"{layout.STORE}: expected a store of format {OLDEST_VERSION} to "
            f"{FORMAT_VERSION}, which storesvc {__version__} knows, got format "
            f"{record.format_version}, set by storesvc {record.release or 'unknown'}; "
            "use that release or a newer one, or a backup from before the upgrade"
        )
    return record.format_version


def _list_written() -> str:
    return " or ".join(map(str, _WRITTEN))


def _check_raise(version: int, new: int) -> None:
    if new < version:
        raise InvalidFieldError(
            f"format_version: expected at least {version}, the format of the store, "
            f"got {new}; a format is never lowered, the way back is a backup from "
            "before it was raised"
        )
    if new not in _WRITTEN:
        raise InvalidFieldError(
            f"format_version: expected {_list_written()}, which storesvc {__version__} "
            f"writes, got {new}; upgrade the servers first"
        )


async def _create(bucket: TensorStoreBucket, clock: Clock) -> pb.StoreRecord:
    """Returns the record of a new store, whichever process creates it first."""
    foreign = foreign_names(await bucket.first_names(_CHECKED_ENTRIES))
    if foreign:
        found = await _find(bucket)
        if found is None:
            shown = ", ".join(map(repr, foreign[:_SHOWN]))
            more = " and more" if len(foreign) > _SHOWN else ""
            raise InvalidFieldError(
                f"root {bucket.name}: expected a store, or nothing yet, found {shown}"
                f"{more} and no {layout.STORE}; correct the root, or name a directory "
                "for a new store"
            )
        return found[0]  # another process created it, and it is in use already
    await check_conditions(bucket)
    created = pb.StoreRecord(
        uid=str(uuid.uuid4()),
        create_time=timestamp(clock.now()),
        format_version=FORMAT_VERSION,
        release=__version__,
    )
    with suppress(PreconditionError):  # another process created it first
        await write_record(bucket, layout.STORE, created, condition=IF_ABSENT)
        # Logged as a warning sign for a mistyped root.
        _log.info("new store at %s", bucket.name)
    found = await _find(bucket)
    if found is None:
        raise StorageUnavailableError(
            f"{layout.STORE}: expected the record of the store, got none right after "
            "its creation; retry"
        )
    return found[0]


def foreign_names(names: Iterable[str]) -> list[str]:
    """Returns the top-level entries of a root that prevent a store from being created
    there, sorted: all but what an interrupted creation leaves, and what file systems
    and mounts put into a directory, ``lost+found`` and names that begin with a dot."""
    tops = {name.partition("/")[0].removesuffix(LOCK_SUFFIX) for name in names}
    return sorted(
        top
        for top in tops
        # "" is the folder object that bucket consoles create
        if top not in ("", "lost+found", *_OWN) and not top.startswith(".")
    )
