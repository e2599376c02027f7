"""The data iterator of a training loop: every example once, whatever happens."""

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
import pytest

import storesvc_client as store
from tests.loop import data_parts
from tests.loop.data_parts import BATCH, KINDS, STEPS
from tests.support.jax_job import JaxJob, run_job

PART = "tests.loop.data_parts:trains"


# --- one process ---------------------------------------------------------------------


def batches() -> Any:
    return iter(grain.MapDataset.range(100).shuffle(1).to_iter_dataset().batch(4))


def train(run: store.Run, data: Any, *, until: int, fails_at: int = -1) -> list[Any]:
    """Trains to a step; returns the batches that were trained on."""
    seen = []
    with run.loop(every=store.Steps(4), create=True) as loop:
        state, start = loop.restore_or({"sum": jnp.zeros(())}, data=data)
        for step in loop.steps(start, until):
            batch = next(data)
            if step == fails_at:
                raise ZeroDivisionError
            seen.append(batch.tolist())
            state = {"sum": state["sum"] + batch.sum()}
            loop.after(step, state, items={"data": data})
    return seen


@pytest.mark.slow
def test_a_loop_goes_on_with_the_batch_after_the_restored_step(run: store.Run) -> None:
    expected = [batch.tolist() for batch in batches()]

    with pytest.raises(ZeroDivisionError):
        train(run, batches(), until=20, fails_at=11)
    run.wait()
    assert [0, 4, 8] == run.steps()
    seen = train(run, batches(), until=20)  # steps 9 and 10 were not saved
    seen += train(run, batches(), until=25)

    assert expected[9:] == seen
    sums = np.asarray(run.restore("latest")["sum"])
    assert np.arange(100).sum() == sums


@pytest.mark.slow
def test_a_loop_takes_the_state_of_the_step_that_it_saves(run: store.Run) -> None:
    data = batches()
    expected = [batch.tolist() for batch in batches()]
    with run.loop(every=store.Steps(2), create=True) as loop:
        state, start = loop.restore_or({"x": np.zeros(1 << 22)}, data=data)
        for step in loop.steps(start, 6):
            next(data)
            loop.after(step, state, items={"data": data})
    assert [0, 2, 4, 5] == run.steps()
    for step in run.steps():
        new = batches()
        run.items(step).restore_into("data", new)
        assert expected[step + 1] == next(new).tolist()


def test_a_loop_that_restores_an_iterator_must_save_it(run: store.Run) -> None:
    state = {"x": np.zeros(3)}
    for items in (None, {"other": 1}):
        with run.loop(every=store.Steps(1), create=True) as loop:
            loop.restore_or(state, data=batches())
            with pytest.raises(
                store.InvalidRequestError,
                match=r"after: expected the data iterator of restore_or in items=",
            ):
                loop.after(0, state, items=items)


def test_a_checkpoint_without_the_iterator_is_not_continued(run: store.Run) -> None:
    run.save(3, {"x": np.zeros(3)}, items={"config": 1}).result()

    with (
        pytest.raises(store.NotFoundError, match="no item 'data'; it has: config"),
        run.loop(every=store.Steps(1)) as loop,
    ):
        loop.restore_or({"x": np.zeros(3)}, data=batches())


def test_an_object_without_a_state_is_rejected_before_the_restore(
    run: store.Run,
) -> None:
    with (
        pytest.raises(
            store.InvalidRequestError,
            match=r"data=: expected an iterator with get_state .*, got <list_iterator",
        ),
        run.loop(every=store.Steps(1), create=True) as loop,
    ):
        loop.restore_or({"x": np.zeros(3)}, data=iter([1]))


# --- jobs ----------------------------------------------------------------------------


def has_lines(log: Path, count: int) -> bool:
    return log.exists() and len(log.read_text().splitlines()) >= count


def lines(log: Path, phase: int, index: int) -> dict[int, dict[str, Any]]:
    """Returns what a process trained on, by step."""
    texts = (log / f"{phase}-{index}").read_text().splitlines(keepends=True)
    found = [json.loads(text) for text in texts if text.endswith("\n")]
    return {line["step"]: line for line in found}


def seen_by_all(log: Path, phase: int, count: int, kind: str) -> dict[int, list[int]]:
    """Returns the global batches of the steps that all processes of a job trained."""
    parts = [lines(log, phase, index) for index in range(count)]
    steps = set.intersection(*(set(part) for part in parts))
    return {
        step: sorted(itertools.chain(*(part[step][kind] for part in parts)))
        for step in steps
    }


@pytest.mark.slow
def test_every_example_is_trained_on_once_by_4_then_2_then_3_processes(
    tmp_path: Path,
) -> None:
    target, log = (tmp_path / "store").as_uri(), tmp_path / "log"
    log.mkdir()
    counts, starts = [4, 2, 2, 3], [0]
    arguments: dict[str, Any] = {"target": target, "log": str(log)}
    for phase, count in enumerate(counts[:-1]):
        killed = {**arguments, "phase": phase, "pause": 0.1}
        job = JaxJob(PART, count, 1, killed)
        try:
            job.start()
            job.await_condition(partial(has_lines, log / f"{phase}-0", 13))
        finally:
            job.kill()  # SIGKILL
        with store.connect(target) as client:
            starts.append(client.run(data_parts.RUN).steps()[-1] + 1)
    outcomes = run_job(PART, 3, devices=1, **arguments, phase=len(counts) - 1)

    # The state has seen each example once, by each of the iterators.
    for outcome in outcomes:
        assert starts[-1] == outcome["start"]
        assert {kind: [1] * BATCH * STEPS for kind in KINDS} == outcome["counts"]
        assert [False, False] == outcome["rest"]

    # So have the logs: each job trained on what those before had not committed.
    order = list(data_parts.examples())
    expected = {
        step: sorted(order[step * BATCH : (step + 1) * BATCH]) for step in range(STEPS)
    }
    ends = [*starts[1:], STEPS]
    for kind in KINDS:
        merged: dict[int, list[int]] = {}
        for phase, (start, end, count) in enumerate(
            zip(starts, ends, counts, strict=True)
        ):
            seen = seen_by_all(log, phase, count, kind)
            assert start == min(seen)
            assert end <= max(seen) + 1
            assert all(expected[step] == batch for step, batch in seen.items()), kind
            merged |= {step: seen[step] for step in range(start, end)}
        assert sorted(order) == sorted(itertools.chain(*merged.values()))

    # A state of one process's part is taken up by as many processes only.
    for index in range(2):
        before, after = lines(log, 1, index), lines(log, 2, index)
        again = before.keys() & after.keys()
        assert again
        assert [before[s]["own"] for s in again] == [after[s]["own"] for s in again]
    message = (
        "item 'own': expected a job of the 2 processes that saved a state each, got "
        "one of 3; an iterator that is to go on with another number must be saved as"
    )
    assert all(message in outcome["refused"] for outcome in outcomes)
