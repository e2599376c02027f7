"""Imports: every bit of a foreign step becomes a checkpoint, once."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import storesvc_client as store
from storesvc.format.grids import Region
from storesvc.format.trees import Tree
from storesvc_client import ForeignRun
from storesvc_client._chunks.memory import ExtentPool
from storesvc_client._foreign.foreign_step import ForeignArray, ForeignStep, Reading
from tests.foreign.zarr_format import ZarrRoot, sample_arrays

CHUNKS = {"params/dense/kernel": (10, 5), "params/table": (3000, 1000)}
TABLE = np.arange(6_000_000, dtype=np.float32).reshape(3000, 2000)
"""Its foreign chunks have 12 MB; ours have that, too."""


@pytest.fixture
def root(tmp_path: Path) -> ZarrRoot:
    """A location with the steps 100 and 200, which differ in the step."""
    root = ZarrRoot(tmp_path / "foreign")
    for step in (100, 200):
        arrays = sample_arrays() | {"step": np.array(step)}
        root.write(step, arrays, chunks=CHUNKS, metrics={"loss": 1 / step})
    return root


def leaves_of(run: store.Run, step: int) -> dict[str, NDArray[Any]]:
    opened = run.open(step)
    return {leaf.key: array for leaf, array in opened.read(opened.leaves)}


def test_every_bit_of_each_step_is_imported(root: ZarrRoot, run: store.Run) -> None:
    run.import_from(ForeignRun(root))

    assert [100, 200] == run.steps()
    for step in run.steps():
        expected = sample_arrays() | {"step": np.array(step)}
        found = leaves_of(run, step)
        assert expected.keys() == found.keys()
        for key, array in expected.items():
            assert (array.dtype, array.shape) == (found[key].dtype, found[key].shape)
            assert array.tobytes() == found[key].tobytes()
        assert run.verify(step).ok


def test_an_imported_checkpoint_has_its_metrics_and_its_provenance(
    root: ZarrRoot, run: store.Run
) -> None:
    (done,) = run.import_from(ForeignRun(root), steps=[200], labels={"team": "a"})

    found = run.checkpoint(200)
    assert {"loss": 1 / 200} == found.metrics
    assert {
        "custom": "kept",
        "team": "a",
        "import.url": f"{root.url}/200",
        "import.format": "zarr",
        "import.digest": root.open(200).digest,
        "import.create_time": "2026-01-02T03:00:00+00:00",
        "import.time": found.labels["import.time"],
    } == found.labels
    assert (f"{root.url}/200", True, False) == (
        done.source,
        done.is_new,
        done.is_verified,
    )


def test_a_location_whose_url_is_too_long_for_a_label_is_imported(
    tmp_path: Path, run: store.Run
) -> None:
    deep = ZarrRoot(tmp_path / ("deep" * 30) / ("ü" * 100) / "end")
    deep.write(1, {"w": np.ones(3)})

    (done,) = run.import_from(ForeignRun(deep))
    (again,) = run.import_from(ForeignRun(deep))

    assert (True, False) == (done.is_new, again.is_new)
    label = run.checkpoint(1).labels["import.url"]
    assert label.startswith("...")
    assert label.endswith("ü/end/1")
    assert done.source == f"{deep.url}/1"


def test_a_second_import_reads_and_stores_nothing(
    root: ZarrRoot, run: store.Run
) -> None:
    first = run.import_from(ForeignRun(root))
    root.arrays.clear()

    second = run.import_from(ForeignRun(root))

    assert [True, True] == [done.is_new for done in first]
    assert [False, False] == [done.is_new for done in second]
    assert [done.checkpoint for done in first] == [done.checkpoint for done in second]
    assert 0 == sum(array.read_count for array in root.arrays)


def test_a_step_shares_the_chunks_of_the_one_before_it(
    root: ZarrRoot, run: store.Run
) -> None:
    first, second = run.import_from(ForeignRun(root))

    step_bytes = 8 + 4
    assert (first.sent_bytes, 0) == (first.checkpoint.stored_bytes, first.reused_bytes)
    assert step_bytes == second.sent_bytes
    assert second.checkpoint.stored_bytes - step_bytes == second.reused_bytes


class DeletingRoot(ZarrRoot):
    """A location; step 100 of the run is gone when step 200 is opened, as after a
    retention pass."""

    def __init__(self, path: Path, run: store.Run, *, purges: bool) -> None:
        super().__init__(path)
        self._run = run
        self._purges = purges

    def open(self, step: int) -> ForeignStep:
        if step == 200:
            self._run.delete(100)
            if self._purges:
                self._run.purge(100)
        return super().open(step)


@pytest.mark.parametrize("purges", [False, True])
def test_a_step_is_imported_whole_if_the_one_before_it_is_gone(
    root: ZarrRoot, run: store.Run, tmp_path: Path, *, purges: bool
) -> None:
    changing = DeletingRoot(tmp_path / "foreign", run, purges=purges)

    _, second = run.import_from(ForeignRun(changing))

    assert [200] == run.steps()
    assert (second.checkpoint.stored_bytes, 0) == (
        second.sent_bytes,
        second.reused_bytes,
    )
    assert run.verify(200).ok


@pytest.mark.slow
def test_each_foreign_chunk_is_read_once(tmp_path: Path, run: store.Run) -> None:
    root = ZarrRoot(tmp_path / "foreign")
    tall = np.arange(10_000_000, dtype=np.float32).reshape(5000, 2000)
    root.write(1, {"tall": tall}, chunks={"tall": (5000, 1000)})  # 20 MB: cut in two

    run.import_from(ForeignRun(root))

    assert [2] == [array.read_count for array in root.arrays]
    assert 4 == run.checkpoint(1).chunk_count
    assert tall.tobytes() == leaves_of(run, 1)["tall"].tobytes()


def test_a_step_that_was_saved_here_is_not_replaced(
    root: ZarrRoot, run: store.Run
) -> None:
    run.save(200, {"own": np.ones(3)}).result()

    with pytest.raises(store.AlreadyExistsError, match="that was not imported"):
        run.import_from(ForeignRun(root))
    assert [200] == run.steps()
    assert [100] == [
        d.checkpoint.step for d in run.import_from(ForeignRun(root), steps=[100])
    ]


def test_a_step_whose_files_changed_since_its_import_is_rejected(
    root: ZarrRoot, run: store.Run
) -> None:
    run.import_from(ForeignRun(root))
    root.write(200, {"z": np.ones(3)})

    with pytest.raises(store.AlreadyExistsError, match="before its files changed"):
        run.import_from(ForeignRun(root))


def test_a_step_that_is_missing_is_named_with_those_that_are_there(
    root: ZarrRoot, run: store.Run
) -> None:
    with pytest.raises(store.NotFoundError, match=r"step 150; has 100, 200"):
        run.import_from(ForeignRun(root), steps=[100, 150])
    assert [] == run.steps()


def test_a_location_without_steps_is_rejected(tmp_path: Path, run: store.Run) -> None:
    with pytest.raises(store.NotFoundError, match="no finished steps"):
        run.import_from(ForeignRun(ZarrRoot(tmp_path)))


@pytest.mark.parametrize("jobs", [0, True, "4"])
def test_a_number_of_jobs_that_is_none_is_rejected(
    jobs: Any, root: ZarrRoot, run: store.Run
) -> None:
    with pytest.raises(store.InvalidRequestError, match="jobs="):
        run.import_from(ForeignRun(root), jobs=jobs)


def test_a_label_of_the_provenance_cannot_be_given(
    root: ZarrRoot, run: store.Run
) -> None:
    with pytest.raises(store.InvalidRequestError, match=r"no label 'import\.url'"):
        run.import_from(ForeignRun(root), labels={"import.url": "elsewhere"})


def test_a_damaged_chunk_ends_the_import_after_the_steps_before_it(
    root: ZarrRoot, run: store.Run, tmp_path: Path
) -> None:
    damaged = tmp_path / "foreign" / "200" / "params/dense/kernel" / "0.0"
    damaged.write_bytes(damaged.read_bytes()[:-1])

    with pytest.raises(store.DataLossError, match="params/dense/kernel"):
        run.import_from(ForeignRun(root))
    assert [100] == run.steps()


class HugeRoot(ZarrRoot):
    """A location whose files claim an array of an exabyte."""

    def open(self, step: int) -> ForeignStep:
        found = super().open(step)
        huge = replace(found.tree.leaves[-1], shape=(1 << 30, 1 << 28))
        return replace(found, tree=Tree((*found.tree.leaves[:-1], huge)))


def test_a_shape_that_no_store_can_hold_is_rejected_before_anything_is_stored(
    tmp_path: Path, run: store.Run
) -> None:
    root = HugeRoot(tmp_path)
    root.write(1, {"params/table": TABLE}, chunks=CHUNKS)

    with pytest.raises(store.PreconditionError, match="expected at most 16,000,000"):
        run.import_from(ForeignRun(root))
    assert [] == list(run.uploads.list())


class Stopping(ForeignArray):
    """An array whose reads fail after some."""

    def __init__(self, array: ForeignArray, left: int) -> None:
        self._array = array
        self._left = left

    def read(self, region: Region, into: NDArray[Any]) -> Reading:
        self._left -= 1
        if self._left < 0:
            raise store.UnavailableError("the storage is gone")
        reading = self._array.read(region, into)
        reading.result()
        return reading


class WrappingRoot(ZarrRoot):
    """A location whose last array is read by another one."""

    def __init__(self, path: Path, wrap: Callable[[Any], ForeignArray]) -> None:
        super().__init__(path)
        self._wrap = wrap

    def open(self, step: int) -> ForeignStep:
        found = super().open(step)
        last = self._wrap(found.arrays[-1])
        return replace(found, arrays=[*found.arrays[:-1], last])


@pytest.mark.slow
def test_an_interrupted_step_is_resumed_with_what_was_stored(
    tmp_path: Path, client: store.Client, run: store.Run
) -> None:
    root = WrappingRoot(tmp_path, lambda table: Stopping(table, 1))
    root.write(1, {"params/table": TABLE}, chunks=CHUNKS)
    with pytest.raises(store.UnavailableError, match="the storage is gone"):
        run.import_from(ForeignRun(root))
    (left,) = run.uploads.list()

    (done,) = run.import_from(ForeignRun(ZarrRoot(tmp_path)))

    assert 1 == left.step
    assert [] == list(run.uploads.list())
    assert 12_000_004 == done.reused_bytes == done.sent_bytes
    assert TABLE.tobytes() == leaves_of(run, 1)["params/table"].tobytes()


class Interrupting(ForeignArray):
    """An array whose second read is interrupted, as by Ctrl-C or by a kill."""

    def __init__(
        self, array: ForeignArray, number: signal.Signals = signal.SIGINT
    ) -> None:
        self._array = array
        self._number = number
        self._reads = 0

    def read(self, region: Region, into: NDArray[Any]) -> Reading:
        self._reads += 1
        if self._reads == 2:
            os.kill(os.getpid(), self._number)
        return self._array.read(region, into)


def test_ctrl_c_ends_an_import_that_is_then_repeated(
    tmp_path: Path, run: store.Run
) -> None:
    root = WrappingRoot(tmp_path, Interrupting)
    root.write(1, {"params/table": TABLE}, chunks=CHUNKS)

    with pytest.raises(KeyboardInterrupt):
        run.import_from(ForeignRun(root))

    assert [] == run.steps()
    assert 1 == len(list(run.uploads.list()))  # which the next import takes over
    run.import_from(ForeignRun(ZarrRoot(tmp_path)))
    assert [] == list(run.uploads.list())
    assert TABLE.tobytes() == leaves_of(run, 1)["params/table"].tobytes()


class Pending(Future[None]):
    """A read that does not begin; the third wait for it ends with a call."""

    def __init__(self, third: Callable[[], None]) -> None:
        super().__init__()
        self._third = third
        self._waits = 0

    def result(self, timeout: float | None = None) -> None:
        self._waits += 1
        if self._waits == 3:
            self._third()
        return super().result(timeout)


class Waiting(ForeignArray):
    """An array whose reads do not begin; the first one fails, or is interrupted."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self.readings: list[Pending] = []

    def read(self, region: Region, into: NDArray[Any]) -> Reading:
        self.readings.append(Pending(self._end))
        return self.readings[-1]

    def _end(self) -> None:
        if self._error is None:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            self.readings[0].set_exception(self._error)


@pytest.mark.parametrize("error", [None, store.UnavailableError("it is gone")])
def test_reads_that_no_import_waits_for_any_more_are_cancelled(
    error: Exception | None, tmp_path: Path, run: store.Run
) -> None:
    last = Waiting(error)
    root = WrappingRoot(tmp_path, lambda _: last)
    root.write(1, {"params/table": TABLE}, chunks=CHUNKS)

    with pytest.raises(KeyboardInterrupt if error is None else type(error)):
        run.import_from(ForeignRun(root))

    left = last.readings if error is None else last.readings[1:]
    assert [True] * len(left) == [reading.cancelled() for reading in left]
    assert 2 == len(last.readings)


@pytest.mark.slow
def test_an_import_that_is_killed_is_repeated(tmp_path: Path) -> None:
    uri = (tmp_path / "store").as_uri()
    root = ZarrRoot(tmp_path / "foreign")
    for step in (1, 2):
        root.write(step, {"params/table": TABLE + step}, chunks=CHUNKS)
    program = f"""
import signal
from functools import partial
from pathlib import Path
import storesvc_client as store
from tests.foreign.test_importing import Interrupting, WrappingRoot
from storesvc_client import ForeignRun
from tests.foreign.zarr_format import ZarrRoot
folder = Path({str(tmp_path / "foreign")!r})
with store.connect({uri!r}) as client:
    run = client.run("a/b")
    run.import_from(ForeignRun(ZarrRoot(folder)), steps=[1])
    kill = partial(Interrupting, number=signal.SIGKILL)
    run.import_from(ForeignRun(WrappingRoot(folder, kill)))
"""
    killed = subprocess.run([sys.executable, "-c", program], check=False)

    assert -signal.SIGKILL == killed.returncode
    with store.connect(uri) as client:
        run = client.run("a/b")
        assert [1] == run.steps()
        again = run.import_from(ForeignRun(root))
        assert [False, True] == [done.is_new for done in again]
        for step in (1, 2):
            found = leaves_of(run, step)["params/table"]
            assert (TABLE + step).tobytes() == found.tobytes()


@pytest.mark.slow
def test_memory_stays_within_the_staging_budget(
    tmp_path: Path, server_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from storesvc_client._foreign import importing

    pools: list[Any] = []

    class Counted(ExtentPool):
        peak = 0

        def __init__(self, budget_bytes: int) -> None:
            super().__init__(24 << 20)
            pools.append(self)

        def give_back(self, buffer: Any) -> None:
            self.peak = max(self.peak, self.used_bytes)
            super().give_back(buffer)

    monkeypatch.setattr(importing, "ExtentPool", Counted)
    root = ZarrRoot(tmp_path)
    arrays = {f"t{i}": TABLE + i for i in range(3)}
    root.write(1, arrays, chunks=dict.fromkeys(arrays, (3000, 1000)))
    with store.connect(server_address) as client:
        run = client.run("tests/within-budget")
        run.import_from(ForeignRun(root))
        found = leaves_of(run, 1)["t2"]

    (pool,) = pools
    assert pool.peak <= 24 << 20
    assert arrays["t2"].tobytes() == found.tobytes()


@pytest.mark.slow
def test_an_import_needs_no_jax(root: ZarrRoot, tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
import storesvc_client as store
from storesvc_client import ForeignRun
from tests.foreign.zarr_format import ZarrRoot
with store.connect({(tmp_path / "store").as_uri()!r}) as client:
    root = ZarrRoot(Path({str(tmp_path / "foreign")!r}))
    client.run("a/b").import_from(ForeignRun(root))
assert "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
