"""A small training by EasyDeL's trainer, whose batches and steps are recorded.

    python -m tests.easydel.training TARGET RUN FOLDER KILL_AT

trains in a process that kills itself once it has trained step KILL_AT; the records of
its steps are lines of the file FOLDER/steps.
"""

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import easydel as ed
import jax
import numpy as np
from datasets import Dataset

import storesvc_client as store
from storesvc_client.easydel import StoreCheckpoints
from tests.easydel.scenarios import Dims, Scenario

STEPS: Final = 9
ROWS: Final = 20
BATCH_SIZE: Final = 4
"""Five batches an epoch, so that a training ends in its second epoch."""

SCENARIO: Final = Scenario()


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """A step, the rows of its batch, and its loss."""

    step: int
    rows: list[int]
    loss: float


class Recorded(ed.Trainer):  # type: ignore[misc]  # mypy does not see easydel
    """EasyDeL's trainer; records each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.trained: list[TrainedStep] = []
        self._rows: list[int] = []
        super().__init__(*args, **kwargs)

    def _preprocess_batch_input(self, state: Any, batch: Any, is_train: bool) -> Any:
        prepared, informations = super()._preprocess_batch_input(state, batch, is_train)
        self._rows = [int(row) for row in prepared["input_ids"][:, 0]]
        return prepared, informations

    def on_step_end(self, state: Any, metrics: Any, step: int) -> Any:
        self.trained.append(
            TrainedStep(step=step, rows=self._rows, loss=float(metrics.loss))
        )
        return super().on_step_end(state, metrics, step)


class Trainer(StoreCheckpoints, Recorded):
    """The same, with its checkpoints in a store."""


class KilledTrainer(Trainer):
    """Kills its process after a step, before the step is saved."""

    kill_at: int
    records: Path

    def on_step_end(self, state: Any, metrics: Any, step: int) -> Any:
        found = super().on_step_end(state, metrics, step)
        with self.records.open("a") as file:
            last = self.trained[-1]
            print(json.dumps([last.step, last.rows, last.loss]), file=file, flush=True)
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return found


def records(file: Path) -> list[TrainedStep]:
    """Returns the steps that a killed process has recorded."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [TrainedStep(step=step, rows=rows, loss=loss) for step, rows, loss in rows]


def arguments(folder: Path, kind: Any = ed.TrainingArguments, **changes: Any) -> Any:
    """Returns the arguments of a training that saves every third step."""
    chosen: dict[str, Any] = {
        "model_name": "tiny",
        "save_directory": str(folder),
        "total_batch_size": BATCH_SIZE,
        "max_length": 16,
        "num_train_epochs": 2,
        "max_training_steps": STEPS,
        "save_steps": 3,
        "learning_rate": 1e-2,
        "do_eval": False,
        "use_wandb": False,
        "report_metrics": False,
        "progress_bar_type": "json",
        "track_memory": False,
    }
    return kind(**(chosen | changes))


def dataset() -> Dataset:
    """Returns rows that begin with their number."""
    tokens = np.random.default_rng(1).integers(0, 256, (ROWS, 16), dtype=np.int32)
    tokens[:, 0] = range(ROWS)
    ids = tokens.tolist()
    return Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * 16] * ROWS})


def model(dims: Dims = SCENARIO.dims, **sizes: Any) -> Any:
    """Returns a new model, sharded over a mesh."""
    return SCENARIO.model(dims, **sizes).shard_model()


def trainer(
    kind: Any, folder: Path, *, given: Any = None, changes: Any = None, **more: Any
) -> Any:
    """Returns a trainer of a class.

    Args:
        kind: The class.
        folder: Directory that EasyDeL may write to.
        given: The model, or a state; None: a new model.
        changes: Arguments that differ from ``arguments``.
        more: More arguments of the class.
    """
    given = model() if given is None else given
    return kind(
        arguments=arguments(folder, **(changes or {})),
        dataset_train=dataset(),
        **{"model_state" if hasattr(given, "opt_state") else "model": given},
        **more,
    )


def _main(target: str, run: str, folder: str, kill_at: str) -> None:
    KilledTrainer.kill_at = int(kill_at)
    KilledTrainer.records = Path(folder, "steps")
    with store.connect(target) as client:
        trainer(KilledTrainer, Path(folder), store_run=client.run(run)).train()


if __name__ == "__main__":
    assert jax.device_count() == 8
    _main(*sys.argv[1:])
