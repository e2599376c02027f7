"""``Checkpointer`` of version 1 behaves as Orbax's."""

import json
import queue
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import checkpoint_managers as managers
from orbax.checkpoint.experimental.v1 import Context, handlers, training
from orbax.checkpoint.experimental.v1._src.serialization import numpy_leaf_handler

import storesvc_client as store
from storesvc_client import orbax
from tests.orbax.conftest import NewManager

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")
"""Orbax warns of restores without a target."""

STATE: Any = {
    "w": jnp.arange(4.0),
    "n": np.arange(3),
    "i": 3,
    "text": "words",
    "none": None,
    "pair": (jnp.ones(1), 2),
    "empty": {},
}


def test_a_new_checkpointer_has_nothing(new_checkpointer: NewManager) -> None:
    checkpointer = new_checkpointer()
    assert (checkpointer.latest, list(checkpointer.checkpoints)) == (None, [])
    with pytest.raises(FileNotFoundError):
        checkpointer.load()


def test_a_state_comes_back(new_checkpointer: NewManager) -> None:
    checkpointer = new_checkpointer()
    assert checkpointer.save(0, STATE)
    found = checkpointer.load(0, STATE)
    assert list(found) == sorted(STATE)
    assert (type(found["pair"]), found["none"], found["empty"]) == (tuple, None, {})
    assert (found["text"], found["i"], found["n"].tolist()) == ("words", 3, [0, 1, 2])
    assert checkpointer.load()["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert checkpointer.load(checkpointer.latest)["i"] == 3


def test_the_policy_and_force_decide(new_checkpointer: NewManager) -> None:
    policy = managers.FixedIntervalPolicy(2)
    checkpointer = new_checkpointer(save_decision_policy=policy)
    tree = {"w": jnp.ones(1)}
    assert [checkpointer.save(step, tree) for step in range(4)] == [
        *(True, False, True, False)
    ]
    assert checkpointer.save(5, tree, force=True)
    assert checkpointer.save_async(7, tree) is None
    assert [found.step for found in checkpointer.checkpoints] == [0, 2, 5]


def test_a_step_is_not_saved_twice(new_checkpointer: NewManager) -> None:
    checkpointer = new_checkpointer()
    checkpointer.save(1, STATE)
    for force in (False, True):
        with pytest.raises(training.errors.StepAlreadyExistsError):
            checkpointer.save(1, STATE, force=force)


def test_a_missing_step_is_the_error_of_orbax(new_checkpointer: NewManager) -> None:
    checkpointer = new_checkpointer()
    checkpointer.save(1, STATE)
    for read in (checkpointer.load, checkpointer.metadata, checkpointer.delete):
        with pytest.raises(training.errors.StepNotFoundError):
            read(7)


def test_a_save_in_the_background_is_awaited(new_checkpointer: NewManager) -> None:
    checkpointer = new_checkpointer()
    response = checkpointer.save_async(1, STATE)
    assert response.result() is True
    assert not checkpointer.is_saving_in_progress()
    checkpointer.save_checkpointables_async(2, {"model": STATE}, force=True)
    checkpointer.wait()
    assert checkpointer.latest.step == 2


def test_the_preservation_policy_decides_what_stays(
    new_checkpointer: NewManager,
) -> None:
    checkpointer = new_checkpointer(
        save_decision_policy=managers.FixedIntervalPolicy(1),
        preservation_policy=managers.LatestN(2),
    )
    for step in range(4):
        checkpointer.save(step, {"w": jnp.ones(1)})
    assert [found.step for found in checkpointer.checkpoints] == [2, 3]


def test_checkpointables_come_back_by_name(new_checkpointer: NewManager) -> None:
    checkpointer = new_checkpointer()
    model, meta = {"w": jnp.ones(2)}, {"name": "x", "layers": [1, 2]}
    checkpointer.save_checkpointables(4, {"model": model, "meta": meta})
    found = checkpointer.load_checkpointables(4)
    assert (found["meta"], found["model"]["w"].tolist()) == (meta, [1.0, 1.0])
    assert list(checkpointer.load_checkpointables(4, {"model": None})) == ["model"]
    with pytest.raises(KeyError):
        checkpointer.load_checkpointables(4, {"other": None})
    with pytest.raises(KeyError):
        checkpointer.load(4)


def test_a_dtype_is_cast(new_checkpointer: NewManager) -> None:
    checkpointer = new_checkpointer()
    checkpointer.save(1, {"w": jnp.arange(4.0)})
    target = {"w": jax.ShapeDtypeStruct((4,), jnp.bfloat16)}
    assert checkpointer.load(1, target)["w"].dtype == jnp.bfloat16


def test_a_placeholder_is_not_read(new_checkpointer: NewManager) -> None:
    checkpointer = new_checkpointer()
    checkpointer.save(1, {"w": jnp.arange(4.0), "b": jnp.ones(1)})
    found = checkpointer.load(1, {"w": ..., "b": jnp.zeros(1)})
    assert (found["w"], found["b"].tolist()) == (..., [1.0])


def test_metadata_has_shapes_metrics_and_custom_metadata(
    new_checkpointer: NewManager,
) -> None:
    checkpointer = new_checkpointer(custom_metadata={"run": 1})
    tree = {"w": jnp.ones((2, 3))}
    checkpointer.save(1, tree, metrics={"loss": 0.5}, custom_metadata={"note": "x"})
    found = checkpointer.metadata(1)
    assert (found.step, found.custom_metadata, found.metrics) == (
        *(1, {"note": "x"}, {"loss": 0.5}),
    )
    assert found.metadata["w"].shape == (2, 3)
    items = checkpointer.checkpointables_metadata(1).metadata
    assert items["state"]["w"].dtype == jnp.float32
    assert checkpointer.root_metadata().custom_metadata == {"run": 1}
    assert dict(checkpointer.latest.metrics) == {"loss": 0.5}


def test_metadata_is_of_the_classes_of_orbax(new_checkpointer: NewManager) -> None:
    checkpointer = new_checkpointer()
    checkpointer.save(1, {"w": jnp.ones(1)})
    listed = checkpointer.latest, checkpointer.metadata(1)
    read = checkpointer.checkpointables_metadata(1)
    for found in (*listed, read):
        assert isinstance(found, training.CheckpointMetadata)
        assert (found.step, found.path.name, found.metrics) == (1, "1", None)
    assert [listed[0].metadata, read.custom_metadata] == [None, {}]
    assert isinstance(checkpointer.root_metadata(), training.RootMetadata)
    assert checkpointer.root_metadata().custom_metadata == {}


@pytest.mark.parametrize(
    "target",
    [{"w": jnp.ones(4), "more": jnp.ones(1)}, {}, {"other": jnp.ones(4)}],
    ids=["more", "fewer", "other"],
)
def test_a_target_with_other_leaves_is_a_key_error(
    new_checkpointer: NewManager, target: Any
) -> None:
    checkpointer = new_checkpointer()
    checkpointer.save(1, {"w": jnp.arange(4.0)})
    with pytest.raises(KeyError):
        checkpointer.load(1, target)


def test_a_partial_load_keeps_what_the_step_lacks(new_checkpointer: NewManager) -> None:
    context = Context()
    context.pytree.loading.partial_load = True
    checkpointer = new_checkpointer()
    checkpointer.save(1, {"w": jnp.ones(2), "b": jnp.ones(2)})
    lora = {"a": jax.ShapeDtypeStruct((3,), jnp.float32)}
    with context:
        found = checkpointer.load(1, {"w": jnp.zeros(2), "lora": lora})
    assert found["w"].tolist() == [1.0, 1.0]
    assert found["lora"] == lora


class Counter:
    """Saves itself into a directory, as ``StatefulCheckpointable`` asks."""

    def __init__(self, count: int) -> None:
        self.count = count

    async def save(self, directory: Any) -> Any:
        count = self.count

        async def write() -> None:
            path = await directory.await_creation()
            (path / "count.json").write_text(json.dumps(count))

        return write()

    async def load(self, directory: Any) -> Any:
        async def read() -> None:
            self.count = json.loads((directory / "count.json").read_text())

        return read()


def test_an_object_saves_and_loads_itself(new_checkpointer: NewManager) -> None:
    checkpointer = new_checkpointer()
    items = {"model": {"w": jnp.ones(1)}, "data": Counter(7)}
    checkpointer.save_checkpointables(1, items)
    counter = Counter(0)
    checkpointer.load_checkpointables(1, {"data": counter})
    assert counter.count == 7


def test_a_checkpointer_is_a_context(new_checkpointer: NewManager) -> None:
    with new_checkpointer() as checkpointer:
        checkpointer.save_async(1, STATE)
    assert new_checkpointer(again=True).latest.step == 1


@pytest.mark.parametrize(
    "target",
    [
        {"w": jax.ShapeDtypeStruct((2,), jnp.float32)},
        {"w": jnp.ones(4), "more": jnp.ones(1)},
        {},
    ],
    ids=["shape", "more", "fewer"],
)
def test_a_target_that_does_not_fit_is_rejected(
    runs: Callable[[], store.Run], target: Any
) -> None:
    with orbax.Checkpointer(runs()) as checkpointer:
        checkpointer.save(1, {"w": jnp.arange(4.0)})
        with pytest.raises(store.MismatchError):  # Orbax: no handler for its target
            checkpointer.load(1, target)


def test_a_step_is_never_overwritten(runs: Callable[[], store.Run]) -> None:
    with orbax.Checkpointer(runs()) as checkpointer:
        checkpointer.save(1, STATE)
        with pytest.raises(store.InvalidRequestError, match="written once"):
            checkpointer.save(1, STATE, overwrite=True)


def test_a_callback_has_the_result_of_a_save(new_checkpointer: NewManager) -> None:
    checkpointer = new_checkpointer()
    seen: queue.Queue[bool] = queue.Queue()
    response = checkpointer.save_async(1, STATE)
    response.on_complete(seen.put)
    assert seen.get(timeout=30) is True
    assert response.result() is True


def test_a_callback_is_not_called_if_the_save_failed(
    runs: Callable[[], store.Run],
) -> None:
    run, seen = runs(), queue.Queue[bool]()
    with orbax.Checkpointer(run) as checkpointer:
        run.save(1, STATE).result()  # another job takes the step
        response: Any = checkpointer.save_async(1, STATE)
        response.on_complete(seen.put)
        with pytest.raises(store.AlreadyExistsError):
            response.result()
    assert seen.empty()


def test_a_missing_step_may_be_deleted(new_checkpointer: NewManager) -> None:
    checkpointer = new_checkpointer()
    for step in (1, 2):
        checkpointer.save(step, STATE, force=True)
    assert checkpointer.delete(9, missing_ok=True) is False
    assert checkpointer.delete(1, missing_ok=True) is True
    assert checkpointer.delete_async(checkpointer.latest).result() is True
    assert list(checkpointer.checkpoints) == []
    with pytest.raises(FileNotFoundError):
        checkpointer.delete_async(2)


def test_a_part_of_a_step_is_not_deleted(runs: Callable[[], store.Run]) -> None:
    with orbax.Checkpointer(runs()) as checkpointer:
        checkpointer.save_checkpointables(1, {"a": STATE, "b": STATE})
        with pytest.raises(store.InvalidRequestError, match="written once"):
            checkpointer.delete(1, checkpointable_name="a")
        assert checkpointer.load_checkpointables(1, {"a": None})["a"]["i"] == 3


def test_a_cancelled_save_leaves_no_step(runs: Callable[[], store.Run]) -> None:
    with orbax.Checkpointer(runs()) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, STATE, force=True)
        checkpointer.save_async(3, STATE, force=True)
        checkpointer.cancel()
        assert [found.step for found in checkpointer.checkpoints] == [1, 2]
        checkpointer.save_async(3, STATE, force=True)
        checkpointer.cancel(2)
        assert [found.step for found in checkpointer.checkpoints] == [1]
        checkpointer.cancel(7)
        assert checkpointer.save(3, STATE)
        assert [found.step for found in checkpointer.checkpoints] == [1, 3]


def test_loads_in_the_background_do_not_exist(new_checkpointer: NewManager) -> None:
    checkpointer = new_checkpointer()
    for load in (checkpointer.load_async, checkpointer.load_checkpointables_async):
        with pytest.raises(NotImplementedError):
            load(1)


def test_methods_have_their_older_names(new_checkpointer: NewManager) -> None:
    checkpointer = new_checkpointer()

    def call(name: str, *values: Any, **options: Any) -> Any:
        with pytest.warns(DeprecationWarning, match="Use `.*` instead"):
            return getattr(checkpointer, name)(*values, **options)

    assert call("save_pytree", 1, STATE)
    assert call("save_pytree_async", 2, STATE, force=True).result()
    assert call("load_pytree", 1)["i"] == 3
    assert call("pytree_metadata", 1).step == 1


HOST: Any = {"n": np.arange(3), "i": 3, "f": 1.5, "text": "words"}


@pytest.mark.parametrize(
    "target",
    [
        {
            "n": numpy_leaf_handler.NumpyShapeDtype(shape=(3,), dtype=np.dtype(int)),
            **{name: HOST[name] for name in ("i", "f", "text")},
        },
        {"n": np.ndarray, "i": int, "f": float, "text": str},
        None,
    ],
    ids=["struct", "types", "metadata"],
)
def test_values_on_the_host_stay_there(
    new_checkpointer: NewManager, target: Any
) -> None:
    checkpointer = new_checkpointer()
    checkpointer.save(1, {"w": jnp.ones(2), **HOST})
    found = checkpointer.metadata(1).metadata
    if target is not None:
        found = {"w": jax.ShapeDtypeStruct((2,), jnp.float32), **target}
    loaded = checkpointer.load(1, found)
    assert {name: type(value) for name, value in loaded.items() if name != "w"} == {
        name: type(value) for name, value in HOST.items()
    }
    assert isinstance(loaded["w"], jax.Array)
    assert loaded["n"].tolist() == [0, 1, 2]


class Note:
    """An object that a handler of a user saves."""

    def __init__(self, text: str) -> None:
        self.text = text


class AbstractNote:
    """Stands for a note."""


class NoteHandler:
    """Keeps notes in files."""

    async def save(self, directory: Any, checkpointable: Note) -> Any:
        async def write() -> None:
            path = await directory.await_creation()
            (path / "note").write_text(checkpointable.text)

        return write()

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Any:
        async def read() -> Note:
            return Note((directory / "note").read_text())

        return read()

    async def metadata(self, directory: Any) -> Any:
        return AbstractNote()

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, Note)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        return isinstance(abstract_checkpointable, AbstractNote)


@pytest.fixture(params=[None, "note"], ids=["by-type", "by-name"])
def note_context(request: pytest.FixtureRequest) -> Context:
    """A context with a handler of notes."""
    context = Context()
    context.checkpointables.registry = handlers.local_registry().add(
        NoteHandler, checkpointable_name=request.param
    )
    return context


def test_a_handler_of_a_context_saves_and_loads(
    new_checkpointer: NewManager, note_context: Context
) -> None:
    checkpointer = new_checkpointer(context=note_context)
    items = {"note": Note("words"), "model": {"w": jnp.ones(1)}}
    checkpointer.save_checkpointables(1, items)
    for target in (None, {"note": None}, {"note": AbstractNote()}):
        assert checkpointer.load_checkpointables(1, target)["note"].text == "words"
    found = checkpointer.checkpointables_metadata(1).metadata
    assert isinstance(found["note"], AbstractNote)


def test_files_without_their_handler_are_refused_with_its_name(
    runs: Callable[[], store.Run], note_context: Context
) -> None:
    run = runs()
    with orbax.Checkpointer(run, context=note_context) as checkpointer:
        checkpointer.save_checkpointables(1, {"note": Note("words")})
    with orbax.Checkpointer(run) as checkpointer:
        assert checkpointer.checkpointables_metadata(1).metadata == {"note": None}
        with pytest.raises(store.InvalidRequestError, match="NoteHandler"):
            checkpointer.load_checkpointables(1)


def test_a_registered_handler_is_found(
    new_checkpointer: NewManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = handlers.global_registry()
    monkeypatch.setattr(known, "_registry", [*known.get_all_entries()])
    handlers.register_handler(NoteHandler)
    checkpointer = new_checkpointer()
    checkpointer.save_checkpointables(1, {"note": Note("words")})
    assert checkpointer.load_checkpointables(1)["note"].text == "words"
