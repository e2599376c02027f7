"""The examples of training scripts: killed and started again, each ends with the same
bits as the same job that was never interrupted and has no checkpoints."""

import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import storesvc_client as store
from tests.loop import checkpoint_lines
from tests.loop.checkpoint_lines import EXAMPLES, PLAIN
from tests.support.examples import soaked
from tests.support.programs import SECONDS, await_condition, started_python

COMING_FROM_ORBAX = EXAMPLES.parents[1] / "docs" / "coming-from-orbax.md"
ENDLESS = str(10**6)


def _linen_state(names: dict[str, Any], run: store.Run | None) -> Any:
    return names["state"] if run is None else run.restore(like=names["state"])


def _nnx_state(names: dict[str, Any], run: store.Run | None) -> Any:
    trained = names["model"], names["optimizer"]
    if run is not None:
        from storesvc_client.nnx import restore_into

        trained = nnx.clone(trained)
        restore_into(run, *trained)
    return nnx.state(trained)


def _keras_state(names: dict[str, Any], run: store.Run | None) -> Any:
    from storesvc_client.keras import restore_into

    model = names["model"]
    if run is not None:
        for variable in (*model.variables, *model.optimizer.variables):
            variable.assign(np.zeros_like(variable.value))
        restore_into(run, model)
    variables = (*model.variables, *model.optimizer.variables)
    return {found.path: found.value for found in variables}


@dataclass(frozen=True)
class Example:
    """A script, and how to find its state."""

    name: str
    state: Callable[[dict[str, Any], store.Run | None], Any]
    """Returns the state after a training from the names of a script that has run, or
    the newest state of a run."""
    option: str = "--steps"
    steps_each: int = 1
    """Steps of one unit of the option."""

    @property
    def script(self) -> Path:
        return EXAMPLES / f"{self.name}.py"

    @property
    def run(self) -> str:
        return f"examples/{self.name.partition('_')[0]}"


LINEN = Example("linen_loop", _linen_state)
NNX = Example("nnx_loop", _nnx_state)
KERAS = Example("keras_fit", _keras_state, option="--epochs", steps_each=20)

each_example = pytest.mark.parametrize(
    "example",
    [NNX, *(pytest.param(slow, marks=pytest.mark.slow) for slow in (LINEN, KERAS))],
    ids=lambda found: found.name,
)


@pytest.fixture(autouse=True)
def keras_of_this_test(request: pytest.FixtureRequest) -> None:
    if "example" in request.fixturenames:
        example = request.getfixturevalue("example")
        if example is KERAS:
            pytest.importorskip("keras")


def ran(script: Path, *arguments: str) -> dict[str, Any]:
    """Runs a script in this process as in a new one, and returns its names."""
    if "keras" in sys.modules:
        import keras

        keras.utils.clear_session()  # Keras numbers random streams in each process
    patch = pytest.MonkeyPatch()
    patch.setattr(sys, "argv", [str(script), *arguments])
    try:
        return runpy.run_path(str(script), run_name="__main__")
    finally:
        patch.undo()


def await_step(
    process: subprocess.Popen[str], newest: Callable[[], int | None], least: int
) -> None:
    """Waits until a process has committed a step."""
    await_condition(lambda: (newest() or 0) >= least, process)


def leaves(state: Any) -> dict[str, bytes]:
    """Returns the bits of the leaves of a state."""
    return {
        jax.tree_util.keystr(path): np.asarray(_data(leaf)).tobytes()
        for path, leaf in jax.tree.leaves_with_path(state)
    }


def _data(leaf: Any) -> Any:
    typed = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if typed else leaf


def check_same(example: Example, run: store.Run, total: int) -> None:
    """Checks that the newest checkpoint has the bits of an uninterrupted training."""
    names = ran(PLAIN / example.script.name, example.option, str(total))
    expected = leaves(example.state(names, None))

    assert expected == leaves(example.state(names, run))
    assert total * example.steps_each - (example is not KERAS) == run.latest_step()
    if "loss" in names:
        assert float(names["loss"]) == run.latest().metrics["loss"]


def check_resumed(example: Example, target: str, total: int, *, start: int) -> None:
    """Runs an example to its end, and checks that it began at a step."""
    store_option = ("--store", target)
    names = ran(example.script, *store_option, example.option, str(total))

    assert start == names["start"]
    with store.connect(target) as client:
        check_same(example, client.run(example.run), total)


@pytest.mark.slow
@each_example
def test_an_example_resumes_as_if_it_had_not_ended(
    example: Example, tmp_path: Path
) -> None:
    target, first = (tmp_path / "store").as_uri(), 2 if example is KERAS else 25
    ran(example.script, "--store", target, example.option, str(first))

    check_resumed(example, target, first + 2, start=first)

    with store.connect(target) as client:
        run = client.run(example.run)
        assert store.KeepLatest(3) == run.retention.get()
        assert run.verify("latest").ok


@pytest.mark.slow
@each_example
def test_an_example_that_is_killed_resumes_at_its_newest_checkpoint(
    example: Example, tmp_path: Path
) -> None:
    target, last = (tmp_path / "store").as_uri(), 0
    with (
        store.connect(target) as client,
        started_python(
            str(example.script), "--store", target, example.option, ENDLESS
        ) as process,
    ):
        run = client.run(example.run)
        await_step(process, run.latest_step, least=40)
        process.send_signal(signal.SIGKILL)
        assert -signal.SIGKILL == process.wait(SECONDS)
        last = run.latest_step() or 0

    start = last // example.steps_each + (example is not KERAS)
    check_resumed(example, target, start + 2, start=start)


@pytest.mark.slow
def test_an_example_that_receives_sigterm_saves_the_step_and_ends(
    tmp_path: Path,
) -> None:
    target = (tmp_path / "store").as_uri()
    with (
        store.connect(target) as client,
        started_python(
            str(LINEN.script), "--store", target, LINEN.option, ENDLESS
        ) as process,
    ):
        run = client.run(LINEN.run)
        await_step(process, run.latest_step, least=20)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=SECONDS)
        assert 0 == process.returncode, err
        last = run.latest_step()

    assert last is not None
    assert f"received SIGTERM at step {last}; saved step {last}\n" == out
    check_resumed(LINEN, target, last + 3, start=last + 1)


@pytest.mark.parametrize("number", soaked([signal.SIGKILL, signal.SIGTERM], every=2))
def test_the_script_with_orbax_does_the_same_job(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Else its lines could not be compared."""
    import orbax.checkpoint as ocp

    directory = tmp_path / "orbax"
    script = (str(EXAMPLES / "orbax_loop.py"), "--directory", str(directory))

    def newest() -> int | None:
        names = [path.name for path in directory.glob("*") if path.name.isdigit()]
        return max(map(int, names), default=None)

    with started_python(*script, "--steps", ENDLESS) as process:
        await_step(process, newest, least=40)
        process.send_signal(number)
        out, _ = process.communicate(timeout=SECONDS)
    last = newest() or 0
    if number == signal.SIGTERM:
        assert (0, f"saved step {last}\n") == (process.returncode, out)
    total = last + 3
    with started_python(*script, "--steps", str(total)) as process:
        out, err = process.communicate(timeout=SECONDS)
        assert (0, f"saved step {total - 1}\n") == (process.returncode, out), err

    names = ran(PLAIN / "linen_loop.py", "--steps", str(total))
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(
            directory / str(total - 1) / "default", names["state"]
        )
    assert leaves(names["state"]) == leaves(found)
    assert 3 == len([path for path in directory.iterdir() if path.name.isdigit()])


def test_the_checkpoints_of_an_example_take_at_most_twelve_lines() -> None:
    ours = [name for name in checkpoint_lines.SCRIPTS if not name.startswith("orbax")]

    counts = {name: len(checkpoint_lines.checkpoint_lines(name)) for name in ours}

    assert {} == {name: count for name, count in counts.items() if count > 12}


def test_the_page_about_orbax_has_the_numbers_of_lines() -> None:
    assert checkpoint_lines.table() in COMING_FROM_ORBAX.read_text()


def test_only_code_counts_as_a_line() -> None:
    source = '''
"""A module
of two lines."""

import jax  # jax


def f(x):
    """Returns it."""
    # why
    return g(
        x,
    )
'''
    assert [
        *("import jax  # jax", "def f(x):", "return g(", "x,", ")")
    ] == checkpoint_lines.code_lines(source)
