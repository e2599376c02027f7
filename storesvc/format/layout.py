"""Paths of all objects below the root of a store; ``bucket.proto`` draws them.

Properties and functions without a suffix return the path of one object or, if it ends
with "/", a prefix. Their inverses, ``..._of``, return None for the path of an object
that the format does not have.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from storesvc.format.names import (
    MAX_STEP,
    InvalidNameError,
    RunName,
    check_hold,
    check_tag,
)

ROOT: Final = "manifest.ocdbt"
"""Name of a key space's manifest, below its prefix."""

STORE: Final = "store.binpb"
"""The record of the store itself."""

COLLECTOR: Final = "collector.binpb"
"""The lease of the process that collects garbage."""

RESERVE: Final = "reserve.bin"
"""Object of zeros that is deleted on a full disk."""

PROBES: Final = "probes/"
"""Prefix of objects that probe whether the storage checks conditions."""

RUNS: Final = "runs/"
"""Prefix of ``<namespace>/<run>.binpb``, and of nothing else."""

_SUFFIX: Final = ".binpb"
_NUMBER: Final = re.compile(r"[0-9]{20}\.binpb")
_OWNED: Final = re.compile(
    r"(?:manifests|files|uploads|staging|trees|pool)/([0-9a-f]{32})(?=[-./])"
)

_RANGE: Final = re.compile(
    r"(?:pool/[0-9a-f]{32}/|staging/[0-9a-f]{32}/|uploads/[0-9a-f]{32}/writers/)"
)

_POOLED: Final = re.compile(r"data/[^/]+/[^/]+/pool/(?:([0-9a-f]{32})/)?")


def is_pooled(path: str) -> bool:
    """Returns whether a path belongs to a pool of data files.

    Direct writers may write there; each object is written once, unconditionally.
    """
    return bool(_POOLED.match(path))


def parse_data_file(path: str) -> str:
    """Returns the upload that has written a data file; empty for other objects."""
    found = _POOLED.match(path)
    return (found and found[1]) or ""


def run_record(name: RunName) -> str:
    return f"{RUNS}{name.namespace}/{name.run}{_SUFFIX}"


def parse_run_record(path: str) -> RunName | None:
    """Returns the run of a record's path; None for a foreign object."""
    try:
        name = RunName.parse(path.removeprefix(RUNS).removesuffix(_SUFFIX))
    except InvalidNameError:
        return None
    return name if path == run_record(name) else None


def journal(namespace: str) -> str:
    """Returns the prefix of a namespace's announcements, and of nothing else."""
    return f"journal/{namespace}/"


def announcement(namespace: str, number: int) -> str:
    return f"{journal(namespace)}{number:020d}{_SUFFIX}"


def parse_number(path: str) -> int | None:
    """Returns the number at the end of a path; None for a foreign object."""
    name = path.rpartition("/")[2]
    number = int(name[:20]) if _NUMBER.fullmatch(name) else None
    return number if number is not None and number <= MAX_STEP else None


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The paths of one run."""

    name: RunName

    @property
    def root(self) -> str:
        """Prefix of everything of the run but its record."""
        return f"data/{self.name.namespace}/{self.name.run}/"

    @property
    def recent(self) -> str:
        """Path of the hint at the newest checkpoint."""
        return f"{self.root}recent{_SUFFIX}"

    @property
    def committed(self) -> str:
        """Path of what retention knows of the committed checkpoints."""
        return f"{self.root}committed{_SUFFIX}"

    @property
    def checkpoints(self) -> str:
        """Prefix of the slots, in ascending order of steps, and of nothing else."""
        return f"{self.root}checkpoints/"

    @property
    def pool(self) -> str:
        """Prefix of the data files."""
        return f"{self.root}pool/"

    def checkpoint(self, step: int) -> str:
        return f"{self.checkpoints}{step:020d}{_SUFFIX}"

    def parse_step(self, path: str) -> int | None:
        """Returns the step of a slot's path; None for a foreign object."""
        name = path.removeprefix(self.checkpoints)
        return None if "/" in name else parse_number(name)

    def manifest(self, upload: str, digest: bytes) -> str:
        return f"{self.root}manifests/{upload}-{digest.hex()}{_SUFFIX}"

    def file_table(self, upload: str, digest: bytes) -> str:
        return f"{self.root}files/{upload}-{digest.hex()}{_SUFFIX}"

    @property
    def tags(self) -> str:
        """Prefix of the tags, and of nothing else."""
        return f"{self.root}tags/"

    def tag(self, tag: str) -> str:
        return f"{self.tags}{tag}{_SUFFIX}"

    def parse_tag(self, path: str) -> str | None:
        """Returns the tag of a path; None for a foreign object."""
        return _only_id(path, self.tags, check_tag)

    @property
    def holds(self) -> str:
        """Prefix of the holds, and of nothing else."""
        return f"{self.root}holds/"

    def hold(self, hold: str) -> str:
        return f"{self.holds}{hold}{_SUFFIX}"

    def parse_hold(self, path: str) -> str | None:
        """Returns the hold of a path; None for a foreign object."""
        return _only_id(path, self.holds, check_hold)

    @property
    def uploads(self) -> str:
        """Prefix of the records of uploads, and of the parts of each."""
        return f"{self.root}uploads/"

    def upload(self, upload: str) -> str:
        return f"{self.uploads}{upload}{_SUFFIX}"

    def lease(self, upload: str) -> str:
        return f"{self.uploads}{upload}/lease{_SUFFIX}"

    def parse_upload(self, path: str) -> str | None:
        """Returns the upload that has written an object; None for an object without
        one, and for data files of the first release."""
        found = _OWNED.match(path.removeprefix(self.root))
        return found[1] if found else None

    def parse_range(self, path: str) -> str | None:
        """Returns the prefix of an upload's data files, staging tables or receipts that
        a path begins with; None: it is of none of these, which may be many."""
        found = _RANGE.match(path, len(self.root))
        return path[: found.end()] if found and path.startswith(self.root) else None

    def tree(self, upload: str, digest: bytes) -> str:
        """Returns the path of an upload's leaf table with that digest."""
        return f"{self.root}uploads/{upload}/tree-{digest.hex()}{_SUFFIX}"

    def values(self, upload: str, digest: bytes) -> str:
        """Returns the path of the leaf digests of an upload's writer 0."""
        return f"{self.root}uploads/{upload}/values-{digest.hex()}.bin"

    def receipts(self, upload: str) -> str:
        """Returns the prefix of an upload's receipts."""
        return f"{self.root}uploads/{upload}/writers/"

    def receipt(self, upload: str, writer: int) -> str:
        return f"{self.receipts(upload)}{writer}{_SUFFIX}"

    def parse_writer(self, receipt: str) -> int:
        return int(receipt.rpartition("/")[2].removesuffix(_SUFFIX))

    def data_file(self, file: str) -> str:
        return f"{self.pool}{file}"

    def staging(self, upload: str, writer: int) -> str:
        """Returns the prefix of the tables of a writer's data files."""
        return f"{self.root}staging/{upload}/{writer}/"

    def staged(self, upload: str, writer: int, table: str) -> str:
        return f"{self.staging(upload, writer)}{table}{_SUFFIX}"

    def staging_prefix(self, upload: str) -> str:
        """Returns the prefix of the tables of all writers of an upload."""
        return f"{self.root}staging/{upload}/"

    def parse_staged_writer(self, table: str) -> int:
        """Returns the writer of a path below ``staging_prefix``."""
        return int(table.rsplit("/", 2)[1])

    def upload_parts(self, upload: str) -> str:
        """Returns the prefix of the leaf table and the receipts of an upload."""
        return f"{self.root}uploads/{upload}/"

    def list_prefixes(self, upload: str) -> list[str]:
        """Returns the prefixes of all objects of an upload but its record, remains of
        killed writes of the record included."""
        return [
            f"{self.upload(upload)}.",
            f"{self.root}manifests/{upload}-",
            f"{self.root}files/{upload}-",
            f"{self.root}trees/{upload}",
            self.staging_prefix(upload),
            self.upload_parts(upload),
            f"{self.pool}{self.data_prefix(upload)}",
        ]

    def data_prefix(self, upload: str) -> str:
        """Returns the prefix of an upload's data files, relative to the pool."""
        return f"{upload}/"

    def key_space(self, upload: str, attempt: str) -> str:
        """Returns the prefix of a checkpoint's key space; without an attempt, as the
        first release named it."""
        return f"{self.root}trees/{upload}{'-' if attempt else ''}{attempt}/"


def _only_id(path: str, prefix: str, check: Callable[[str], None]) -> str | None:
    """The id of an object directly below a prefix; None for an invalid id."""
    text = path.removeprefix(prefix).removesuffix(_SUFFIX)
    try:
        check(text)
    except InvalidNameError:
        return None
    return text if path == f"{prefix}{text}{_SUFFIX}" else None
