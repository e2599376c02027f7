"""EasyDeL's trainer with its checkpoints in a store."""

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import easydel as ed
import jax
import numpy as np
import optax
import pytest
from datasets import Dataset
from easydel.infra.base_state import EasyDeLState
from flax import nnx
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

import storesvc_client as store
from storesvc_client.easydel import StoreCheckpoints, restore_state
from tests.easydel.digests import digests
from tests.easydel.training import (
    SCENARIO,
    STEPS,
    Recorded,
    TrainedStep,
    Trainer,
    arguments,
    dataset,
    model,
    records,
    trainer,
)
from tests.support.server_process import ServerProcess


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """EasyDeL's own trainer, after a training that nothing interrupts."""
    made = trainer(
        Recorded,
        tmp_path_factory.mktemp("whole"),
        changes={
            "resume_if_possible": False,
            "do_last_save": False,
            "save_steps": None,
        },
    )
    made.output = made.train()
    return made


def kill(
    server: ServerProcess, run: str, folder: Path, *, at: int
) -> list[TrainedStep]:
    """Trains in a process that is killed after a step; returns its steps."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.easydel.training"]
    ended = subprocess.run(
        [*command, server.address, run, str(folder), str(at)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == -9, ended.stdout[-4000:]
    return records(folder / "steps")


def test_a_killed_training_resumes_and_ends_as_an_uninterrupted_one(
    server: ServerProcess, client: store.Client, whole: Any, tmp_path: Path
) -> None:
    run = client.run("tests/killed")
    before = kill(server, run.name, tmp_path, at=8)
    saved = run.latest_step()
    assert saved in (3, 6)  # the save of step 6 may not have ended

    resumed = trainer(Trainer, tmp_path, store_run=run)
    output = resumed.train()

    # no step is skipped, and only those after the checkpoint are trained again
    assert whole.trained == [*before[:saved], *resumed.trained]
    assert digests(whole.output.state) == digests(output.state)
    assert STEPS == run.latest_step()
    assert f"tests/killed@{STEPS}" == output.checkpoint_path


def test_a_damaged_newest_checkpoint_is_raised_and_nothing_is_trained(
    run: store.Run, server: ServerProcess, tmp_path: Path
) -> None:
    trainer(Trainer, tmp_path, store_run=run, changes={"max_training_steps": 2}).train()
    for file in (server.root / "data" / run.name / "pool").glob("*/*"):
        data = bytearray(file.read_bytes())
        data[0] ^= 1  # of a chunk; there are unused bytes between two
        file.write_bytes(data)

    with pytest.raises(store.DataLossError, match=f"{run.name}@2 leaf") as caught:
        trainer(Trainer, tmp_path, store_run=run)

    assert "EasyDeL's trainer cannot resume" in caught.value.__notes__[0]
    assert [2] == run.steps()


def test_another_model_is_raised_at_the_resume(run: store.Run, tmp_path: Path) -> None:
    trainer(Trainer, tmp_path, store_run=run, changes={"max_training_steps": 1}).train()

    with pytest.raises(store.MismatchError, match="num_hidden_layers: expected 2"):
        trainer(Trainer, tmp_path, given=model(num_hidden_layers=1), store_run=run)


def test_a_trainer_resumes_with_the_options_that_its_message_names(
    run: store.Run, tmp_path: Path
) -> None:
    def made(steps: int, **more: Any) -> Any:
        optimizer = ed.EasyDeLOptimizers.ADAFACTOR
        changes = {"max_training_steps": steps, "optimizer": optimizer}
        return trainer(Trainer, tmp_path, store_run=run, changes=changes, **more)

    trainer(Trainer, tmp_path, store_run=run, changes={"max_training_steps": 1}).train()
    with pytest.raises(store.MismatchError, match=r"to restore what fits") as error:
        made(2)
    assert "store_resume=dict(...)" in error.value.__notes__[0]
    named = str(error.value).rpartition(", or add ")[2].rpartition(", to restore")[0]
    options = eval(f"dict({named})")

    resumed = made(2, store_resume=options)
    assert 1 == int(resumed.model_state.step)
    trained = resumed.train().state
    # the checkpoint fits now, so the options do not apply
    again = made(3, store_resume=options)

    assert digests(trained) == digests(again.model_state)


class Averaged(EasyDeLState):  # type: ignore[misc]  # mypy does not see easydel
    """EasyDeL's state with an average of the parameters."""

    ema: Any = None


def test_a_state_of_a_class_with_another_field_comes_back_and_resumes(
    run: store.Run, tmp_path: Path
) -> None:
    def averaged(share: float) -> Any:
        base = model().to_state()
        fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
        ema = jax.tree.map(lambda x: x * share, base.graphstate)
        return Averaged(**fields, ema=ema)

    first, changes = averaged(0.5), {"max_training_steps": 1}
    saved = digests(first.ema)
    trainer(Trainer, tmp_path, given=first, store_run=run, changes=changes).train()

    given = averaged(0.25)
    resumed = trainer(Trainer, tmp_path, given=given, store_run=run, changes=changes)

    assert 1 == int(resumed.model_state.step)
    assert saved == digests(resumed.model_state.ema)
    by_class = restore_state(
        run,
        model=type(given.model),
        tx=resumed.arguments.get_tx_template(),
        mesh=given.model.mesh,
        state_class=Averaged,
    )
    assert saved == digests(by_class.ema)


def test_a_run_without_checkpoints_is_trained_from_the_model_which_is_logged(
    run: store.Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer(
        Trainer,
        tmp_path,
        store_run=run,
        dataset_eval=dataset(),
        # evaluates before the last save, which keeps the metrics of the training
        changes={
            "max_training_steps": 5,
            "save_steps": 2,
            "do_eval": True,
            "evaluation_steps": 5,
            "max_evaluation_steps": 1,
        },
    )
    made.train()

    assert f"{run.name} has no checkpoint" in caplog.text
    assert [2, 4, 5] == run.steps()
    losses = {step.step: step.loss for step in made.trained}
    assert {step: pytest.approx(losses[step]) for step in (2, 4, 5)} == {
        found.step: found.metrics["loss"] for found in run.checkpoints()
    }
    # EasyDeL wrote no checkpoint of its own
    assert [] == list(tmp_path.rglob("run-*"))


def test_a_finished_training_is_resumed_without_another_step_or_save(
    run: store.Run, tmp_path: Path
) -> None:
    changes = {"max_training_steps": 3}
    trainer(Trainer, tmp_path, store_run=run, changes=changes).train()
    uid = run.latest().uid

    again = trainer(Trainer, tmp_path, store_run=run, changes=changes)
    output = again.train()

    assert [] == again.trained
    assert uid == run.latest().uid
    assert f"{run.name}@3" == output.checkpoint_path


def test_the_total_limit_becomes_the_retention_policy_of_the_run(
    run: store.Run, tmp_path: Path
) -> None:
    changes = {"max_training_steps": 5, "save_steps": 1, "save_total_limit": 2}

    trainer(Trainer, tmp_path, store_run=run, changes=changes).train()

    assert store.KeepLatest(2) == run.retention.get()
    run.retention.apply()  # the server does so at intervals
    assert [4, 5] == run.steps()


def test_a_policy_of_the_run_is_kept_which_is_logged(
    run: store.Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = store.KeepLatest(5) | store.KeepEvery(steps=10)
    run.retention.set(policy)
    changes = {"max_training_steps": 1, "save_total_limit": 2}

    trainer(Trainer, tmp_path, store_run=run, changes=changes).train()

    assert policy == run.retention.get()
    assert "latest(5) | every(10 steps): save_total_limit=2 is not" in caplog.text


def test_time_triggers_saves_between_the_saves_of_the_policy(
    run: store.Run, tmp_path: Path
) -> None:
    changes = {"max_training_steps": 4, "save_interval_minutes": 1e-9}

    trainer(Trainer, tmp_path, store_run=run, changes=changes).train()

    assert [1, 2, 3, 4] == run.steps()


def test_without_a_last_save_the_background_saves_are_committed_at_the_end(
    run: store.Run, tmp_path: Path
) -> None:
    changes = {"max_training_steps": 3, "do_last_save": False}

    output = trainer(Trainer, tmp_path, store_run=run, changes=changes).train()

    assert [3] == run.steps()
    assert "SAVING_SKIPPED" == output.checkpoint_path


class Intruding(Trainer):
    """Another client commits a step of the run before the trainer reaches it."""

    def on_step_end(self, state: Any, metrics: Any, step: int) -> Any:
        if step == 1:
            self.store_run.save(3, {"x": np.zeros(1)}).result()
        return super().on_step_end(state, metrics, step)


@pytest.mark.parametrize(
    ("steps", "trained"), [(9, 6), (4, 4)], ids=["at-the-next-save", "at-the-end"]
)
def test_a_save_that_fails_is_raised(
    run: store.Run, tmp_path: Path, steps: int, trained: int
) -> None:
    made = trainer(
        Intruding, tmp_path, store_run=run, changes={"max_training_steps": steps}
    )

    with pytest.raises(store.AlreadyExistsError, match=f"{run.name}@3"):
        made.train()

    assert trained == len(made.trained)


def test_a_last_save_that_fails_is_tried_once_more_and_raised(
    run: store.Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer(
        Intruding, tmp_path, store_run=run, changes={"max_training_steps": 3}
    )

    with pytest.raises(store.AlreadyExistsError, match=f"{run.name}@3"):
        made.train()

    assert f"the checkpoint is saved again: {run.name}@3" in caplog.text


def test_a_save_that_fails_is_raised_at_the_end_without_a_last_save(
    run: store.Run, tmp_path: Path
) -> None:
    changes = {"max_training_steps": 4, "do_last_save": False}
    made = trainer(Intruding, tmp_path, store_run=run, changes=changes)

    with pytest.raises(store.AlreadyExistsError, match=f"{run.name}@3"):
        made.train()


class Outage(Trainer):
    """Its server is down from the second step to the last one."""

    server: ServerProcess

    def on_step_end(self, state: Any, metrics: Any, step: int) -> Any:
        if step == 2:
            self.server.kill()
        return super().on_step_end(state, metrics, step)

    def _prepare_training_output(self, *args: Any, **kwargs: Any) -> Any:
        self.server.start()
        return super()._prepare_training_output(*args, **kwargs)


def test_training_goes_on_without_a_server_and_the_last_step_is_saved(
    start_server: Callable[..., ServerProcess],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Outage.server = start_server()
    with store.connect(Outage.server.address) as client:
        run = client.run("tests/outage")
        changes = {"max_training_steps": 6}

        trainer(Outage, tmp_path, store_run=run, changes=changes).train()

        # the save of step 6 did not begin in the background; it would have waited
        assert "saved again: save of tests/outage@6 was not started" in caplog.text
        assert [3, 6] == run.steps()


class Texts(Trainer):
    """Puts a leaf into its state that no checkpoint can have."""

    def on_step_end(self, state: Any, metrics: Any, step: int) -> Any:
        state, metrics = super().on_step_end(state, metrics, step)
        if step == 3:
            state = state.replace(opt_state=(state.opt_state, object()))
        return state, metrics


def test_an_unsupported_leaf_is_raised_and_does_not_end_an_epoch(
    run: store.Run, tmp_path: Path
) -> None:
    # EasyDeL's loop takes a TypeError for the end of an epoch
    with pytest.raises(store.StoreError, match=f"{run.name}@3.*object") as caught:
        trainer(Texts, tmp_path, store_run=run).train()

    assert not isinstance(caught.value, TypeError)


def test_without_the_optimizers_state_a_resume_initialises_it_which_is_logged(
    run: store.Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = {"max_training_steps": 3, "save_optimizer_state": False}
    trainer(Trainer, tmp_path, store_run=run, changes=first).train()
    keys = run.open().leaves
    assert not [key for key in keys if key.startswith("opt_state")]

    made = trainer(Trainer, tmp_path, store_run=run, changes=first)
    assert "the optimizer state is initialised" in caplog.text
    assert made.model_state.opt_state is not None
    assert 3 == int(made.model_state.step)

    # with the argument, a checkpoint without the optimizer is rejected
    with pytest.raises(store.InvalidRequestError, match="no state of an optimizer"):
        trainer(Trainer, tmp_path, store_run=run)


def own_state() -> Any:
    """Returns a state with an optimizer that EasyDeL's arguments do not name."""
    return SCENARIO.state(SCENARIO.dims).replace(tx=optax.sgd(1e-2, momentum=0.9))


def test_a_state_with_its_own_optimizer_resumes_with_it(
    run: store.Run, tmp_path: Path
) -> None:
    def made(steps: int) -> Any:
        state = own_state()
        state = state.init_tx(state.tx)
        return trainer(
            Trainer,
            tmp_path,
            given=state,
            store_run=run,
            changes={"max_training_steps": steps},
        )

    made(3).train()
    resumed = made(4)
    output = resumed.train()

    assert [4] == [step.step for step in resumed.trained]
    assert "TraceState" in str(type(output.state.opt_state[0]))


def test_adapters_are_saved_as_they_are_trained_and_resumed(
    run: store.Run, tmp_path: Path
) -> None:
    def made(steps: int) -> Any:
        adapted = model().apply_lora_to_layers(4, ".*q_proj.*", rngs=nnx.Rngs(1))
        return trainer(
            Trainer,
            tmp_path,
            given=adapted.shard_model(),
            store_run=run,
            changes={"max_training_steps": steps},
        )

    trained = made(2).train().state
    resumed = made(3)

    assert digests(trained) == digests(resumed.model_state)
    resumed.train()
    assert [3] == [step.step for step in resumed.trained]
    assert [key for key in run.open().leaves if re.match(r"graphstate/.*lora_a", key)]


class FineTuning(StoreCheckpoints, ed.SFTTrainer):  # type: ignore[misc]  # as above
    """Another trainer of EasyDeL, whose constructor has other arguments."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of 256 words."""
    words = [*(f"w{number}" for number in range(253)), "[PAD]", "[UNK]", "[EOS]"]
    numbers = {word: number for number, word in enumerate(words)}
    made = Tokenizer(WordLevel(numbers, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]"
    )


def test_the_other_trainers_of_easydel_save_and_resume_too(
    run: store.Run, tmp_path: Path
) -> None:
    texts = [" ".join(f"w{n}" for n in range(row, row + 14)) for row in range(40)]

    def made(steps: int) -> Any:
        changes = {"max_training_steps": steps, "dataset_text_field": "text"}
        return FineTuning(
            store_run=run,
            arguments=arguments(tmp_path, ed.SFTConfig, packing=False, **changes),
            processing_class=tokenizer(),
            model=model(),
            train_dataset=Dataset.from_dict({"text": texts}),
        )

    trained = made(2).train().state
    resumed = made(3)

    assert digests(trained) == digests(resumed.model_state)
    assert f"{run.name}@3" == resumed.train().checkpoint_path
    assert [2, 3] == run.steps()


@pytest.mark.parametrize(
    "changes",
    [
        {"resume_if_possible": False},
        {"step_start_point": 1, "force_step_start_point": True},
    ],
    ids=["no-resume", "forced-step"],
)
def test_a_trainer_behind_the_newest_checkpoint_is_rejected_before_a_step(
    run: store.Run, tmp_path: Path, changes: dict[str, Any]
) -> None:
    trainer(Trainer, tmp_path, store_run=run, changes={"max_training_steps": 2}).train()
    made = trainer(Trainer, tmp_path, store_run=run, changes=changes)

    with pytest.raises(
        store.InvalidRequestError, match=r"expected a state of step 2, .* got step [01]"
    ):
        made.train()
    assert [] == made.trained


def test_the_first_step_of_a_run_applies_to_its_start_and_not_to_a_resume(
    run: store.Run, tmp_path: Path
) -> None:
    changes = {"step_start_point": 2, "max_training_steps": 4}
    first = trainer(Trainer, tmp_path, store_run=run, changes=changes)
    first.train()
    changes["max_training_steps"] = 6

    second = trainer(Trainer, tmp_path, store_run=run, changes=changes)
    second.train()

    assert [3, 4, 5, 6] == [step.step for step in first.trained + second.trained]


def test_the_arguments_come_back_as_they_were(run: store.Run, tmp_path: Path) -> None:
    made = trainer(Trainer, tmp_path, store_run=run)

    assert made.arguments.resume_if_possible is True


def test_a_trainer_rejects_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(store.InvalidRequestError, match="store_run: expected a Run"):
        trainer(Trainer, tmp_path, store_run="prod/llama")


def test_a_checkpoint_is_not_removed_after_its_load(
    run: store.Run, tmp_path: Path
) -> None:
    changes = {"remove_ckpt_after_load": True}

    with pytest.raises(store.InvalidRequestError, match="remove_ckpt_after_load=False"):
        trainer(Trainer, tmp_path, store_run=run, changes=changes)


def test_the_mixin_comes_before_the_trainer() -> None:
    with pytest.raises(store.InvalidRequestError, match="StoreCheckpoints before Base"):
        type("Late", (ed.Trainer, StoreCheckpoints), {})


class Deaf(Trainer):
    """A trainer whose constructor does not reach the mixin's resume."""

    def _apply_step_start_point(self) -> None:
        pass


def test_a_trainer_that_would_not_resume_from_the_run_is_rejected(
    run: store.Run, tmp_path: Path
) -> None:
    with pytest.raises(store.InvalidRequestError, match="got Deaf, whose does not"):
        trainer(Deaf, tmp_path, store_run=run)
