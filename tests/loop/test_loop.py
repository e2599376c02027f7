"""The training loop in one process: saves, resumes, survives failures, ends."""

import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import storesvc_client as store
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc_client._rpc import retry
from tests.support.in_process_server import InProcessServer
from tests.support.saved_checkpoint import flip
from tests.support.server_process import ServerProcess

State = dict[str, Any]


def initial() -> State:
    return {"w": jnp.zeros(4), "n": np.int64(0)}


def trained(state: State) -> State:
    return {"w": state["w"] + 1, "n": state["n"] + 1}


def terminate_at(at: int) -> Callable[[int], None]:
    """Returns a function that sends SIGTERM to this process at a step."""

    def act(step: int) -> None:
        if step == at:
            os.kill(os.getpid(), signal.SIGTERM)

    return act


def run_steps(
    run: store.Run,
    total: int,
    *,
    init: Any = initial,
    act: Callable[[int], object] = lambda _: None,
    **options: Any,
) -> tuple[store.Loop, State]:
    """Trains up to ``total`` steps; ``act`` is called at each."""
    given: dict[str, Any] = {"every": store.Steps(10), "create": True} | options
    with run.loop(**given) as loop:
        state, start = loop.restore_or(init)
        for step in loop.steps(start, total):
            state = trained(state)
            act(step)
            loop.after(step, state, metrics={"n": state["n"]})
            run.wait()
    return loop, state


def test_a_loop_saves_multiples_and_the_last_step_and_resumes(run: store.Run) -> None:
    loop, _ = run_steps(run, 25)

    assert [0, 10, 20, 24] == run.steps()
    assert {"n": 25.0} == run.latest().metrics
    assert "finished at step 24; saved step 24" == loop.outcome
    assert (24, 0, 0, False) == (
        *(loop.saved_step, loop.failures, loop.skipped),
        loop.is_stopping,
    )
    assert loop.restored is None

    loop, state = run_steps(run, 32)

    assert [0, 10, 20, 24, 30, 31] == run.steps()
    assert 32 == state["n"]
    assert np.array_equal(np.full(4, 32), state["w"])
    assert loop.restored is not None
    assert 24 == loop.restored.info.step
    assert loop.restored.report is not None


def test_a_last_step_that_is_known_later_is_saved(run: store.Run) -> None:
    state = {"x": np.zeros(3)}
    with run.loop(every=store.Steps(100), create=True) as loop:
        for step in (1, 2, 3):  # nothing is due before step 100
            assert loop.after(step, state) is None
        for step in loop.steps(4, 7):
            loop.after(step, state)

    assert [6] == run.steps()


def test_a_loop_that_is_complete_trains_no_step_and_says_so(
    run: store.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run_steps(run, 25)
    capsys.readouterr()

    loop, state = run_steps(run, 25)

    resumed, complete = capsys.readouterr().err.splitlines()
    assert resumed.endswith("; continues at step 25")
    assert f"{run.name}: no step is left from 25 to 24" == complete
    assert 25 == state["n"]
    assert "no step was left; saved no step" == loop.outcome
    assert [0, 10, 20, 24] == run.steps()


@pytest.mark.slow
def test_a_loop_saves_by_the_clock(run: store.Run) -> None:
    every = store.Steps(1000) | store.Minutes(0.2 / 60)

    run_steps(run, 31, every=every, act=lambda _: time.sleep(0.05))

    steps = run.steps()
    assert 0 == steps[0]
    assert 30 == steps[-1]
    gaps = [b - a for a, b in itertools.pairwise(steps[:-1])]
    assert len(gaps) >= 2
    assert max(gaps) <= 5  # 0.2 s have passed after the fourth step at the latest


def test_after_returns_the_save_that_it_started(run: store.Run) -> None:
    with run.loop(every=store.Steps(2)) as loop:
        saves = [loop.after(step, initial()) for step in (0, 1)]
        assert saves[0] is not None
        assert 0 == saves[0].result().step
        assert saves[1] is None
        assert f"<Loop of {run.name}, at step 1>" == repr(loop)

    assert "ended at step 1; saved step 0" == loop.outcome
    assert 0 == loop.saved_step


def test_metrics_are_converted_only_for_a_save(run: store.Run) -> None:
    class Counted:
        floats = 0

        def __float__(self) -> float:
            Counted.floats += 1
            return 1.0

    with run.loop(every=store.Steps(100)) as loop:
        for step in range(50):
            loop.after(step, initial(), metrics={"loss": Counted()})

    assert 1 == Counted.floats


# Where to begin.


def test_a_run_that_does_not_exist_is_an_error_that_names_similar_ones(
    client: store.Client,
) -> None:
    client.run("tests/llama-8b").save(1, initial()).result()

    with pytest.raises(
        store.NotFoundError, match=r"tests/lama-8b .*tests/llama-8b.* pass create=True"
    ) as caught:
        run_steps(client.run("tests/lama-8b"), 5, create=False)
    assert "RUN_NOT_FOUND" == caught.value.reason
    assert "tests/lama-8b" not in [run.name for run in client.runs()]


def test_a_run_without_a_checkpoint_begins_with_the_initial_state(
    run: store.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.configure(labels={"team": "a"})

    run_steps(run, 5, create=False)

    assert [0, 4] == run.steps()
    assert (
        f"{run.name}: no checkpoint yet; starts from the initial state at step 0"
        in (capsys.readouterr().err)
    )


def test_a_program_that_resumes_says_so_though_it_sets_no_log_level(
    run: store.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run_steps(run, 5)
    capsys.readouterr()

    run_steps(run, 7)

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{run.name}: resumed step 4 (")
    assert line.endswith(" s); continues at step 5")


@pytest.mark.parametrize("name", ["", "storesvc_client"], ids=["root", "own logger"])
def test_a_program_that_sets_a_log_level_gets_records_only(
    name: str,
    run: store.Run,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO, logger=name)
    run_steps(run, 5)

    run_steps(run, 7)

    assert f"{run.name}: resumed step 4 (" in caplog.text
    assert f"saved {run.name}@6" in caplog.text
    assert "" == capsys.readouterr().err


def sharded() -> NamedSharding:
    return NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x"))


class Counted:
    """A compiled function that counts how often it is run."""

    def __init__(self, **shardings: Any) -> None:
        def zeros() -> State:
            return {"w": jnp.zeros(16), "n": jnp.int32(0)}

        self.compiled = jax.jit(zeros, out_shardings=shardings)
        self.eval_shape = self.compiled.eval_shape
        self.runs = 0

    def __call__(self) -> State:
        self.runs += 1
        made: State = self.compiled()
        return made


def test_a_compiled_init_with_shardings_is_not_run_for_a_restore(
    run: store.Run,
) -> None:
    everywhere = NamedSharding(sharded().mesh, PartitionSpec())
    init = Counted(w=sharded(), n=everywhere)
    run_steps(run, 5, init=init)
    assert 1 == init.runs

    _, state = run_steps(run, 7, init=init)

    assert 1 == init.runs
    assert sharded() == state["w"].sharding
    assert everywhere == state["n"].sharding
    assert 7 == state["n"]


def test_a_state_that_a_resume_would_reject_is_rejected_at_the_first_step(
    run: store.Run,
) -> None:
    """Flax creates a TrainState whose step is a Python number until the first step."""
    init = {"step": 0, "w": jnp.zeros(4), "old": 1.0}
    state = {"step": jnp.int32(1), "w": jnp.zeros(3), "new": 1.0}

    with run.loop(every=store.Steps(1000), create=True) as loop:
        loop.restore_or(init)
        with pytest.raises(store.MismatchError) as e:
            loop.after(1, state)

    for part in (
        f"{run.name}@1 could not be restored like the initial state of this loop: ",
        "leaf 'step': in the checkpoint () int32, in the target a Python scalar",
        "leaf 'w': in the checkpoint (3,) float32, in the target (4,) float32",
        "leaf 'old': not in the checkpoint, in the target a Python scalar (float64)",
        "leaf 'new': in the checkpoint a Python scalar (float64), not in the target",
        "; make both alike, for example with a jax.jit function for restore_or",
    ):
        assert part in str(e.value)
    assert [] == run.steps()


def test_values_may_change_their_form_where_a_resume_accepts_it(run: store.Run) -> None:
    with run.loop(every=store.Steps(1), create=True) as loop:
        loop.restore_or({"n": 1, "text": "a", "w": np.zeros(2)})
        loop.after(0, {"n": 2**70, "text": "longer", "w": np.ones(2)})
        loop.after(1, {"n": jnp.int32(1)})  # only the first step is compared

    like = {"n": 1, "text": "a", "w": np.zeros(2)}
    state = run.restore(0, like=like)
    assert (2**70, "longer") == (state["n"], state["text"])


def test_a_state_that_cannot_be_stored_is_rejected_by_its_save(run: store.Run) -> None:
    with run.loop(every=store.Steps(1), create=True) as loop:
        loop.restore_or({"x": 1})
        with pytest.raises(store.UnsupportedLeafError, match="leaf 'x'"):
            loop.after(0, {"x": object()})


def test_a_function_may_make_typed_prng_keys(run: store.Run) -> None:
    def init() -> Any:
        return {"key": jax.random.key(3), "w": jnp.zeros(4)}

    for start in (0, 1):
        with run.loop(every=store.Steps(1), create=True) as loop:
            state, found = loop.restore_or(init)
            loop.after(
                found,
                {"key": jax.random.fold_in(state["key"], found)}
                | {"w": state["w"] + 1},
            )
        assert start == found

    expected = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), 0), 1)
    key = run.restore(1, like=init())["key"]
    assert jnp.array_equal(jax.random.key_data(expected), jax.random.key_data(key))


def test_a_compiled_init_that_places_a_leaf_anywhere_is_run(run: store.Run) -> None:
    init = Counted(w=sharded(), n=None)
    run_steps(run, 5, init=init)

    _, state = run_steps(run, 7, init=init)

    assert 2 == init.runs
    assert sharded() == state["w"].sharding


def test_an_init_keeps_types_that_jax_does_not_have(run: store.Run) -> None:
    def init() -> Any:
        return {"w": jax.device_put(jnp.zeros(8), sharded()), "n": np.zeros(2), "i": 0}

    for total in (3, 5):
        with run.loop(every=store.Steps(10), create=True) as loop:
            state, start = loop.restore_or(init)
            for step in loop.steps(start, total):
                loop.after(step, state)

    assert sharded() == state["w"].sharding
    assert isinstance(state["n"], np.ndarray)
    assert 0 == state["i"]


@pytest.mark.slow
def test_a_run_that_was_rewound_saves_next_to_its_deleted_steps(
    run: store.Run, caplog: pytest.LogCaptureFixture
) -> None:
    run_steps(run, 31)
    run.delete(20)
    run.delete(30)

    loop, state = run_steps(run, 42)

    assert [0, 10, 21, 31, 40, 41] == run.steps()
    assert (42, 0, 0) == (int(state["n"]), loop.failures, loop.skipped)
    assert 22 == int(run.restore(21)["n"])
    assert f"{run.name} has deleted checkpoints from step 20 to 30" in caplog.text
    assert f"{run.name}@20 is not saved: a deleted checkpoint has" in caplog.text


def test_a_run_whose_checkpoints_are_all_deleted_starts_next_to_them(
    run: store.Run,
) -> None:
    run.save(0, initial()).result()
    run.delete(0)

    run_steps(run, 12)

    assert [1, 10, 11] == run.steps()


def test_sigterm_at_a_deleted_step_saves_the_next_one(run: store.Run) -> None:
    run_steps(run, 11)
    run.save(13, initial()).result()
    run.delete(13)

    loop, _ = run_steps(run, 100, act=terminate_at(13))

    assert [0, 10, 14] == run.steps()
    assert "received SIGTERM at step 13; saved step 14" == loop.outcome


@pytest.mark.parametrize(
    ("init", "got"),
    [(None, "None"), (lambda: None, "a function that returns None")],
    ids=["none", "function"],
)
def test_an_initial_state_that_is_none_is_rejected(
    run: store.Run, init: Any, got: str
) -> None:
    def restores() -> None:
        with (
            pytest.raises(store.InvalidRequestError, match=f"returns it, got {got}"),
            run.loop(every=store.Steps(1), create=True) as loop,
        ):
            loop.restore_or(init)

    restores()
    run.save(1, initial()).result()
    restores()


def test_an_interrupted_loop_says_so(
    run: store.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with (  # noqa: PT012 - what is raised within the loop is the test
        pytest.raises(KeyboardInterrupt),
        run.loop(every=store.Steps(10), create=True) as loop,
    ):
        assert f"<Loop of {run.name}, not at a step yet>" == repr(loop)
        loop.after(5, initial())
        raise KeyboardInterrupt

    outcome = "failed at step 5 (KeyboardInterrupt); saved no step"
    assert outcome == loop.outcome
    assert f"{run.name}: {outcome}\n" == capsys.readouterr().err


def test_a_module_that_is_callable_is_a_state(run: store.Run) -> None:
    @jax.tree_util.register_pytree_node_class
    class Module:
        def __init__(self, w: Any) -> None:
            self.w = w

        def __call__(self) -> None:
            raise AssertionError

        def tree_flatten(self) -> Any:
            return (self.w,), None

        @classmethod
        def tree_unflatten(cls, _: None, children: Any) -> "Module":
            return cls(*children)

    for expected in (0, 3):
        with run.loop(every=store.Steps(10), create=True) as loop:
            module, start = loop.restore_or(Module(jnp.zeros(2)))
            assert expected == start
            assert isinstance(module, Module)
            for step in loop.steps(start, start + 3):
                loop.after(step, module)


# Retention.


def test_keep_sets_the_policy_of_a_run_that_has_none(run: store.Run) -> None:
    keep = store.KeepLatest(3) | store.KeepEvery(steps=10_000)

    run_steps(run, 5, keep=keep)
    assert keep == run.retention.get()

    run_steps(run, 7, keep=keep)
    assert keep == run.retention.get()


def test_keep_does_not_create_a_run(run: store.Run) -> None:
    keep = store.KeepLatest(3)
    with (
        pytest.raises(store.NotFoundError),
        run.loop(every=store.Steps(1), keep=keep) as loop,
    ):
        loop.restore_or(initial)
    with pytest.raises(store.NotFoundError):
        run.info()

    with run.loop(every=store.Steps(1), keep=keep) as loop:
        loop.after(0, initial())  # the first save creates it

    assert keep == run.retention.get()


def test_another_policy_of_the_run_is_an_error(run: store.Run) -> None:
    run.retention.set(store.KeepLatest(9))

    with pytest.raises(
        store.PreconditionError,
        match=r"policy of the run, latest\(9\), got latest\(3\)",
    ):
        run_steps(run, 5, keep=store.KeepLatest(3))

    assert store.KeepLatest(9) == run.retention.get()
    run_steps(run, 5, keep=None)
    assert store.KeepLatest(9) == run.retention.get()


def test_a_policy_set_by_others_before_the_first_commit_stays(
    run: store.Run, caplog: pytest.LogCaptureFixture
) -> None:
    with run.loop(every=store.Steps(1), keep=store.KeepLatest(3)) as loop:
        run.retention.set(store.KeepLatest(9))
        for step in range(3):
            loop.after(step, initial())
            run.wait()

    assert store.KeepLatest(9) == run.retention.get()
    assert 1 == caplog.text.count("keep= of")


def test_the_policy_is_compared_later_if_the_newest_record_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep = store.KeepLatest(3)
    with store.connect(tmp_path.as_uri()) as client:
        run = client.run("tests/damaged")
        for step in (1, 2):
            run.save(step, initial()).result()
        flip(tmp_path / RunPaths(RunName.parse(run.name)).checkpoint(2), -1)

        with run.loop(every=store.Steps(5), keep=keep) as loop:
            state, start = loop.restore_or(initial, on_damage="older")
            for step in loop.steps(start, 7):
                loop.after(step, state)

        assert (2, keep) == (start, run.retention.get())
    assert "keep= of tests/damaged is compared later" in caplog.text


# Failures.


@pytest.fixture
def served(
    serve: Callable[..., InProcessServer], monkeypatch: pytest.MonkeyPatch
) -> InProcessServer:
    monkeypatch.setattr(retry, "PATIENCE_SECONDS", 0.3)
    return serve()


def break_pool(root: Path) -> Callable[[], None]:
    """Lets all saves of a store fail; returns a function that mends it."""
    pool = next(root.rglob("pool"))
    pool.rename(pool.with_name("kept"))
    pool.write_bytes(b"")

    def mend() -> None:
        pool.unlink()
        pool.with_name("kept").rename(pool)

    return mend


@pytest.mark.slow
def test_failures_are_tolerated_logged_and_counted(
    served: InProcessServer, caplog: pytest.LogCaptureFixture
) -> None:
    mends: list[Callable[[], None]] = []

    def act(step: int) -> None:
        if step == 1:
            mends.append(break_pool(served.root))
        if step == 3:
            mends.pop()()

    with store.connect(served.address) as client:
        run = client.run("tests/tolerant")
        with run.loop(
            every=store.Steps(1), create=True, on_failure=store.Tolerate(2)
        ) as loop:
            state, start = loop.restore_or(initial)
            for step in loop.steps(start, 6):
                act(step)
                state = trained(state)
                save = loop.after(step, state)
                if save is not None:
                    save.exception()

        assert [0, 3, 4, 5] == run.steps()
    assert 2 == loop.failures
    assert 5 == loop.saved_step
    assert (
        "save of tests/tolerant@2 failed; training continues, failure 2 in a row of 2"
        in caplog.text
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on_failure", "last"), [(store.Raise(), 2), (store.Tolerate(2), 4)]
)
def test_one_failure_too_many_is_raised(
    served: InProcessServer, on_failure: Any, last: int
) -> None:
    with store.connect(served.address) as client:
        run = client.run("tests/failing")
        run.save(0, initial()).result()
        break_pool(served.root)
        seen = []
        with (  # noqa: PT012 - the loop is what raises
            pytest.raises(store.UnavailableError, match="the storage failed"),
            run.loop(every=store.Steps(1), on_failure=on_failure) as loop,
        ):
            for step in range(1, 10):
                seen.append(step)
                save = loop.after(step, initial())
                if save is not None:
                    save.exception()

    assert last == seen[-1]
    assert loop.outcome.startswith(f"failed at step {last} (UnavailableError: ")
    assert "; saved no step; the last save failed: " in loop.outcome


@pytest.mark.slow
def test_a_failure_costs_its_own_step_only(
    run: store.Run, caplog: pytest.LogCaptureFixture
) -> None:
    state, taken = initial(), [step for step in range(18) if step % 3]
    for step in taken:
        run.save(step, state).result()

    with run.loop(every=store.Steps(1), on_failure=store.Tolerate(2)) as loop:
        for step in range(19):  # without a pause: each waits for the one before
            loop.after(step, state)

    assert list(range(19)) == run.steps()
    assert (18, len(taken)) == (loop.saved_step, loop.failures)
    messages = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert len(taken) == len(messages)
    for step, message in zip(taken, messages, strict=True):
        assert message.startswith(f"save of {run.name}@{step} failed; training")
        assert f"{run.name}@{step} exists already" in message


@pytest.mark.slow
def test_a_failure_of_the_last_step_is_not_tolerated(served: InProcessServer) -> None:
    with store.connect(served.address) as client:
        run = client.run("tests/last")
        run_steps(run, 5)
        mends = []
        with (  # noqa: PT012 - the end of the loop raises
            pytest.raises(store.UnavailableError, match="the storage failed"),
            run.loop(every=store.Steps(1), on_failure=store.Tolerate(9)) as loop,
        ):
            state, start = loop.restore_or(initial)
            mends.append(break_pool(served.root))
            for step in loop.steps(start, 7):
                state = trained(state)
                loop.after(step, state)
        mends.pop()()

        assert loop.outcome.startswith("finished at step 6; saved no step; the last")
        assert [0, 4] == run.steps()


def test_errors_of_arguments_are_never_tolerated(run: store.Run) -> None:
    wrong: list[tuple[type[Exception], Any, Any]] = [
        (store.UnsupportedLeafError, {"odd": object()}, {}),
        (store.InvalidRequestError, initial(), {"loss": "low"}),
    ]
    for kind, state, metrics in wrong:
        with (
            pytest.raises(kind),
            run.loop(every=store.Steps(1), on_failure=store.Tolerate(9)) as loop,
        ):
            loop.after(0, state, metrics=metrics)


@pytest.mark.slow
def test_a_server_that_is_away_costs_one_save_and_delays_no_step(
    start_server: Callable[..., ServerProcess],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(retry, "PATIENCE_SECONDS", 4.0)
    server = start_server()
    longest = 0.0
    with store.connect(server.address, timeout=2) as client:
        run = client.run("tests/away")
        with run.loop(
            every=store.Steps(20), create=True, on_failure=store.Tolerate(3)
        ) as loop:
            state, start = loop.restore_or(initial)
            for step in loop.steps(start, 1000):
                if step == 10:
                    run.wait()
                    server.kill()
                if loop.failures == 1 and not server.is_running:
                    server.start()
                state = trained(state)
                began = time.monotonic()
                loop.after(step, state)
                longest = max(longest, time.monotonic() - began)
                if loop.saved_step is not None and loop.saved_step > 10:
                    break
                time.sleep(0.05)

        assert 1 == loop.failures
        assert loop.skipped > 0  # saves that would have waited for the failing one
        steps = run.steps()
    assert 0 == steps[0]
    assert loop.saved_step == steps[-1]
    assert {20, 40}.isdisjoint(steps)
    assert longest < 5, "a step waited for the server"
    assert "save of tests/away@20 failed; training continues" in caplog.text
    assert (
        "save of tests/away@40 skipped, because of the save of step 20" in caplog.text
    )
    assert "waiting for store" in caplog.text


def begin_blocked(
    run: store.Run, loop: store.Loop, step: int
) -> tuple[store.Save, threading.Event]:
    """Starts a save of a loop that is not written before an event is set."""
    goes_on = threading.Event()
    save = run.save(step, initial(), progress=lambda _: goes_on.wait(60))
    loop._saves.pending.append(save._pending)
    return save, goes_on


def test_a_step_is_skipped_if_the_run_refuses_two_saves(
    client: store.Client, caplog: pytest.LogCaptureFixture
) -> None:
    options = store.SaveOptions(if_busy="refuse")
    run = client.run("tests/refusing", save=options)
    with run.loop(every=store.Steps(1)) as loop:
        first, goes_on = begin_blocked(run, loop, 0)
        assert loop.after(1, initial()) is None
        assert loop.after(2, initial()) is None
        goes_on.set()
        first.result()
        assert loop.after(3, initial()) is not None

    assert 2 == loop.skipped
    assert [0, 3] == run.steps()
    assert (
        "save of tests/refusing@1 skipped, because of the save of step 0" in caplog.text
    )


def test_a_step_waits_for_a_save_that_makes_progress(run: store.Run) -> None:
    with run.loop(every=store.Steps(1)) as loop:
        _, goes_on = begin_blocked(run, loop, 0)
        threading.Timer(0.3, goes_on.set).start()
        began = time.monotonic()
        assert loop.after(1, initial()) is not None
        assert time.monotonic() - began >= 0.25

    assert [0, 1] == run.steps()
    assert 0 == loop.skipped


def test_a_save_by_the_clock_comes_after_the_one_that_is_running(
    run: store.Run,
) -> None:
    with run.loop(every=store.Minutes(0.05 / 60)) as loop:
        loop.after(0, initial())
        first, goes_on = begin_blocked(run, loop, 1)
        time.sleep(0.1)
        assert loop.after(2, initial()) is None
        goes_on.set()
        first.result()
        saved = [step for step in range(3, 30) if loop.after(step, initial())]

    assert saved
    steps = run.steps()  # step 0 too, if it took so long to come to it
    assert [1, saved[0]] == steps[steps.index(1) :][:2]
    assert 0 == loop.skipped


def test_steps_queue_behind_a_save_if_the_run_queues_them(client: store.Client) -> None:
    run = client.run("tests/queueing", save=store.SaveOptions(if_busy="queue"))
    with run.loop(every=store.Steps(1)) as loop:
        _, goes_on = begin_blocked(run, loop, 0)
        assert [loop.after(step, initial()) is not None for step in (1, 2)]
        goes_on.set()

    assert [0, 1, 2] == run.steps()
    assert (2, 0, 0) == (loop.saved_step, loop.skipped, loop.failures)


# Ends.


def test_a_block_that_fails_saves_nothing_and_keeps_its_error(run: store.Run) -> None:
    with (  # noqa: PT012 - an error within a loop
        pytest.raises(ZeroDivisionError),
        run.loop(every=store.Steps(10)) as loop,
    ):
        for step in range(20):
            loop.after(step, initial())
            run.wait()
            if step == 15:
                _ = 1 / 0

    assert [0, 10] == run.steps()
    assert (
        "failed at step 15 (ZeroDivisionError: division by zero); saved step 10"
        == loop.outcome
    )


@pytest.mark.slow
def test_the_error_of_a_save_is_a_note_of_the_error_of_the_block(
    served: InProcessServer,
) -> None:
    with store.connect(served.address) as client:
        run = client.run("tests/notes")
        run.save(0, initial()).result()
        break_pool(served.root)
        with (  # noqa: PT012 - an error within a loop
            pytest.raises(ZeroDivisionError) as caught,
            run.loop(every=store.Steps(1)) as loop,
        ):
            loop.after(1, initial())
            _ = 1 / 0

    (note,) = caught.value.__notes__
    assert note.startswith("the last save failed too: ")


def test_sigterm_saves_and_ends_the_loop(
    run: store.Run, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    loop, state = run_steps(run, 100, act=terminate_at(17))

    assert [0, 10, 17] == run.steps()
    assert 18 == state["n"]
    assert "received SIGTERM at step 17; saved step 17" == loop.outcome
    assert loop.is_stopping
    assert before == signal.getsignal(signal.SIGTERM)
    assert "received SIGTERM; saving and ending at step 17" in caplog.text


def test_sigterm_at_a_step_that_is_due_saves_it_once(run: store.Run) -> None:
    loop, _ = run_steps(run, 100, act=terminate_at(20))

    assert [0, 10, 20] == run.steps()
    assert "received SIGTERM at step 20; saved step 20" == loop.outcome


def test_sigterm_after_the_last_step_changes_nothing(run: store.Run) -> None:
    with run.loop(every=store.Steps(10), create=True) as loop:
        for step in loop.steps(0, 5):
            loop.after(step, initial())
        os.kill(os.getpid(), signal.SIGTERM)

    assert "finished at step 4; saved step 4; received SIGTERM after it" == loop.outcome


def test_a_handler_of_the_program_is_called_and_restored(run: store.Run) -> None:
    received = []
    handler = lambda number, _: received.append(number)  # noqa: E731
    before = signal.signal(signal.SIGTERM, handler)
    try:
        loop, _ = run_steps(run, 100, act=terminate_at(3))
        assert [signal.SIGTERM] == received
        assert handler == signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "received SIGTERM at step 3; saved step 3" == loop.outcome


def test_a_second_sigterm_reaches_the_program(run: store.Run) -> None:
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    try:
        with run.loop(every=store.Steps(10), create=True):
            for expected in (1, 2, 3):
                os.kill(os.getpid(), signal.SIGTERM)
                assert expected == len(received)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, None])
def test_without_a_handler_of_its_own_a_loop_says_so(
    run: store.Run, handler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    if handler is None:
        with run.loop(every=store.Steps(10)):
            pass
        thread = threading.Thread(target=lambda: run_steps(run, 3))
        thread.start()
        thread.join()
        assert [0, 2] == run.steps()
        assert "SIGTERM will not save: the loop does not run in the main" in caplog.text
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        run_steps(run, 3)
        assert handler == signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "SIGTERM will not save: the process ignores the signal" in caplog.text


def test_a_loop_without_steps_sees_that_it_stops(run: store.Run) -> None:
    with run.loop(every=store.Steps(10)) as loop:
        step = 0
        while not loop.is_stopping:
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            loop.after(step, initial())
            step += 1

    assert [0, 3] == run.steps()


def test_nothing_is_left_behind(run: store.Run) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run_steps(run, 3)
    run.wait()

    assert before == signal.getsignal(signal.SIGTERM)
    assert [] == list(run.holds.list())
    assert [] == [u for u in run.uploads.list() if u.state == "live"]


# Mistakes.


def test_a_loop_whose_steps_do_not_call_after_is_an_error(run: store.Run) -> None:
    with (
        pytest.raises(
            store.InvalidRequestError, match="after was not called for step 0"
        ),
        run.loop(every=store.Steps(1)) as loop,
    ):
        for _ in loop.steps(0, 5):
            pass


def test_a_step_that_is_left_out_later_still_ends_on_sigterm(run: store.Run) -> None:
    with run.loop(every=store.Steps(10)) as loop:
        for step in loop.steps(0, 100):
            if step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
                continue
            loop.after(step, initial())

    assert [0, 5] == run.steps()
    assert "received SIGTERM at step 4; saved step 5" == loop.outcome


def test_steps_must_rise_and_the_block_must_be_open(run: store.Run) -> None:
    with run.loop(every=store.Steps(10)) as loop:
        loop.after(5, initial())
        for wrong in (5, 4, -1, "6", 6.0, True):
            with pytest.raises(
                store.InvalidRequestError, match="after: expected a whole number of at"
            ):
                loop.after(wrong, initial())  # type: ignore[arg-type]
        loop.after(np.int64(7), initial())
        with pytest.raises(store.InvalidRequestError, match="steps: expected a whole"):
            loop.steps(-1, 5)

    for call in (
        lambda: loop.after(8, initial()),
        lambda: loop.restore_or(initial),
        lambda: loop.steps(0, 1),
    ):
        with pytest.raises(store.InvalidRequestError, match="within its with block"):
            call()
    with pytest.raises(store.InvalidRequestError, match="one with block"), loop:
        pass


@pytest.mark.parametrize(
    "options",
    [
        {"every": 1000},
        {"every": None},
        {"on_failure": 3},
        {"create": "yes"},
        {"distributed": "all"},
        {"keep": 3},
    ],
    ids=str,
)
def test_options_of_another_type_are_rejected(
    run: store.Run, options: dict[str, Any]
) -> None:
    place = rf"^(loop of {run.name}: )?{next(iter(options))}=: expected .*, got "
    with pytest.raises(store.InvalidRequestError, match=place):
        run.loop(**({"every": store.Steps(1)} | options))
