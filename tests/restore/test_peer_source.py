"""Spread restores: processes exchange chunks, and a failed process blocks no other."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from storesvc.format.grids import whole
from storesvc_client._chunks.buffers import Buffer
from storesvc_client._job import assignment
from storesvc_client._restore import spread
from storesvc_client._restore.assembly import Assembly
from storesvc_client._restore.open_tree import TreeReader, get_reader
from storesvc_client._restore.spread import PeerSource, SpreadPlan
from storesvc_client._telemetry.progress import CallbackFailedError, Meter
from storesvc_client._values.arguments import Deadline
from tests.support.thread_job import ThreadJob, ThreadProcess, check_peer_failures

COUNT = 3
LEAVES = {f"{n}": np.full(20_000 + n, n, np.int64) for n in range(12)}


@pytest.fixture(autouse=True)
def left() -> Iterator[threading.Event]:
    """Event that is set if this process has abandoned an exchange. The processes of
    these tests are threads, and share it."""
    yield spread._left
    spread._left.clear()


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TreeReader]:
    """A checkpoint of which each round exchanges half a leaf per process."""
    monkeypatch.setattr(spread, "ROUND_BYTES", COUNT * 80_000)
    monkeypatch.setattr(spread, "SLICE_BYTES", 200_000)
    monkeypatch.setattr(spread, "BATCH_BYTES", 200_000)
    monkeypatch.setattr(assignment, "SLACK_BYTES", 0)
    with store.connect(tmp_path.as_uri()) as client:
        run = client.run("tests/spread")
        run.save(1, LEAVES).result()
        yield get_reader(run.open(1))


class Reading:
    """A spread restore of one process, and the leaves that it has read."""

    def __init__(self, opened: TreeReader, job: ThreadProcess) -> None:
        manifest = opened.manifest
        self.found: dict[str, Any] = {}
        self.rows = [
            (row, [whole(leaf.shape)]) for row, leaf in enumerate(manifest.tree.leaves)
        ]
        everyone = frozenset(range(job.count))
        needed = [(row, dict.fromkeys(regions, everyone)) for row, regions in self.rows]
        self._opened = opened
        self.source = PeerSource(
            opened.open_source(),
            SpreadPlan(manifest, needed, count=job.count),
            manifest,
            job=job,
            gather=job.gather,
            failure=lambda: job.read("failure") or "",
            name="it",
        )

    def keep(self, buffers: Iterable[Buffer]) -> None:
        leaves = self._opened.manifest.tree.leaves
        for buffer in buffers:
            (self.found[leaves[buffer.row].key],) = buffer.arrays

    def read(self, *, seconds: float | None = None, **options: Any) -> int:
        """Reads the rows; returns the peak of bytes in buffers."""
        options = {"place": self.keep, **options}
        if seconds is not None:
            options["deadline"] = Deadline.after(seconds)
        manifest = self._opened.manifest
        assembly = Assembly(manifest, self.rows, name="it", **options)
        self.source.read(assembly.missing, assembly)
        return assembly.peak_bytes


def check_leaves(found: dict[str, Any]) -> None:
    """Checks that a process has all leaves, as they were saved."""
    assert sorted(LEAVES) == sorted(found)
    assert all(np.array_equal(LEAVES[key], found[key]) for key in LEAVES)


def watch_gathers(
    reading: Reading, job: ThreadProcess, see: Callable[[Any], None]
) -> None:
    """Calls a function with what a process sends in each round."""

    def gather(own: Any, processes: Sequence[int]) -> Sequence[Any]:
        see(own)
        return job.gather(own, processes)

    reading.source.gather = gather


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes processes wait for each other for a moment only."""
    monkeypatch.setattr(spread, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(spread, "POLL_SECONDS", 0.05)


def test_processes_meet_before_any_of_them_reads(opened: TreeReader) -> None:
    def part(job: ThreadProcess) -> list[float]:
        reading, had_read = Reading(opened, job), list[float]()
        watch_gathers(reading, job, lambda _: had_read.append(reading.source.seconds))
        meter = Meter("restore", "it")
        reading.read(meter=meter)
        assert meter.timings["read"] > 0
        assert meter.slowest.seconds > 0
        return had_read

    for had_read in ThreadJob(COUNT).run(part):
        assert isinstance(had_read, list), had_read
        assert 0 == had_read[0]
        assert 0 < had_read[1]


def out_of_memory(buffers: Iterable[Buffer]) -> None:
    raise RuntimeError(f"RESOURCE_EXHAUSTED: {[each.row for each in buffers]}")


def failing_meter() -> Meter:
    def fail(_: object) -> None:
        raise LookupError("no terminal")

    meter = Meter("restore", "it", fail)
    meter._reported_at -= 1  # so that the next report is due
    return meter


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        (lambda: {"place": out_of_memory}, RuntimeError, "RESOURCE_EXHAUSTED"),
        (lambda: {"seconds": 0}, store.UnavailableError, "to end within 0 s"),
        (lambda: {"meter": failing_meter()}, CallbackFailedError, "CallbackFailed"),
    ],
    ids=["device", "deadline", "callback"],
)
def test_a_process_that_fails_during_exchange_is_reported_to_the_others(
    opened: TreeReader,
    options: Callable[[], dict[str, Any]],
    kind: type[BaseException],
    text: str,
) -> None:
    def part(job: ThreadProcess) -> None:
        Reading(opened, job).read(**options() if job.index == 1 else {})

    first, failed, third = ThreadJob(COUNT).run(part)

    assert isinstance(failed, kind), failed
    check_peer_failures([first, third], "process 1", text)


def test_a_process_that_needs_fewer_leaves_reads_its_share_for_the_others(
    opened: TreeReader,
) -> None:
    def part(job: ThreadProcess) -> dict[str, Any]:
        reading = Reading(opened, job)
        if job.index == 1:
            del reading.rows[::2]
        reading.read()
        return reading.found

    results = ThreadJob(COUNT).run(part)

    for index, found in enumerate(results):
        assert isinstance(found, dict), found
        wanted = sorted(LEAVES)[1::2] if index == 1 else sorted(LEAVES)
        assert wanted == sorted(found)
        assert all(np.array_equal(LEAVES[key], found[key]) for key in wanted)


@pytest.mark.parametrize("stage_bytes", [400_000, 1 << 30])
def test_a_chunk_that_the_exchange_corrupts_is_read_from_the_storage(
    opened: TreeReader,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    stage_bytes: int,
) -> None:
    monkeypatch.setattr(spread, "STAGE_BYTES", stage_bytes)
    corrupted: list[int] = []

    def part(job: ThreadProcess) -> dict[str, Any]:
        reading = Reading(opened, job)

        def gather(own: Any, processes: Sequence[int]) -> Sequence[Any]:
            brought = [np.array(each) for each in job.gather(own, processes)]
            has_chunks = len(brought[0]) > spread.HEADER_BYTES
            if job.index == 1 and has_chunks and not corrupted:
                corrupted.append(1)
                brought[0][spread.HEADER_BYTES + 9] ^= (
                    1  # of the elements, not of the header or the tail
                )
            return brought

        reading.source.gather = gather
        reading.read()
        return reading.found

    with caplog.at_level(logging.WARNING):
        results = ThreadJob(COUNT).run(part)

    for found in results:
        assert isinstance(found, dict), found
        check_leaves(found)
    (warning,) = [m for m in caplog.messages if "reading them from the storage" in m]
    assert "corrupted in the exchange between processes" in warning


@pytest.mark.parametrize("slice_bytes", [1_001, 40_002, 160_004, 1 << 20])
def test_rounds_stay_within_their_limit_and_chunks_arrive_whole(
    opened: TreeReader, monkeypatch: pytest.MonkeyPatch, slice_bytes: int
) -> None:
    """A round may end anywhere in a chunk, also within the checksum at its end."""
    monkeypatch.setattr(spread, "ROUND_BYTES", COUNT * slice_bytes)

    def part(job: ThreadProcess) -> tuple[dict[str, Any], int]:
        reading, sizes = Reading(opened, job), list[int]()
        watch_gathers(reading, job, lambda own: sizes.append(len(own)))
        reading.read()
        return reading.found, max(sizes)

    for result in ThreadJob(COUNT).run(part):
        assert isinstance(result, tuple), result
        found, most = result
        assert spread.HEADER_BYTES < most
        assert most <= spread.HEADER_BYTES + min(slice_bytes, spread.SLICE_BYTES)
        check_leaves(found)


@pytest.mark.parametrize("budget_bytes", [1, 400_000, 1 << 30])
def test_the_buffers_of_exchanged_leaves_fit_into_the_budget(
    opened: TreeReader, monkeypatch: pytest.MonkeyPatch, budget_bytes: int
) -> None:
    monkeypatch.setattr(spread, "STAGE_BYTES", budget_bytes)

    def part(job: ThreadProcess) -> tuple[dict[str, Any], int]:
        reading = Reading(opened, job)
        return reading.found, reading.read()

    for result in ThreadJob(COUNT).run(part):
        assert isinstance(result, tuple), result
        found, peak = result
        assert peak <= max(budget_bytes, *(leaf.nbytes for leaf in LEAVES.values()))
        check_leaves(found)


def rounds_with_a_failure(opened: TreeReader) -> list[int]:
    """Returns the rounds of each process, of which one cannot use what it received."""

    def part(job: ThreadProcess) -> int:
        reading, rounds = Reading(opened, job), list[Any]()
        watch_gathers(reading, job, rounds.append)
        place: Any = {"place": out_of_memory} if job.index == 1 else {}
        with pytest.raises((RuntimeError, store.PeerFailedError)):
            reading.read(**place)
        return len(rounds)

    results = ThreadJob(COUNT).run(part)
    rounds = [n for n in results if isinstance(n, int)]
    assert len(rounds) == len(results), results
    return rounds


def test_a_failure_ends_the_exchanges_of_all_stages(
    opened: TreeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spread, "STAGE_BYTES", 1)  # a stage for each leaf

    # 1 to meet, 2 or 3 for the first leaf, 1 to report the error
    assert all(n <= 5 for n in rounds_with_a_failure(opened))


class Slow:
    """A slow source of chunks."""

    def __init__(self, inner: Any, seconds: float) -> None:
        self.inner = inner
        self.seconds = seconds

    def read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        time.sleep(self.seconds)
        self.inner.read(ordinals, assembly)


def test_ctrl_c_ends_all_processes_after_the_current_round(
    opened: TreeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = threading.local()

    def wait(*args: Any) -> Any:
        if getattr(interrupted, "in", None):
            interrupted.__dict__.clear()
            raise KeyboardInterrupt
        return futures.wait(*args)

    monkeypatch.setattr(spread, "wait", wait)

    def part(job: ThreadProcess) -> None:
        interrupted.__dict__.update({"in": job.index == 1})
        Reading(opened, job).read()

    first, failed, third = ThreadJob(COUNT).run(part)

    assert isinstance(failed, KeyboardInterrupt), failed
    check_peer_failures([first, third], "process 1", "KeyboardInterrupt")


def test_the_exchange_ends_once_a_process_has_failed(
    opened: TreeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spread, "ROUND_BYTES", COUNT * 10_000)

    # 1 to meet, 17 for the first chunks, 1 to report the error; all would be some 64
    assert all(n < 25 for n in rounds_with_a_failure(opened))


@pytest.mark.usefixtures("impatient")
def test_an_absent_process_is_not_waited_for_beyond_the_deadline(
    opened: TreeReader,
) -> None:
    def part(job: ThreadProcess) -> None:
        reading = Reading(opened, job)
        if job.index != 1:
            reading.read(seconds=0.2)

    first, _, third = ThreadJob(COUNT).run(part)

    for error in (first, third):
        assert isinstance(error, store.UnavailableError), error
        assert "12 chunks of 1 data files are missing" in str(error), error


@pytest.mark.usefixtures("impatient")
def test_a_failed_process_is_not_waited_for(
    opened: TreeReader, left: threading.Event
) -> None:
    def part(job: ThreadProcess) -> None:
        if job.index == 1:
            job.post("failure", "process 1: no device")
        else:
            Reading(opened, job).read()

    first, _, third = ThreadJob(COUNT).run(part)

    check_peer_failures([first, third], "process 1: no device")
    assert left.is_set()


def test_an_error_that_utf_8_cannot_encode_is_reported(opened: TreeReader) -> None:
    def place(buffers: Iterable[Buffer]) -> None:
        raise OSError("cannot read \udcff")

    def part(job: ThreadProcess) -> None:
        options: Any = {"place": place} if job.index == 1 else {}
        Reading(opened, job).read(**options)

    first, failed, third = ThreadJob(COUNT).run(part)

    assert isinstance(failed, OSError)
    assert all("cannot read ?" in str(other) for other in (first, third))


@pytest.mark.slow
def test_a_deadline_error_names_the_deadline_of_the_whole_restore(
    opened: TreeReader,
) -> None:
    def part(job: ThreadProcess) -> None:
        reading = Reading(opened, job)
        if job.index == 1:
            reading.source.inner = Slow(reading.source.inner, 0.6)
        reading.read(seconds=1.0)

    _, failed, _ = ThreadJob(COUNT).run(part)

    assert isinstance(failed, store.UnavailableError), failed
    assert "to end within 1 s" in str(failed)


def test_bytes_read_for_other_processes_count_as_read(opened: TreeReader) -> None:
    def part(job: ThreadProcess) -> int:
        reading = Reading(opened, job)
        if job.index == 1:
            del reading.rows[:]
        reading.read()
        return reading.source.read_bytes

    results = ThreadJob(COUNT).run(part)

    assert sum(leaf.nbytes + 4 for leaf in LEAVES.values()) == sum(results)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_the_first_error_is_raised_even_if_it_cannot_be_reported(
    opened: TreeReader,
) -> None:
    def part(job: ThreadProcess) -> None:
        reading, met = Reading(opened, job), list[Any]()

        def hang(own: Any) -> None:
            met.append(own)
            if len(met) > 4:
                time.sleep(1)
                raise LookupError

        if job.index == 1:
            watch_gathers(reading, job, hang)
        place: Any = {"place": out_of_memory} if job.index == 0 else {}
        reading.read(seconds=0.5, **place)

    first, _, third = ThreadJob(COUNT).run(part)

    assert isinstance(first, RuntimeError), first
    assert isinstance(third, store.StoreError), third


def test_no_exchange_starts_after_an_abandoned_exchange(
    opened: TreeReader, left: threading.Event
) -> None:
    left.set()

    results = ThreadJob(COUNT).run(lambda job: Reading(opened, job).read())

    for each in results:
        assert isinstance(each, store.UnavailableError), each
        assert "start the job again, or restore with Distributed(spread=False)" in str(
            each
        )


@pytest.mark.slow
@pytest.mark.parametrize("error", [None, RuntimeError("no device")], ids=str)
def test_ctrl_c_during_an_exchange_is_raised_and_abandons_it(
    opened: TreeReader, left: threading.Event, error: Exception | None
) -> None:
    never = threading.Event()

    def interrupted() -> str:
        raise KeyboardInterrupt

    reading = Reading(opened, ThreadJob(COUNT).process(0))
    reading.source.gather = lambda *_: never.wait(60)  # type: ignore[assignment]
    reading.source.failure = interrupted
    reading.source._error = error
    try:
        with pytest.raises(KeyboardInterrupt):
            reading.read()
        assert left.is_set()
    finally:
        never.set()


def test_a_failed_exchange_raises_its_cause(opened: TreeReader) -> None:
    def gather(own: Any, processes: Sequence[int]) -> Sequence[Any]:
        raise RuntimeError("gather") from LookupError("what jax says")

    reading = Reading(opened, ThreadJob(COUNT).process(0))
    reading.source.gather = gather

    with pytest.raises(RuntimeError, match="gather") as caught:
        reading.read()

    assert isinstance(caught.value.__cause__, LookupError)
