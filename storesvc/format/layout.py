"""Where things lie below the root of a store (``bucket.proto`` draws it)."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from storesvc.format.names import InvalidNameError, RunName, check_hold, check_tag

ROOT: Final = "manifest.ocdbt"
"""The root of a key space, below its place."""

STORE: Final = "store.binpb"
"""The store's own record."""

COLLECTOR: Final = "collector.binpb"
"""Which process collects garbage."""

RESERVE: Final = "reserve.bin"
"""Space to be given up on a full disk."""

PROBES: Final = "probes/"
"""Below it: what is written, once, to see whether the storage heeds conditions."""

RUNS: Final = "runs/"
"""Below it: ``<namespace>/<run>.binpb``, and nothing else."""

_SUFFIX: Final = ".binpb"
_NUMBER: Final = re.compile(r"[0-9]{20}\.binpb")
_OWNED: Final = re.compile(
    r"(?:manifests|files|uploads|staging|trees|pool)/([0-9a-f]{32})(?=[-./])"
)

_POOLED: Final = re.compile(r"data/[^/]+/[^/]+/pool/")


def is_pooled(place: str) -> bool:
    """Returns whether a place is one of data files. Direct writers may write there;
    each object is written once, so that no write of it is conditional."""
    return bool(_POOLED.match(place))


def run_record(name: RunName) -> str:
    """Returns the place of a run's record."""
    return f"{RUNS}{name.namespace}/{name.run}{_SUFFIX}"


def run_of_record(place: str) -> RunName | None:
    """Returns the run whose record lies there; None for a stray object."""
    try:
        name = RunName.parse(place.removeprefix(RUNS).removesuffix(_SUFFIX))
    except InvalidNameError:
        return None
    return name if place == run_record(name) else None


def journal(namespace: str) -> str:
    """Returns what the announcements of a namespace lie below, and nothing else."""
    return f"journal/{namespace}/"


def announcement(namespace: str, number: int) -> str:
    """Returns the place of an announcement."""
    return f"{journal(namespace)}{number:020d}{_SUFFIX}"


def number_of(place: str) -> int | None:
    """Returns the number that a place ends with; None for a stray object."""
    name = place.rpartition("/")[2]
    return int(name[:20]) if _NUMBER.fullmatch(name) else None


@dataclass(frozen=True, slots=True)
class RunPlaces:
    """The places of one run."""

    name: RunName

    @property
    def root(self) -> str:
        """Everything of the run but its record."""
        return f"data/{self.name.namespace}/{self.name.run}/"

    @property
    def checkpoints(self) -> str:
        """Below it: the slots, in ascending order of steps, and nothing else."""
        return f"{self.root}checkpoints/"

    @property
    def pool(self) -> str:
        """Data files."""
        return f"{self.root}pool/"

    def checkpoint(self, step: int) -> str:
        """Returns the place of a step's slot."""
        return f"{self.checkpoints}{step:020d}{_SUFFIX}"

    def step_of(self, place: str) -> int | None:
        """Returns the step whose slot lies there; None for a stray object."""
        name = place.removeprefix(self.checkpoints)
        return None if "/" in name else number_of(name)

    def manifest(self, upload: str, digest: bytes) -> str:
        """Returns the place of the manifest with that digest."""
        return f"{self.root}manifests/{upload}-{digest.hex()}{_SUFFIX}"

    def file_table(self, upload: str, digest: bytes) -> str:
        """Returns the place of the file table with that digest."""
        return f"{self.root}files/{upload}-{digest.hex()}{_SUFFIX}"

    @property
    def tags(self) -> str:
        """Below it: the tags, and nothing else."""
        return f"{self.root}tags/"

    def tag(self, tag: str) -> str:
        """Returns the place of a tag."""
        return f"{self.tags}{tag}{_SUFFIX}"

    def tag_of(self, place: str) -> str | None:
        """Returns the tag that lies there; None for a stray object."""
        return _only_id(place, self.tags, check_tag)

    @property
    def holds(self) -> str:
        """Below it: the holds, and nothing else."""
        return f"{self.root}holds/"

    def hold(self, hold: str) -> str:
        """Returns the place of a hold."""
        return f"{self.holds}{hold}{_SUFFIX}"

    def hold_of(self, place: str) -> str | None:
        """Returns the hold that lies there; None for a stray object."""
        return _only_id(place, self.holds, check_hold)

    @property
    def uploads(self) -> str:
        """Below it: the records of uploads, and the parts of each."""
        return f"{self.root}uploads/"

    def upload(self, upload: str) -> str:
        """Returns the place of an upload's record."""
        return f"{self.uploads}{upload}{_SUFFIX}"

    def lease(self, upload: str) -> str:
        """Returns the place of an upload's lease."""
        return f"{self.uploads}{upload}/lease{_SUFFIX}"

    def upload_of(self, place: str) -> str | None:
        """Returns the upload that an object was written by; None for all that no
        upload owns, and for data files of the first release."""
        found = _OWNED.match(place.removeprefix(self.root))
        return found[1] if found else None

    def tree(self, upload: str, digest: bytes) -> str:
        """Returns the place of an upload's leaf table with that digest."""
        return f"{self.root}uploads/{upload}/tree-{digest.hex()}{_SUFFIX}"

    def values(self, upload: str, digest: bytes) -> str:
        """Returns the place of the leaf digests of an upload's writer 0."""
        return f"{self.root}uploads/{upload}/values-{digest.hex()}.bin"

    def receipts(self, upload: str) -> str:
        """Returns what the receipts of an upload lie below."""
        return f"{self.root}uploads/{upload}/writers/"

    def receipt(self, upload: str, writer: int) -> str:
        """Returns the place of a writer's receipt."""
        return f"{self.receipts(upload)}{writer}{_SUFFIX}"

    def writer_of(self, receipt: str) -> int:
        """Returns whose receipt lies at a place."""
        return int(receipt.rpartition("/")[2].removesuffix(_SUFFIX))

    def data_file(self, file: str) -> str:
        """Returns the place of a data file that a manifest names."""
        return f"{self.pool}{file}"

    def staging(self, upload: str, writer: int) -> str:
        """Returns what the tables of a writer's data files lie below."""
        return f"{self.root}staging/{upload}/{writer}/"

    def staged(self, upload: str, writer: int, table: str) -> str:
        """Returns the place of a table of what a writer stored."""
        return f"{self.staging(upload, writer)}{table}{_SUFFIX}"

    def staging_of(self, upload: str) -> str:
        """Returns what the tables of all writers of an upload lie below."""
        return f"{self.root}staging/{upload}/"

    def staged_writer_of(self, table: str) -> int:
        """Returns the writer whose table a place below ``staging_of`` holds."""
        return int(table.rsplit("/", 2)[1])

    def upload_parts(self, upload: str) -> str:
        """Returns what the leaf table and the receipts of an upload lie below."""
        return f"{self.root}uploads/{upload}/"

    def all_of(self, upload: str) -> list[str]:
        """Returns what all objects of an upload begin with, but for its record, and
        what a killed write of that left."""
        return [
            f"{self.upload(upload)}.",
            f"{self.root}manifests/{upload}-",
            f"{self.root}files/{upload}-",
            f"{self.root}trees/{upload}",
            self.staging_of(upload),
            self.upload_parts(upload),
            f"{self.pool}{self.data_prefix(upload)}",
        ]

    def data_prefix(self, upload: str) -> str:
        """Returns what an upload's data files begin with, relative to the pool."""
        return f"{upload}/"

    def key_space(self, upload: str, attempt: str) -> str:
        """Returns the place of a checkpoint's key space; without an attempt, that of
        the first release."""
        return f"{self.root}trees/{upload}{'-' if attempt else ''}{attempt}/"


def _only_id(place: str, prefix: str, check: Callable[[str], None]) -> str | None:
    """The id of an object right below a prefix; None where it breaks the rules."""
    text = place.removeprefix(prefix).removesuffix(_SUFFIX)
    try:
        check(text)
    except InvalidNameError:
        return None
    return text if place == f"{prefix}{text}{_SUFFIX}" else None
