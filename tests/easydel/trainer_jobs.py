"""Functions that the processes of the jobs of ``test_trainer_jobs.py`` run."""

import os
import signal
import time
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp

import storesvc_client as store
from tests.easydel.training import SCENARIO, Trainer, trainer

PREEMPTED_AT: Final = 2
"""Step after which process 1 receives SIGTERM."""

Outcome = dict[str, Any]


class PreemptedTrainer(Trainer):
    """A trainer of which process 1 receives SIGTERM, on CPUs as on TPUs."""

    def _should_enable_tpu_preemption_checkpointing(self) -> bool:
        enabled: bool = self.arguments.save_tpu_preemption_checkpoints
        return enabled

    def on_step_end(self, state: Any, metrics: Any, step: int) -> Any:
        if step == PREEMPTED_AT and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)  # jax announces a step that is some tenths of a second ahead
        return super().on_step_end(state, metrics, step)


def _state() -> Any:
    """Returns a state that EasyDeL can spread over processes: its own ``device_put``
    takes no typed keys there."""
    state = SCENARIO.model(SCENARIO.dims).to_state()

    def raw(leaf: Any) -> Any:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else leaf

    return state.replace(graphother=jax.tree.map(raw, state.graphother))


def _trained(kind: Any, target: str, run: str, folder: str, **changes: Any) -> Outcome:
    index = jax.process_index()
    with store.connect(target) as client:
        made = trainer(
            kind,
            Path(folder, str(index)),
            given=_state(),
            store_run=client.run(run),
            changes=changes,
        )
        output = made.train()
        return {
            "trained": [step.step for step in made.trained],
            "losses": [step.loss for step in made.trained],
            "path": output.checkpoint_path,
            "committed": client.run(run).steps(),
        }


def saves_by_time(target: str, run: str, folder: str) -> list[Outcome]:
    """Trains, and resumes; only in process 0 the interval has ever passed."""
    minutes = 1e-9 if jax.process_index() == 0 else 1e9
    return [
        _trained(
            Trainer,
            target,
            run,
            folder,
            save_steps=None,
            save_interval_minutes=minutes,
            max_training_steps=steps,
        )
        for steps in (2, 4)
    ]


def is_preempted(target: str, run: str, folder: str) -> Outcome:
    """Trains until jax announces the step at which all processes stop."""
    return _trained(
        PreemptedTrainer,
        target,
        run,
        folder,
        save_steps=None,
        num_train_epochs=100,
        max_training_steps=500,
    )
