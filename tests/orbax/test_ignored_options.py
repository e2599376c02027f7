"""No option of Orbax is accepted in silence: followed, logged once, or rejected."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import args, pathways, type_handlers, v1
from orbax.checkpoint.experimental.v1 import Context

import storesvc_client as store
from storesvc_client import orbax
from tests.orbax.conftest import NewManager, commit
from tests.support.stable_ids import stable_id

TREE = {"w": jnp.ones(1)}
LOGGER = "storesvc_client"


def test_options_of_a_handler_are_logged(
    our_manager: NewManager, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=LOGGER)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)
    our_manager(item_handlers={"state": handler})
    (line,) = (m for m in caplog.messages if "without effect" in m)
    assert "PyTreeCheckpointHandler of 'state'" in line
    for name in ("use_ocdbt", "use_zarr3", "save_concurrent_gb"):
        assert name in line


def test_options_of_saves_are_logged_once_for_each_manager(
    our_manager: NewManager, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"w": ocp.SaveArgs(chunk_byte_size=4, shard_axes=(0,))}
    for _ in range(2):
        manager = our_manager()
        caplog.clear()
        caplog.set_level("INFO", logger=LOGGER)
        for step in (1, 2):
            save = args.PyTreeSave(
                TREE, save_args=given, ocdbt_target_data_file_size=1 << 20
            )
            assert manager.save(step, args=save)
        manager.wait_until_finished()
        (line,) = [each for each in caplog.messages if "without effect" in each]
        assert "ocdbt_target_data_file_size, SaveArgs.chunk_byte_size, " in line
        assert "SaveArgs.shard_axes" in line


def test_options_at_their_defaults_are_not_logged(
    our_manager: NewManager, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=LOGGER)
    given = {"w": ocp.SaveArgs(dtype=np.dtype(jnp.bfloat16))}
    our_manager().save(1, args=args.PyTreeSave(TREE, save_args=given))
    assert [m for m in caplog.messages if "without effect" in m] == []


def test_aggregate_is_rejected_for_standard_saves(new_manager: NewManager) -> None:
    save = args.StandardSave(TREE, save_args={"w": ocp.SaveArgs(aggregate=True)})
    with pytest.raises(ValueError, match="aggregate"):
        new_manager().save(1, args=save)


def test_what_is_no_save_args_is_rejected(our_manager: NewManager) -> None:
    save = args.StandardSave(TREE, save_args={"w": np.zeros(1, np.int8)})
    with pytest.raises(
        store.InvalidRequestError, match="save_args=: expected SaveArgs"
    ):
        our_manager().save(1, args=save)


class OtherHandler(ocp.PyTreeCheckpointHandler):  # type: ignore[misc]  # no annotations
    """A handler of a user."""


@pytest.mark.parametrize(
    ("save", "restore"),
    [
        (args.StandardSave(TREE), args.StandardRestore(TREE)),
        (args.PyTreeSave(TREE), None),
        (args.JsonSave({"a": 1}), args.JsonRestore()),
    ],
    ids=["standard", "pytree", "json"],
)
def test_a_handler_that_would_not_be_called_is_rejected(
    our_manager: NewManager, save: Any, restore: Any
) -> None:
    with pytest.raises(store.InvalidRequestError, match="OtherHandler"):
        our_manager(item_handlers=OtherHandler()).save(1, args=save)
    plain = our_manager()
    commit(plain, 1, save)
    other = our_manager(again=True, item_handlers=OtherHandler())
    with pytest.raises(store.InvalidRequestError, match="OtherHandler"):
        other.restore(1, args=restore)


@pytest.mark.parametrize("name", ["type_handler_registry", "handler_impl"])
def test_other_types_of_leaves_are_rejected(our_manager: NewManager, name: str) -> None:
    value: Any = OtherHandler()
    if name == "type_handler_registry":
        value = type_handlers.create_type_handler_registry()
    handler = ocp.PyTreeCheckpointHandler(**{name: value})
    with pytest.raises(store.InvalidRequestError, match=name):
        our_manager(item_handlers=handler)


def test_arguments_of_version_1_are_logged(
    runs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=LOGGER)
    with orbax.Checkpointer(
        runs(), cleanup_tmp_directories=True, lightweight_initialize=True
    ):
        pass
    assert [
        name in line
        for name, line in zip(
            ("cleanup_tmp_directories", "lightweight_initialize"),
            caplog.messages,
            strict=True,
        )
    ] == [True, True]


def test_a_context_decides_whether_a_load_is_partial(
    new_checkpointer: NewManager,
) -> None:
    context = Context()
    context.pytree.loading.partial_load = True
    checkpointer = new_checkpointer(context=context)
    checkpointer.save(1, {"w": jnp.ones(1), "b": jnp.ones(1)})
    assert checkpointer.load(1, {"w": jnp.zeros(1)})["w"].tolist() == [1.0]


def test_an_active_context_counts_before_that_of_the_checkpointer(runs: Any) -> None:
    context = Context()
    context.pytree.loading.partial_load = True
    with orbax.Checkpointer(runs(), context=context) as checkpointer:
        checkpointer.save(1, {"w": jnp.ones(1), "b": jnp.ones(1)})
        with Context(), pytest.raises(store.MismatchError, match="b"):
            checkpointer.load(1, {"w": jnp.zeros(1)})


def test_options_of_a_context_are_logged_once(
    runs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=LOGGER)
    context = Context()
    with orbax.Checkpointer(runs(), context=context) as checkpointer:
        checkpointer.save(1, TREE)
    assert [line for line in caplog.messages if "context" in line] == []
    context.array.saving.use_ocdbt = False
    with orbax.Checkpointer(runs(), context=context) as checkpointer:
        checkpointer.save(1, TREE)
        checkpointer.load(1)
    (line,) = [line for line in caplog.messages if "context" in line]
    assert "array.saving.use_ocdbt;" in line


def test_a_context_that_changes_what_is_saved_is_rejected(runs: Any) -> None:
    context = Context()
    context.array.saving.storage_options.dtype = jnp.bfloat16
    with pytest.raises(store.InvalidRequestError, match=r"storage_options\.dtype"):
        orbax.Checkpointer(runs(), context=context)
    checkpointer = orbax.Checkpointer(runs())
    with context, pytest.raises(store.InvalidRequestError, match="dtype"):
        checkpointer.save(1, TREE)
    with pytest.raises(store.InvalidRequestError, match="expected a Context"):
        orbax.Checkpointer(runs(), context=object())


def test_a_callback_is_called_after_each_commit(our_manager: NewManager) -> None:
    seen: list[list[int]] = []

    def called() -> None:
        seen.append(manager.all_steps(read=True))

    options = ocp.CheckpointManagerOptions(
        async_options=ocp.options.AsyncOptions(post_finalization_callback=called)
    )
    manager = our_manager(options=options)
    for step in (1, 2):
        commit(manager, step, args.StandardSave(TREE))

    assert [step in steps for step, steps in enumerate(seen, 1)] == [True, True]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"active_processes": {0, 1}},
            r"active_processes: expected None.*got \{0, 1\}",
        ),
        ({"primary_host": 1}, "primary_host: expected 0.*got 1"),
    ],
)
def test_options_of_only_some_processes_are_rejected(
    our_manager: NewManager, given: dict[str, Any], message: str
) -> None:
    options = ocp.CheckpointManagerOptions(
        multiprocessing_options=ocp.options.MultiprocessingOptions(**given)
    )

    with pytest.raises(store.InvalidRequestError, match=message):
        our_manager(options=options)


@pytest.mark.parametrize("given", [{"active_processes": {0}}, {"primary_host": None}])
def test_options_that_name_the_only_process_have_no_effect(
    our_manager: NewManager, given: dict[str, Any]
) -> None:
    options = ocp.CheckpointManagerOptions(
        create=False,
        multiprocessing_options=ocp.options.MultiprocessingOptions(**given),
    )
    assert our_manager(options=options).save(1, args=args.StandardSave(TREE))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (
            "pathways.checkpointing_impl",
            pathways.CheckpointingImpl.from_options(
                use_persistence_array_handler=False
            ),
        ),
        (
            "pathways.checkpointing_impl",
            pathways.CheckpointingImpl.from_options(use_persistence_array_handler=True),
        ),
        ("array.loading.enable_padding_and_truncation", True),
        ("array.loading.raise_array_data_missing_error", False),
        ("checkpoint_layout", v1.options.CheckpointLayout.AUTO),
        ("asynchronous.timeout_secs", 1200),
        ("file.path_permission_mode", 0o750),
    ],
    ids=stable_id,
)
def test_an_option_without_effect_here_is_accepted(
    new_checkpointer: NewManager, name: str, value: Any
) -> None:
    context = Context()
    *groups, last = name.split(".")
    group = context
    for each in groups:
        group = getattr(group, each)
    setattr(group, last, value)
    checkpointer = new_checkpointer(
        context=context, step_name_format=v1.path.step.standard_name_format()
    )
    assert checkpointer.save(1, TREE)
    assert checkpointer.load(1, TREE)["w"].tolist() == [1.0]
    assert (checkpointer.directory / "1").exists()


@pytest.mark.parametrize(
    ("given", "is_taken"),
    [
        ({"active_processes": {0}}, True),  # Orbax asks for a directory that exists
        ({"primary_host": None}, True),  # Orbax asks for other handlers of arrays
        ({"active_processes": {0, 1}}, False),
        ({"primary_host": 1}, False),
    ],
    ids=stable_id,
)
def test_a_context_may_name_only_all_processes(
    runs: Any, given: dict[str, Any], *, is_taken: bool
) -> None:
    context = Context()
    for name, value in given.items():
        setattr(context.multiprocessing, name, value)
    if is_taken:
        with orbax.Checkpointer(runs(), context=context) as checkpointer:
            assert checkpointer.save(1, TREE)
    else:
        with pytest.raises(store.InvalidRequestError, match=next(iter(given))):
            orbax.Checkpointer(runs(), context=context)


def test_the_callback_of_a_context_is_called_after_each_commit(
    new_checkpointer: NewManager,
) -> None:
    seen: list[int] = []
    context = Context()
    context.asynchronous.post_finalization_callback = lambda: seen.append(1)
    checkpointer = new_checkpointer(context=context)
    for number in (1, 2):
        checkpointer.save(number, TREE)
    assert seen == [1, 1]


@pytest.mark.parametrize("is_named", [False, True], ids=["default", "composite"])
@pytest.mark.parametrize(
    ("handler", "save"),
    [
        (ocp.PyTreeCheckpointHandler, args.StandardSave(TREE)),
        (ocp.StandardCheckpointHandler, args.PyTreeSave(TREE)),
        (ocp.JsonCheckpointHandler, args.StandardSave(TREE)),
    ],
    ids=["pytree", "standard", "json"],
)
def test_the_argument_of_another_handler_is_rejected(
    our_manager: NewManager, handler: Any, save: Any, *, is_named: bool
) -> None:
    given = {"item": handler()} if is_named else handler()
    manager = our_manager(item_handlers=given)  # Orbax does so, and leaves a thread
    with pytest.raises(ValueError, match=handler.__name__):
        manager.save(1, args=args.Composite(item=save) if is_named else save)


def test_metadata_of_the_run_is_kept_if_the_options_say_so(
    new_manager: NewManager,
) -> None:
    def found(**options: Any) -> Any:
        given = ocp.CheckpointManagerOptions(**options)
        manager = new_manager(again=True, options=given, metadata={"lr": 1})
        return manager.metadata().custom_metadata

    assert new_manager().metadata().custom_metadata == {}
    assert found(save_root_metadata=False) == {}
    assert found(read_only=True) == {"lr": 1}
    assert new_manager(again=True).metadata().custom_metadata == {}
    assert found() == {"lr": 1}
