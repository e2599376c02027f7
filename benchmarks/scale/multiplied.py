"""A store of many steps, runs or data files: one real checkpoint, multiplied.

Its records are sealed again under other names, by the code of the store, and are put
into the emulator without a request.
"""

import gc
import json
import re
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest

import storesvc_client as store
from storesvc.format import layout
from storesvc.format.checksums import digest
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc.format.seal import seal, unseal
from storesvc.store import Store
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.fake_gcs import FakeGcs
from tests.fake_gcs.objects import Content
from tests.support.collecting_process import Process
from tests.support.crowded_bucket import CrowdedBucket, name_all
from tests.support.gcs_calls import BUCKET

FIRST: Final = RunName("first", "run")
"""The run of the real checkpoint."""
RUN: Final = RunName("bench", "requests")
"""The run that is made from it; as if an earlier release had written it, it has only
what no reader can do without."""
FILES: Final = 8_000
"""Data files of a checkpoint of 1 TB, of the largest size."""


class MultipliedStore:
    """A store in an emulated bucket that grows without requests."""

    def __init__(self, gcs: FakeGcs, root: str) -> None:
        """Creates it with one run of one small checkpoint."""
        self.root = root
        self._bucket = gcs._buckets.get(BUCKET)
        self._prefix = root.partition(f"{BUCKET}/")[2] + "/"
        with store.connect(root) as client:
            client.run(str(FIRST)).save(0, {"x": np.zeros(4)}).result()
        place = RunPaths(FIRST).checkpoint(0)
        self._slot = unseal(self._read(place), pb.CheckpointRecord, place=place)
        place = layout.run_record(FIRST)
        self._run = unseal(self._read(place), pb.RunRecord, place=place)

    def add_steps(self, steps: int) -> None:
        """Adds a run of so many checkpoints."""
        self._add_run(RUN)
        for step in range(steps):
            self._add_checkpoint(RUN, step, [])
        self._sort()

    def add_runs(self, runs: int) -> None:
        """Adds so many runs of one checkpoint."""
        for number in range(runs):
            name = RunName(RUN.namespace, f"run-{number:06d}")
            self._add_run(name)
            self._add_checkpoint(name, 0, [])
        self._sort()

    def add_files(self, files: int) -> None:
        """Adds a run of checkpoints, each of its part of so many data files."""
        self._add_run(RUN)
        paths, template = RunPaths(RUN), self._bucket[self._place(layout.STORE)]
        for step, first in enumerate(range(0, files, FILES)):
            upload = uuid.uuid4().hex
            numbers = range(first, min(first + FILES, files))
            each = [f"{upload}/{n:032x}" for n in numbers]
            for file in each:
                self._bucket._objects[self._place(paths.data_file(file))] = template
            self._add_checkpoint(RUN, step, each, upload)
        self._sort()

    def _add_run(self, name: RunName) -> None:
        record = pb.RunRecord()
        record.CopyFrom(self._run)
        record.uid = str(uuid.uuid4())
        place = layout.run_record(name)
        self._write(place, seal(record, place=place))

    def _add_checkpoint(
        self, run: RunName, step: int, files: list[str], upload: str = ""
    ) -> None:
        made, paths = pb.CheckpointRecord(), RunPaths(run)
        made.CopyFrom(self._slot)
        made.step, made.upload = step, upload or uuid.uuid4().hex
        table = pb.FileTable(file=files, chunk_bytes=[8 << 20] * len(files))
        data = table.SerializeToString()
        if not files:
            old = RunPaths(FIRST).file_table(self._slot.upload, self._slot.files_digest)
            data = self._read(old)
        made.files_digest = digest(data)
        self._write(paths.file_table(made.upload, made.files_digest), data)
        digest_of = self._slot.manifest_digest
        data = self._read(RunPaths(FIRST).manifest(self._slot.upload, digest_of))
        self._write(paths.manifest(made.upload, digest_of), data)
        place = paths.checkpoint(step)
        self._write(place, seal(made, place=place))

    def _place(self, path: str) -> str:
        return self._prefix + path

    def _read(self, path: str) -> bytes:
        return bytes(self._bucket[self._place(path)].content.data)

    def _write(self, path: str, data: bytes) -> None:
        """Adds an object, of which the names are sorted once, in the end."""
        like = self._bucket[self._place(layout.STORE)]
        self._bucket._last_generation += 1
        self._bucket._objects[self._place(path)] = replace(
            like,
            content=Content.of(data, {}),
            generation=self._bucket._last_generation,
        )

    def _sort(self) -> None:
        self._bucket._names[:] = sorted(self._bucket._objects)


def _read_memory(name: str) -> float:
    """Returns a figure of this process in MiB: "VmHWM" is the most since a reset."""
    text = Path("/proc/self/status").read_text()
    (kib,) = re.findall(rf"{name}:\s+(\d+) kB", text)
    return int(kib) / 1024


def _begin_measuring() -> float:
    """Resets the most memory of this process; returns what it has at rest, in MiB."""
    gc.collect()
    rest = _read_memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    return rest


def main() -> None:
    """Collects a store twice, again after a line on stdin; prints what that cost."""
    with store.connect(sys.argv[1]) as client:
        list(client.collect(str(FIRST)))  # with all that a first time imports
        rest = _begin_measuring()
        list(client.collect())
        print(flush=True)
        sys.stdin.readline()
        began = time.process_time()
        list(client.collect())
        cpu = time.process_time() - began
        print(json.dumps({"MiB": _read_memory("VmHWM") - rest, "CPU-s": cpu}))


async def collect_names(files: int) -> None:
    """Collects a store in memory whose lists and file tables have so many data files;
    prints what that cost a new process."""
    bucket = await CrowdedBucket.faulty("memory://")
    assert isinstance(bucket, CrowdedBucket)
    process = await Process.over(bucket)
    for step in range(files // FILES):
        await process.create(step)
    other = replace(process, store=await Store.open(bucket, clock=process.clock))
    bucket.files = FILES
    with pytest.MonkeyPatch.context() as patch:
        name_all(patch, FILES)
        rest, began = _begin_measuring(), time.process_time()
        progress = await other.collect()
    cpu, most = time.process_time() - began, _read_memory("VmHWM")
    assert 0 == progress.garbage_objects == len(progress.postponed)
    print(json.dumps({"MiB": most - rest, "CPU-s": cpu}))
