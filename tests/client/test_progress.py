"""Saves and restores report their progress, and finally the timings of each part."""

import io
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import storesvc_client as store
from storesvc_client._telemetry import progress as _progress
from storesvc_client._telemetry.progress import Meter
from storesvc_client._telemetry.reports import PhaseSpan
from tests.support.server_process import ServerProcess

MiB = 1 << 20

THREADS = 4 * (os.cpu_count() or 1) + 16
"""More than one save or restore has."""

SAVE_PHASES = {"plan", "snapshot", "begin", "digest", "commit"}
RESTORE_PHASES = {"plan", "read", "verify", "place", "rebuild"}


@pytest.fixture(params=["direct", "streamed"])
def client(
    request: pytest.FixtureRequest, server: ServerProcess, tmp_path: Path
) -> Iterator[store.Client]:
    """A client in direct mode, or one that streams through a server."""
    is_direct = request.param == "direct"
    with store.connect(tmp_path.as_uri() if is_direct else server.address) as client:
        yield client


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every chunk report progress."""
    monkeypatch.setattr(_progress, "INTERVAL_SECONDS", 0.0)


def the_state() -> dict[str, Any]:
    """Returns large leaves of one chunk each, and many small ones that share a read."""
    return {
        "large": [jnp.arange(MiB, dtype=jnp.float32) + n for n in range(4)],
        "small": {f"{n:03}": np.full(16, n, np.float32) for n in range(200)},
    }


def stored_bytes(leaf: store.LeafInfo) -> int:
    """Returns the stored bytes of a leaf: its chunks, with a checksum each."""
    elements = math.prod(leaf.chunk_shape)
    return leaf.chunk_count * (elements * np.dtype(leaf.dtype).itemsize + 4)


def check(news: list[store.Progress], *, what: str, name: str) -> None:
    """Checks the progress that a successful save or restore reported."""
    assert {(what, name, news[-1].total_bytes)} == {
        (one.what, one.name, one.total_bytes) for one in news
    }
    assert sorted(one.done_bytes for one in news) == [one.done_bytes for one in news]
    assert sorted(one.seconds for one in news) == [one.seconds for one in news]
    assert [len(news) - 1] == [at for at, one in enumerate(news) if one.is_done]
    assert news[-1].total_bytes == news[-1].done_bytes
    assert "" == news[-1].slowest


def check_timings(timings: Mapping[str, float], seconds: float) -> None:
    """Checks that no phase took longer than the threads had time."""
    assert all(spent >= 0 for spent in timings.values())
    assert sum(timings.values()) <= THREADS * seconds


@pytest.mark.usefixtures("eager")
def test_a_save_reports_its_progress(run: store.Run) -> None:
    news: list[store.Progress] = []

    report = run.save(1, the_state(), progress=news.append).report()

    check(news, what="save", name=f"{run.name}@1")
    assert len(news) > 2
    assert report.total_bytes == news[-1].total_bytes
    assert 0 < news[-1].rate_bytes_per_second <= report.total_bytes / report.seconds
    assert all(one.slowest for one in news[:-1])


@pytest.mark.usefixtures("eager")
def test_reused_chunks_count_as_done(run: store.Run) -> None:
    state = the_state()
    news: list[store.Progress] = []
    run.save(1, state).result()
    state["small"]["007"] = np.zeros(16, np.float32)

    report = run.save(2, state, progress=news.append).report()

    check(news, what="save", name=f"{run.name}@2")
    assert report.reused_bytes > 16 * MiB
    assert report.total_bytes == news[-1].done_bytes


@pytest.mark.usefixtures("eager")
def test_chunks_found_in_the_store_count_as_done(
    client: store.Client, run: store.Run
) -> None:
    news: list[store.Progress] = []
    run.save(1, the_state()).result()
    stranger = client.run(run.name)  # which remembers no sums

    report = stranger.save(2, the_state(), progress=news.append).report()

    check(news, what="save", name=f"{run.name}@2")
    assert 0 == report.sent_bytes


@pytest.mark.usefixtures("eager")
def test_a_restore_reports_its_progress(run: store.Run) -> None:
    run.save(1, the_state()).result()
    opened = run.open(1)
    news: list[store.Progress] = []

    opened.restore(progress=news.append)

    check(news, what="restore", name=f"{run.name}@1")
    assert len(news) > 2
    assert sum(map(stored_bytes, opened.leaves.values())) == news[-1].total_bytes


@pytest.mark.usefixtures("eager")
def test_a_selective_restore_counts_only_selected_bytes(run: store.Run) -> None:
    run.save(1, the_state()).result()
    news: list[store.Progress] = []

    run.restore(1, select=["small/00*"], progress=news.append)

    check(news, what="restore", name=f"{run.name}@1")
    assert 10 * (16 * 4 + 4) == news[-1].total_bytes


class Broken(list[store.Progress]):
    """A callback that keeps what it gets, and fails."""

    def __call__(self, progress: store.Progress) -> None:
        self.append(progress)
        raise BrokenPipeError("the terminal has gone")


@pytest.mark.usefixtures("eager")
def test_an_error_of_a_callback_ends_a_restore(run: store.Run) -> None:
    run.save(1, the_state()).result()
    opened, news = run.open(1), Broken()

    with pytest.raises(BrokenPipeError, match="the terminal has gone"):
        opened.restore(progress=news)

    assert [False] == [one.is_done for one in news]
    assert opened.report is None
    assert 7.0 == opened.restore()["small"]["007"][0]


def test_an_error_of_the_last_callback_fails_a_restore(run: store.Run) -> None:
    run.save(1, {"x": np.ones(3)}).result()

    def broken(progress: store.Progress) -> None:
        if progress.is_done:
            raise KeyError("done")

    with pytest.raises(KeyError, match="done"):
        run.restore(1, progress=broken)


@pytest.mark.usefixtures("eager")
def test_an_error_of_a_callback_is_raised_after_the_commit(run: store.Run) -> None:
    news = Broken()

    save = run.save(1, the_state(), progress=news)
    with pytest.raises(BrokenPipeError, match="the terminal has gone"):
        save.result()

    assert 1 == len(news)
    assert 1 == run.latest().step
    assert 7.0 == run.restore(1)["small"]["007"][0]


@pytest.mark.usefixtures("eager")
def test_an_unseen_error_of_a_callback_is_raised_by_the_next_call(
    run: store.Run,
) -> None:
    run.save(1, the_state(), progress=Broken())

    with pytest.raises(BrokenPipeError, match="the terminal has gone"):
        run.wait()
    assert 2 == run.save(2, the_state()).result().step


def test_a_failed_save_calls_the_callback_a_last_time(run: store.Run) -> None:
    run.save(1, {"x": np.ones(3)}).result()
    news: list[store.Progress] = []

    save = run.save(1, {"x": np.ones(3)}, progress=news.append)

    with pytest.raises(store.AlreadyExistsError):
        save.result()
    assert [(True, 0)] == [(one.is_done, one.done_bytes) for one in news]


@pytest.mark.usefixtures("eager")
def test_a_callback_is_called_by_one_thread_at_a_time(run: store.Run) -> None:
    busy, overlaps = threading.Lock(), list[store.Progress]()

    def slow(progress: store.Progress) -> None:
        if not busy.acquire(blocking=False):
            overlaps.append(progress)
            return
        time.sleep(0.002)
        busy.release()

    run.save(1, the_state(), progress=slow).result()
    run.restore(1, progress=slow)

    assert [] == overlaps


def test_the_report_of_a_save_has_the_timings(run: store.Run) -> None:
    report = run.save(1, the_state()).report()

    check_timings(report.timings, report.seconds)
    ways = [{"write", "sync"}, {"send", "acknowledge"}]
    assert SAVE_PHASES <= report.timings.keys()
    assert any(way <= report.timings.keys() for way in ways)


def test_the_report_of_a_restore_has_the_timings(run: store.Run) -> None:
    run.save(1, the_state()).result()
    opened = run.open(1)
    assert opened.report is None

    state = opened.restore()

    report = opened.report
    assert report is not None
    check_timings(report.timings, report.seconds)
    assert RESTORE_PHASES <= report.timings.keys()
    assert 16 * MiB + 200 * 64 == report.returned_bytes
    assert sum(map(stored_bytes, opened.leaves.values())) == report.read_bytes
    assert 3.0 == state["large"][3][0]


@pytest.mark.slow
def test_the_server_logs_bytes_and_seconds_of_each_stream_and_commit(
    start_server: Callable[[], ServerProcess],
) -> None:
    server = start_server()
    with store.connect(server.address) as client:
        run = client.run("tests/logged")
        run.save(1, the_state()).result()
        run.restore(1)

    seconds = r"\d+ bytes in [\d.]+ s"
    for line in (
        rf"WriteChunks tests/logged@1: {seconds} \(client .*, sums .*, storage .*\)",
        rf"CommitUpload tests/logged@1: {seconds}",
        rf"ReadChunks tests/logged@1: {seconds} \(storage [\d.]+, client [\d.]+\)",
    ):
        assert re.search(f"INFO storesvc.rpc.*{line}\n", server.log), line


class Clock:
    """A clock that changes only when a test sets its seconds."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_a_meter_reports_at_most_ten_times_a_second() -> None:
    clock, news = Clock(), list[store.Progress]()
    meter = Meter("save", "a/b@1", news.append, clock=clock)

    with meter:
        for _ in range(100):
            clock.seconds += 0.03125
            meter.add(1)

    # each fourth is the first that is late enough
    assert [*range(4, 101, 4), 100] == [one.done_bytes for one in news]


def test_a_meter_names_the_longest_running_part() -> None:
    clock, news = Clock(), list[store.Progress]()
    meter = Meter("save", "a/b@1", news.append, clock=clock)
    meter.total_bytes = 4

    with meter, meter.part("file 1"):
        clock.seconds += 2
        with meter.phase("write"):
            clock.seconds += 3
            meter.add(4)
        meter.spend("write", since=101, until=102)
        meter.spend("sync", since=104.5)

    (first, last) = news
    assert ("file 1", 5, 5, {}) == (
        first.slowest,
        first.slowest_seconds,
        first.seconds,
        first.timings,
    )
    assert 0.8 == first.rate_bytes_per_second
    assert {"write": 4, "sync": 0.5} == last.timings == meter.timings
    assert meter.timeline == (
        PhaseSpan(name="write", start_seconds=1, end_seconds=5, busy_seconds=4),
        PhaseSpan(name="sync", start_seconds=4.5, end_seconds=5, busy_seconds=0.5),
    )


class Screen(io.StringIO):
    """Output to a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("eager")
def test_a_terminal_gets_a_bar_for_each_save_and_restore(
    run: store.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, bar = Screen(), store.progress_bar()
    monkeypatch.setattr("sys.stderr", screen)

    run.save(1, the_state(), progress=bar).result()
    run.restore(1, progress=bar)

    lines = screen.getvalue().replace("\r", "\n").splitlines()
    for what in ("save", "restore"):
        full = [x for x in lines if x.startswith(f"{what} ") and " 100%|" in x]
        assert full, lines
        assert full[-1].startswith(f"{what} {run.name}@1: 100%|")


def test_no_bar_is_shown_without_a_terminal(
    run: store.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)

    run.save(1, the_state(), progress=store.progress_bar()).result()

    assert "" == file.getvalue()
