"""Where things lie below the root of a store (``bucket.proto`` draws it)."""

import re
from dataclasses import dataclass
from typing import Final

from storesvc.format.names import InvalidNameError, RunName

STORE: Final = "store.binpb"
"""The store's own record."""

RUNS: Final = "runs/"
"""Below it: ``<namespace>/<run>.binpb``, and nothing else."""

_SUFFIX: Final = ".binpb"
_SLOT: Final = re.compile(r"[0-9]{20}\.binpb")


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
        return int(name[:20]) if _SLOT.fullmatch(name) else None

    def manifest(self, upload: str, digest: bytes) -> str:
        """Returns the place of the manifest with that digest."""
        return f"{self.root}manifests/{upload}-{digest.hex()}{_SUFFIX}"

    def upload(self, upload: str) -> str:
        """Returns the place of an upload's record."""
        return f"{self.root}uploads/{upload}{_SUFFIX}"

    def tree(self, upload: str, digest: bytes) -> str:
        """Returns the place of an upload's leaf table with that digest."""
        return f"{self.root}uploads/{upload}/tree-{digest.hex()}{_SUFFIX}"

    def receipts(self, upload: str) -> str:
        """Returns what the receipts of an upload lie below."""
        return f"{self.root}uploads/{upload}/writers/"

    def receipt(self, upload: str, writer: int) -> str:
        """Returns the place of a writer's receipt."""
        return f"{self.receipts(upload)}{writer}{_SUFFIX}"

    def staging(self, upload: str, writer: int) -> str:
        """Returns the place of a writer's key space."""
        return f"{self.root}staging/{upload}/{writer}/"

    def staging_of(self, upload: str) -> str:
        """Returns what all writers' key spaces of an upload lie below."""
        return f"{self.root}staging/{upload}/"

    def upload_parts(self, upload: str) -> str:
        """Returns what the leaf table and the receipts of an upload lie below."""
        return f"{self.root}uploads/{upload}/"

    def key_space(self, upload: str) -> str:
        """Returns the place of a checkpoint's key space."""
        return f"{self.root}trees/{upload}/"
