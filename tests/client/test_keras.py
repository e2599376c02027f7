"""A Keras model with the JAX backend is saved while it trains, and restored."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from tests.support.programs import run_python

keras: Any = pytest.importorskip("keras")

from storesvc_client.keras import EPOCH_LABEL, StoreCheckpoint, restore_into  # noqa: E402

X = np.linspace(-1, 1, 80, dtype=np.float32).reshape(20, 4)
Y = X.sum(axis=1, keepdims=True)
BATCHES = 5
"""Batches of an epoch."""


def built(width: int = 8, hidden: str = "hidden") -> Any:
    """Returns a new model with random streams and statistics, as in a new process."""
    keras.utils.clear_session()  # Keras numbers random streams in each process
    keras.utils.set_random_seed(3)
    layers = [
        keras.Input((4,)),
        keras.layers.Dense(width, name=hidden),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.2, name="dropout", seed=1),
        keras.layers.Dense(1, name="out"),
    ]
    return keras.Sequential(layers, name="net")


def compiled(width: int = 8, hidden: str = "hidden") -> Any:
    """Returns a new model with an optimizer."""
    model = built(width, hidden)
    model.compile(optimizer=keras.optimizers.Adam(0.01, name="adam"), loss="mse")
    return model


def fitted(model: Any, *callbacks: Any, epochs: int, start: int = 0) -> dict[str, Any]:
    """Trains a model, and returns the metrics of each epoch."""
    history: dict[str, Any] = model.fit(
        X,
        Y,
        batch_size=4,
        epochs=epochs,
        initial_epoch=start,
        shuffle=False,
        verbose=0,
        validation_data=(X, Y),
        callbacks=[*callbacks],
    ).history
    return history


def values(model: Any) -> dict[str, bytes]:
    """Returns the bytes of all variables by path."""
    variables = [*model.variables, *model.optimizer.variables]
    return {found.path: np.asarray(found.value).tobytes() for found in variables}


@pytest.mark.slow
def test_training_goes_on_as_if_it_had_not_ended(run: store.Run) -> None:
    expected = fitted(compiled(), epochs=4)

    first = fitted(compiled(), StoreCheckpoint(run), epochs=2)
    model = compiled()
    epoch = restore_into(run, model)
    then = fitted(model, StoreCheckpoint(run), epochs=4, start=epoch)

    assert 2 == epoch
    assert expected["loss"] == first["loss"] + then["loss"]
    assert expected["val_loss"] == first["val_loss"] + then["val_loss"]
    assert [5, 10, 15, 20] == run.steps()
    newest = run.latest()
    assert {"loss", "val_loss"} == newest.metrics.keys()
    assert then["val_loss"][-1] == newest.metrics["val_loss"]
    assert {EPOCH_LABEL: "4"} == newest.labels


@pytest.mark.slow
def test_every_variable_comes_back_bit_for_bit(run: store.Run) -> None:
    model = compiled()
    fitted(model, StoreCheckpoint(run), epochs=1)
    expected = values(model)

    other = compiled()
    assert expected != values(other)
    restore_into(run, other, 5)

    assert expected == values(other)
    keys = run.open().leaves
    assert "trainable_variables/net/hidden/kernel" in keys
    assert "optimizer_variables/adam/iteration" in keys
    assert any("seed_generator_state" in key for key in keys)


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_migrated(run: store.Run) -> None:
    old = compiled(hidden="inner")
    fitted(old, StoreCheckpoint(run), epochs=1)
    rules = [
        {"from": f"{{above*}}{old}{{name}}", "to": f"{{above*}}{new}{{name}}"}
        for old, new in (("/inner/", "/hidden/"), ("/net_inner_", "/net_hidden_"))
    ]
    with pytest.raises(store.MismatchError, match="net/hidden/kernel"):
        restore_into(run, compiled())
    run.migrations.add({"version": 1, "otherwise": "keep", "rules": rules})

    model = compiled()

    assert 1 == restore_into(run, model)
    migrated = {key.replace("inner", "hidden"): v for key, v in values(old).items()}
    assert migrated == values(model)


@pytest.mark.slow
def test_a_model_is_saved_every_few_batches(run: store.Run) -> None:
    seen: dict[int, dict[str, bytes]] = {}

    callback_class: Any = keras.callbacks.Callback

    class Look(callback_class):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.jax_state_sync()
            seen[int(self.model.optimizer.iterations.value)] = values(self.model)

    fitted(compiled(), StoreCheckpoint(run, save_freq=3), Look(), epochs=2)

    assert [3, 6, 9] == run.steps()
    assert ["0", "1", "1"] == [
        run.checkpoint(step).labels[EPOCH_LABEL] for step in (3, 6, 9)
    ]
    for step in (3, 9):
        model = compiled()
        assert int(step > 5) == restore_into(run, model, step)
        assert seen[step] == values(model)


@pytest.mark.slow
def test_only_improvements_of_a_metric_are_saved(run: store.Run) -> None:
    callback = StoreCheckpoint(run, monitor="val_loss")
    history = fitted(compiled(), callback, epochs=6)

    best, expected = math.inf, []
    for epoch, value in enumerate(history["val_loss"], start=1):
        if value < best:
            best = value
            expected.append(epoch * BATCHES)
    assert expected == run.steps()

    # a new process knows the best value from the run, and nothing is better than that
    run.update("latest", metrics={"val_loss": -1.0})
    model = compiled()
    restore_into(run, model)
    fitted(model, StoreCheckpoint(run, monitor="val_loss"), epochs=8, start=6)
    assert expected == run.steps()

    run.update("latest", metrics={"loss": 1e-9})
    for step in run.steps()[:-1]:
        run.delete(step)
    fitted(model, StoreCheckpoint(run, monitor="loss", mode="max"), epochs=9, start=8)
    assert [expected[-1], int(model.optimizer.iterations.value)] == run.steps()


@pytest.mark.slow
def test_an_unknown_metric_is_rejected_with_those_there_are(run: store.Run) -> None:
    with pytest.raises(store.InvalidRequestError, match="one of loss, val_loss, got"):
        fitted(compiled(), StoreCheckpoint(run, monitor="accuracy"), epochs=1)
    assert [] == run.steps()


@pytest.mark.slow
def test_a_model_without_an_optimizer_gets_its_own_variables(run: store.Run) -> None:
    model = compiled()
    fitted(model, StoreCheckpoint(run), epochs=1)
    expected = model.predict(X, verbose=0)

    other = built()
    restore_into(run, other)

    assert np.array_equal(expected, other.predict(X, verbose=0))


@pytest.mark.slow
def test_another_model_is_rejected_and_nothing_changes(run: store.Run) -> None:
    fitted(compiled(), StoreCheckpoint(run), epochs=1)
    model = compiled(width=16)
    before = values(model)

    with pytest.raises(store.MismatchError, match="hidden/kernel"):
        restore_into(run, model)
    with pytest.raises(store.NotFoundError):
        restore_into(run, model, 77)

    after = values(model)
    assert before == {path: after[path] for path in before}


def test_a_model_that_is_not_built_is_rejected(run: store.Run) -> None:
    model = keras.Sequential([keras.layers.Dense(1)])

    with pytest.raises(store.InvalidRequestError, match="a model that is built"):
        restore_into(run, model)


@pytest.mark.parametrize("paths", [("same/x", "same/x"), ("same", "same/x")])
def test_two_variables_in_one_place_are_rejected(
    run: store.Run, paths: tuple[str, str]
) -> None:
    layers = [keras.Input((4,)), keras.layers.Dense(4, name="same")]
    model = keras.Sequential(layers, name="twice")
    model.compile(optimizer="sgd", loss="mse")
    for variable, path in zip(model.trainable_variables, paths, strict=True):
        variable._path = path

    with pytest.raises(store.InvalidRequestError, match="two at 'same/x'"):
        restore_into(run, model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_freq": 0}, "save_freq=: expected 'epoch' or a number"),
        ({"save_freq": True}, "save_freq=: expected 'epoch' or a number"),
        ({"save_freq": "batch"}, "save_freq=: expected 'epoch' or a number"),
        ({"mode": "auto"}, "mode=: expected 'min' or 'max', got 'auto'"),
    ],
)
def test_options_out_of_range_are_rejected(
    run: store.Run, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(store.InvalidRequestError, match=message):
        StoreCheckpoint(run, **options)


def test_something_else_than_a_run_is_rejected() -> None:
    with pytest.raises(store.InvalidRequestError, match="expected a Run, got 'a/b'"):
        StoreCheckpoint("a/b")  # type: ignore[arg-type]


def numbered(optimizer: Any = None, *, name: str | None = "hidden") -> Any:
    """Returns a model in which Keras numbers the streams and the optimizer."""
    keras.utils.set_random_seed(3)
    layers = [
        keras.Input((4,)),
        keras.layers.Dense(4, name=name),
        keras.layers.Dropout(0.5, name="first"),
        keras.layers.Dropout(0.2, name="second"),
        keras.layers.Dense(1, name="out"),
    ]
    model = keras.Sequential(layers, name="net")
    model.compile(optimizer or keras.optimizers.Adam(), loss="mse")
    return model


def in_order(model: Any) -> list[bytes]:
    return list(values(model).values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.Adam,
        keras.optimizers.Adafactor,
        keras.optimizers.Nadam,  # has a variable without the name of the optimizer
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
    ],
    ids=["Adam", "Adafactor", "Nadam", "LossScaleOptimizer"],
)
def test_a_second_model_in_the_process_is_restored(
    run: store.Run, optimizer: Any
) -> None:
    model = numbered(optimizer())
    fitted(model, StoreCheckpoint(run), epochs=1)

    again = numbered(optimizer())
    assert {*values(model)} != {*values(again)}
    restore_into(run, again)
    assert in_order(model) == in_order(again)
    recompiled = numbered(optimizer())
    recompiled.compile(optimizer(), loss="mse")
    restore_into(run, recompiled)
    assert in_order(model) == in_order(recompiled)

    fitted(again, StoreCheckpoint(run), epochs=2, start=1)
    last = numbered(optimizer())
    restore_into(run, last)
    assert in_order(again) == in_order(last)


@pytest.mark.slow
def test_batches_whose_gradients_are_accumulated_are_steps(run: store.Run) -> None:
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=2)
    fitted(numbered(optimizer), StoreCheckpoint(run, save_freq=1), epochs=1)
    assert [1, 2, 3, 4, 5] == run.steps()


@pytest.mark.slow
def test_a_batch_that_the_optimizer_skips_is_not_saved(run: store.Run) -> None:
    adam = keras.optimizers.Adam()
    optimizer = keras.optimizers.LossScaleOptimizer(adam, initial_scale=3e38)
    fitted(numbered(optimizer), StoreCheckpoint(run, save_freq=1), epochs=2)
    assert run.steps()[-1] == int(adam.iterations.value) < 2 * BATCHES


def mismatch(run: store.Run, model: Any) -> str:
    with pytest.raises(store.MismatchError) as caught:
        restore_into(run, model)
    return str(caught.value)


@pytest.mark.slow
def test_layers_that_keras_numbers_are_restored_as_the_error_says(
    run: store.Run,
) -> None:
    keras.utils.clear_session()
    model = numbered(name=None)
    fitted(model, StoreCheckpoint(run), epochs=1)

    advice = mismatch(run, numbered(name=None))
    assert "call keras.utils.clear_session() before the model is created" in advice
    keras.utils.clear_session()
    again = numbered(name=None)
    assert 1 == restore_into(run, again)
    assert values(model) == values(again)


@pytest.mark.slow
def test_another_optimizer_is_taken_as_the_error_says(
    run: store.Run, client: store.Client
) -> None:
    model = numbered()
    fitted(model, StoreCheckpoint(run), epochs=1)

    advice = mismatch(run, numbered(keras.optimizers.SGD()))
    assert "call restore_into before compile()" in advice
    other = numbered()
    other.optimizer = None
    assert 1 == restore_into(run, other)
    other.compile(keras.optimizers.SGD(), loss="mse")
    assert in_order(model)[:6] == in_order(other)[:6]
    fitted(other, StoreCheckpoint(client.run("other/run")), epochs=2, start=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")  # in Keras
def test_an_imported_checkpoint_of_orbax_is_restored(
    run: store.Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = numbered()
    saves = keras.callbacks.OrbaxCheckpoint(directory=str(tmp_path / "old"))
    fitted(model, saves, epochs=2)
    run.import_from(f"orbax:{tmp_path / 'old'}")

    again = numbered()
    assert 0 == restore_into(run, again)
    assert "give fit() initial_epoch= yourself" in caplog.text
    assert in_order(model) == in_order(again)


@pytest.mark.slow
def test_a_failed_save_fails_the_training_at_its_end(run: store.Run) -> None:
    run.save(5, {"x": 1}).result()  # the step is taken

    with pytest.raises(store.AlreadyExistsError):
        fitted(compiled(), StoreCheckpoint(run), epochs=1)


@pytest.mark.slow
def test_another_backend_is_rejected() -> None:
    program = (
        "import storesvc_client as store\n"
        "from storesvc_client.keras import StoreCheckpoint\n"
        "try:\n"
        "    StoreCheckpoint(None)\n"
        "except store.InvalidRequestError as e:\n"
        "    print(e)"
    )

    env = {"PATH": "", "KERAS_BACKEND": "numpy", "KERAS_HOME": str(Path("build"))}
    ran = run_python(program, env=env)

    assert "expected the JAX backend of Keras, got 'numpy'" in ran.stdout
