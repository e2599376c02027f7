"""Trains with EasyDeL's trainer, saves to a store, and resumes from it.

Kill it at any moment and run it again: it continues at the newest checkpoint.

    python easydel_trainer.py --store file:///tmp/ckpts --run examples/easydel
"""

import argparse

import easydel as ed
import jax.numpy as jnp
import numpy as np
from datasets import Dataset
from flax import nnx

import storesvc_client as store
from storesvc_client.easydel import StoreCheckpoints

LENGTH = 32


class Trainer(StoreCheckpoints, ed.Trainer):
    """EasyDeL's trainer, with its checkpoints in a store."""


def main() -> None:
    """Trains as the command line says."""
    options = _arguments()
    arguments = ed.TrainingArguments(
        model_name="example",
        total_batch_size=8,
        max_length=LENGTH,
        max_training_steps=options.steps,
        learning_rate=1e-3,
        save_steps=options.save_every,
        save_total_limit=3,  # the retention policy of the run
        do_eval=False,
        use_wandb=False,
    )
    with store.connect(options.store) as client:
        trainer = Trainer(
            store_run=client.run(options.run),
            arguments=arguments,
            model=_model(),
            dataset_train=_dataset(rows=8 * options.steps),
        )
        first = int(trainer.model_state.step) + 1
        print(f"trains from step {first}", flush=True)
        output = trainer.train()
    print(f"saved {output.checkpoint_path}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Llama.")
    parser.add_argument("--store", required=True, metavar="TARGET")
    parser.add_argument("--run", required=True, metavar="NAMESPACE/RUN")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    return parser.parse_args()


def _model() -> ed.EasyDeLBaseModule:
    config = ed.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
    )
    config.add_basic_configurations(attn_mechanism=ed.AttentionMechanisms.VANILLA)
    model = ed.LlamaForCausalLM(
        config=config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0)
    )
    return model.shard_model()


def _dataset(*, rows: int) -> Dataset:
    """Returns rows of tokens that count upwards, each from its own number."""
    ids = (np.arange(rows)[:, None] + np.arange(LENGTH)) % 256
    return Dataset.from_dict(
        {"input_ids": ids.tolist(), "attention_mask": np.ones_like(ids).tolist()}
    )


if __name__ == "__main__":
    main()
