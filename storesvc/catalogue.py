"""The catalogue: which runs and checkpoints there are, and their manifests.

Reads only. A slot that is not COMMITTED is absent to every reader here.
"""

import asyncio
import difflib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from storesvc.bucket import Bucket, Generation
from storesvc.errors import (
    CheckpointNotFoundError,
    CorruptDataError,
    FormatUnsupportedError,
    RunNotFoundError,
)
from storesvc.format import layout
from storesvc.format.layout import RunPlaces
from storesvc.format.manifests import (
    CorruptManifestError,
    Manifest,
    unpack_manifest,
)
from storesvc.format.names import CheckpointName, RunName
from storesvc.format.seal import CorruptRecordError, FormatVersionError, M, unseal
from storesvc.slots import COMMITTED
from storesvc_proto.v1 import bucket_pb2 as pb

CACHED_MANIFEST_BYTES: Final = 8 << 20
"""Serialised bytes of the manifests that a process keeps, but for the last one;
parsed they take some ten times as much."""

_READS_AT_ONCE: Final = 32
_NEAREST: Final = 3


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run, as lists show it."""

    name: RunName
    record: pb.RunRecord
    latest: pb.CheckpointRecord


async def read_record(
    bucket: Bucket, place: str, kind: type[M]
) -> tuple[M, Generation] | None:
    """Returns the record that a place holds, and its generation.

    Raises:
        CorruptDataError: Its bytes are not those that were written.
        FormatUnsupportedError: It is of another version of the format.
    """
    stored = await bucket.read(place)
    if stored is None:
        return None
    try:
        return unseal(stored.data, kind), stored.generation
    except CorruptRecordError as e:
        raise CorruptDataError(f"{place} is damaged: {e}") from e
    except FormatVersionError as e:
        raise FormatUnsupportedError(
            f"{place}: {e}; use a release of storesvc that knows it"
        ) from e


class Catalogue:
    """The runs and checkpoints of a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._manifests: OrderedDict[str, tuple[int, Manifest]] = OrderedDict()

    async def run(self, name: RunName) -> RunSummary:
        """Returns a run.

        Raises:
            RunNotFoundError: With the most similar names.
        """
        found = await self._summary(name)
        if found is None:
            raise await self._run_not_found(name)
        return found

    async def runs(
        self, namespace: str | None, *, after: RunName | None, limit: int
    ) -> list[RunSummary]:
        """Returns runs in the order of their names.

        Args:
            namespace: Of this namespace; None: of all.
            after: Only those after it.
            limit: At most so many.
        """
        names = await self._run_names(namespace)
        names = [name for name in names if after is None or name > after]
        found: list[RunSummary] = []
        while names and len(found) < limit:
            batch, names = names[:_READS_AT_ONCE], names[_READS_AT_ONCE:]
            summaries = await asyncio.gather(*map(self._summary, batch))
            found += [summary for summary in summaries if summary is not None]
        return found[:limit]

    async def checkpoints(
        self, run: RunName, *, before: int | None, limit: int
    ) -> list[pb.CheckpointRecord]:
        """Returns committed checkpoints, newest first.

        Args:
            run: Of this run.
            before: Only those of lower steps.
            limit: At most so many.

        Raises:
            RunNotFoundError: With the most similar names.
        """
        await self._check_run(run)
        steps = await self._steps(run)
        steps = [step for step in steps if before is None or step < before]
        found: list[pb.CheckpointRecord] = []
        while steps and len(found) < limit:
            batch, steps = steps[:_READS_AT_ONCE], steps[_READS_AT_ONCE:]
            found += await self._committed(run, batch)
        return found[:limit]

    async def checkpoint(self, name: CheckpointName) -> pb.CheckpointRecord:
        """Returns a committed checkpoint.

        Raises:
            RunNotFoundError: With the most similar names.
            CheckpointNotFoundError: With the nearest steps.
        """
        if name.which == "latest":
            record = await self._latest(name.run)
        else:
            record = await self._committed_slot(name.run, name.which)
        if record is not None:
            return record
        await self._check_run(name.run)
        raise await self._checkpoint_not_found(name)

    async def slot(
        self, run: RunName, step: int
    ) -> tuple[pb.CheckpointRecord, Generation] | None:
        """Returns what a step's slot holds, committed or not.

        Raises:
            CorruptDataError: It holds the slot of another step, or is damaged.
        """
        place = RunPlaces(run).checkpoint(step)
        found = await read_record(self._bucket, place, pb.CheckpointRecord)
        if found is not None and found[0].step != step:
            raise CorruptDataError(
                f"{place} is damaged: expected step {step}, got {found[0].step}"
            )
        return found

    async def manifest(self, run: RunName, record: pb.CheckpointRecord) -> Manifest:
        """Returns the manifest of a checkpoint; kept, for it never changes.

        Raises:
            CorruptDataError: It is missing or damaged.
        """
        place = RunPlaces(run).manifest(record.upload, record.manifest_digest)
        if place in self._manifests:
            self._manifests.move_to_end(place)
            return self._manifests[place][1]
        data = await self.manifest_bytes(run, record)
        try:
            manifest = await asyncio.to_thread(
                unpack_manifest,
                data,
                size_bytes=record.manifest_bytes,
                expected=record.manifest_digest,
            )
        except CorruptManifestError as e:
            raise CorruptDataError(f"{run}@{record.step}: {e}") from e
        self._keep(place, len(data), manifest)
        return manifest

    async def manifest_bytes(self, run: RunName, record: pb.CheckpointRecord) -> bytes:
        """Returns a manifest as it lies, unchecked.

        Raises:
            CorruptDataError: It is missing.
        """
        place = RunPlaces(run).manifest(record.upload, record.manifest_digest)
        stored = await self._bucket.read(place)
        if stored is None:
            raise CorruptDataError(
                f"{run}@{record.step}: its manifest is missing; use another checkpoint"
            )
        return stored.data

    def _keep(self, place: str, size: int, manifest: Manifest) -> None:
        self._manifests[place] = (size, manifest)
        total = sum(kept for kept, _ in self._manifests.values())
        while total > CACHED_MANIFEST_BYTES and len(self._manifests) > 1:
            total -= self._manifests.popitem(last=False)[1][0]

    async def _latest(self, run: RunName) -> pb.CheckpointRecord | None:
        # The newest slots may be reservations of saves that are under way.
        for step in await self._steps(run):
            record = await self._committed_slot(run, step)
            if record is not None:
                return record
        return None

    async def _committed(
        self, run: RunName, steps: Sequence[int]
    ) -> list[pb.CheckpointRecord]:
        slots = await asyncio.gather(*(self._committed_slot(run, s) for s in steps))
        return [slot for slot in slots if slot is not None]

    async def _committed_slot(
        self, run: RunName, step: int
    ) -> pb.CheckpointRecord | None:
        found = await self.slot(run, step)
        return found[0] if found and found[0].state == COMMITTED else None

    async def _steps(self, run: RunName) -> list[int]:
        """Steps that have a slot, newest first."""
        places = RunPlaces(run)
        found = await self._bucket.list(places.checkpoints)
        steps = map(places.step_of, reversed(found))
        return [step for step in steps if step is not None]

    async def _run_names(self, namespace: str | None) -> list[RunName]:
        prefix = layout.RUNS if namespace is None else f"{layout.RUNS}{namespace}/"
        found = await self._bucket.list(prefix)
        return sorted(name for place in found if (name := layout.run_of_record(place)))

    async def _check_run(self, name: RunName) -> None:
        if await self._summary(name) is None:
            raise await self._run_not_found(name)

    async def _summary(self, name: RunName) -> RunSummary | None:
        """The run, if it has a checkpoint: its record comes a moment before."""
        place = layout.run_record(name)
        found = await read_record(self._bucket, place, pb.RunRecord)
        latest = await self._latest(name) if found else None
        return RunSummary(name, found[0], latest) if found and latest else None

    async def _run_not_found(self, name: RunName) -> RunNotFoundError:
        # of its own namespace: others are not even named to it
        names = [str(n) for n in await self._run_names(name.namespace)]
        nearest = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
        known = f"nearest: {', '.join(nearest)}" if nearest else "no run is similar"
        return RunNotFoundError(
            f"run {name} has no checkpoint ({known}); list the runs to see all",
            run=str(name),
            nearest=",".join(nearest),
        )

    async def _checkpoint_not_found(
        self, name: CheckpointName
    ) -> CheckpointNotFoundError:
        if name.which == "latest":
            return CheckpointNotFoundError(
                f"{name.run} has no committed checkpoint yet; save one",
                run=str(name.run),
                nearest="",
            )
        wanted = name.which
        steps = await self._steps(name.run)
        steps.sort(key=lambda step: abs(step - wanted))
        found: list[pb.CheckpointRecord] = []
        while steps and len(found) < _NEAREST:
            batch, steps = steps[:_NEAREST], steps[_NEAREST:]
            found += await self._committed(name.run, batch)
        near = sorted(record.step for record in found[:_NEAREST])
        nearest = ",".join(map(str, near))
        return CheckpointNotFoundError(
            f"{name} does not exist; the nearest steps of {name.run} are "
            f"{nearest.replace(',', ', ') or 'none'}",
            run=str(name.run),
            step=str(wanted),
            nearest=nearest,
        )
