"""Runs one training process of the demo; `processes` formats its output.

    python -m storesvc_client.demo.train --store 127.0.0.1:7070 --run demo/pydoc-lm \\
        --mesh dp=2,fsdp=2,tp=2 --steps 60 --save-every 10

As one of the processes of a job, it takes its number: ``--devices 2 --processes 4
--process 0 --coordinator 127.0.0.1:1234``.

It trains a small decoder-only language model over bytes on a mesh of CPU devices, from
the start or from a checkpoint, and saves; in one process, or in the processes of a job.

A resumed run does what an uninterrupted one does. A batch is a function of the step
alone. A step is one jitted function from state to state. The count of each dropout's
RNG stream is part of the state, so that the masks are the same. The result keeps the
shardings of the argument: chosen by the compiler, they would change, and the next save
would record them. One digest of a whole state, which is equal only for bitwise equal
states, is saved in a label of the checkpoint, independent of the path of the leaves,
and computed again from what a restore returns.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
import xxhash
from flax import nnx
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from storesvc.format.names import Which
from storesvc_client import Run, Save, connect
from storesvc_client._pytree.partition_rules import shardings_by_rules
from storesvc_client.demo.processes import (
    Committed,
    Event,
    Restored,
    SaveBegun,
    Step,
    line,
    stop_at_kill_point,
)
from storesvc_client.easydel import restore_state, save_state
from storesvc_client.trees.easydel import EasyDeLState
from storesvc_client.trees.traversals import tree_path_to_string


def digest_tree(tree: Any) -> str:
    """Returns a hexadecimal digest of the name, dtype, shape and bytes of each leaf."""
    digest = xxhash.xxh3_128()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = repr(tree_path_to_string(path))
        digest.update(f"{name} {leaf.dtype} {leaf.shape}\n".encode())
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = jax.random.key_data(leaf) if is_key else leaf
        # of an array that other processes hold parts of, all processes gather them
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            array = process_allgather(array, tiled=True)
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()


WINDOW = 64
"""Length of the context in bytes."""

_WIDTH = 64
_HEADS = 4
_LAYERS = 2
_DROPOUT = 0.1

_P = PartitionSpec
RULES: list[tuple[str, PartitionSpec]] = [
    ("embedding", _P("tp", "fsdp")),
    ("attention/(query|key|value)/kernel", _P("fsdp", "tp")),
    ("attention/out/kernel", _P("tp", None, "fsdp")),
    ("up/kernel", _P("fsdp", "tp")),
    ("down/kernel", _P("tp", "fsdp")),
    (".*", _P()),
]
"""Pairs of a regular expression, searched in the leaf key, and a placement. The moments
of the optimizer contain the names of their parameters, and so match the same rules."""


class Block(nnx.Module):
    """Attention, then a wide layer, each added to its input."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(_WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            _HEADS, _WIDTH, dropout_rate=_DROPOUT, decode=False, rngs=rngs
        )
        self.norm = nnx.LayerNorm(_WIDTH, rngs=rngs)
        self.up = nnx.Linear(_WIDTH, 4 * _WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * _WIDTH, _WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(_DROPOUT, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns the layer's output, of the shape of ``x``."""
        x = x + self.attention(self.attention_norm(x), mask=mask, deterministic=False)
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))


class ByteModel(nnx.Module):
    """A transformer with tied input and output embeddings."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        small = nnx.initializers.normal(0.1)
        self.embed = nnx.Embed(256, _WIDTH, embedding_init=small, rngs=rngs)
        self.positions = nnx.Param(small(rngs.params(), (WINDOW, _WIDTH)))
        self.layers = nnx.List([Block(rngs=rngs) for _ in range(_LAYERS)])
        self.norm = nnx.LayerNorm(_WIDTH, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        """Returns the logits of the byte after each prefix: (batch, window, 256)."""
        x = self.embed(text) + self.positions[...]
        mask = nnx.make_causal_mask(text)
        for layer in self.layers:
            x = layer(x, mask)
        return self.embed.attend(self.norm(x))


def make_model() -> ByteModel:
    """Returns a new model with fixed seeds; dropout has its own RNG stream."""
    return ByteModel(rngs=nnx.Rngs(params=0, dropout=1))


def make_optimizer() -> optax.GradientTransformation:
    """Returns AdamW with warm-up and cosine decay."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0, peak_value=1e-2, warmup_steps=10, decay_steps=80, end_value=1e-3
    )
    return optax.adamw(schedule, weight_decay=0.01)


def compute_loss(model: ByteModel, batch: jax.Array) -> jax.Array:
    """Returns the mean cross entropy of the batch, in nats a byte."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(batch[:, :-1]), batch[:, 1:]
    )
    return jnp.mean(losses)


_SEED = 20_260_401
_BATCH_SIZE = 32

StateAndLoss: TypeAlias = tuple[EasyDeLState, jax.Array]


class Training:
    """Trains a state on a mesh."""

    def __init__(self, axes: Mapping[str, int]) -> None:
        self._mesh = jax.make_mesh(
            tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes)
        )
        self._mesh_text = ",".join(f"{name}={size}" for name, size in axes.items())
        self._tx = make_optimizer()
        self._corpus = _Corpus()

    def start(self) -> EasyDeLState:
        """Returns the state before the first step."""

        def made() -> EasyDeLState:
            return EasyDeLState.create(
                step=jnp.zeros((), jnp.int32),
                model=make_model(),
                tx=self._tx,
                init_opt_state=True,
            )

        # As lists: two traces of `made` have equal leaves, but different tree
        # structures because of the closures in their graphdefs.
        abstract = jax.eval_shape(made)
        shardings = jax.tree.leaves(shardings_by_rules(abstract, self._mesh, RULES))
        make_leaves = jax.jit(lambda: jax.tree.leaves(made()), out_shardings=shardings)
        state: EasyDeLState = jax.tree.unflatten(
            jax.tree.structure(abstract), make_leaves()
        )
        return state

    def resume(self, run: Run, which: Which) -> tuple[EasyDeLState, Restored]:
        """Returns the state of a checkpoint, bitwise as it was saved."""
        began = time.monotonic()
        state = restore_state(
            run, which, model=make_model, tx=self._tx, mesh=self._mesh, rules=RULES
        )
        jax.block_until_ready(state)
        seconds = time.monotonic() - began
        checkpoint = run.checkpoint(int(state.step))
        digest = digest_tree(state)
        if digest != checkpoint.labels["digest"]:
            raise ValueError(
                f"checkpoint {checkpoint.step}: expected a state of digest "
                f"{checkpoint.labels['digest']}, as saved, got {digest}"
            )
        return state, Restored(
            step=checkpoint.step,
            mesh=self._mesh_text,
            leaf_count=checkpoint.leaf_count,
            size_bytes=checkpoint.size_bytes,
            seconds=seconds,
            digest=digest,
        )

    def steps(
        self, state: EasyDeLState, *, until: int
    ) -> Iterator[tuple[EasyDeLState, Step]]:
        """Yields the state after each step; the one before it is donated."""
        advance = _advance_with(state.shardings, self._mesh)
        rows = NamedSharding(self._mesh, _P(("dp", "fsdp")))
        for step in range(int(state.step) + 1, until + 1):
            text = self._corpus.batch(step)
            # each process of a job provides what its devices need
            batch = jax.make_array_from_callback(text.shape, rows, text.__getitem__)
            state, loss = advance(state, batch)
            yield state, Step(step=step, loss=float(loss), mesh=self._mesh_text)


def _advance_with(
    shardings: Any, mesh: Mesh
) -> Callable[[EasyDeLState, jax.Array], StateAndLoss]:
    def advance(state: EasyDeLState, batch: jax.Array) -> StateAndLoss:
        def loss(graphstate: Any) -> tuple[jax.Array, Any]:
            model = state.merge(graphstate)
            # evaluated first: dropout advances the counts in `model`
            value = compute_loss(model, batch)
            return value, nnx.state(model, nnx.Not(nnx.Param))

        grad = jax.value_and_grad(loss, has_aux=True)
        (value, graphother), grads = grad(state.graphstate)
        advanced = state.apply_gradients(grads=grads)
        return advanced.replace(graphother=graphother), value

    replicated = NamedSharding(mesh, _P())
    return jax.jit(advance, donate_argnums=0, out_shardings=(shardings, replicated))


class _Corpus:
    """Batches of the training text: the topics of ``help()``, prose that ships with
    Python, as bytes. A batch is a function of the step alone."""

    def __init__(self) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        self._bytes = np.frombuffer(text.encode(), np.uint8)

    def batch(self, step: int) -> npt.NDArray[np.int32]:
        """Returns the batch of a step: ``_BATCH_SIZE`` rows of ``WINDOW + 1`` bytes,
        each window with the byte that follows it."""
        draw = np.random.default_rng((_SEED, step))
        starts = draw.integers(len(self._bytes) - WINDOW, size=_BATCH_SIZE)
        columns = np.arange(WINDOW + 1)
        windows: npt.NDArray[np.uint8] = self._bytes[starts[:, None] + columns]
        return windows.astype(np.int32)


def save_steps(
    steps: Iterable[tuple[EasyDeLState, Step]], run: Run, *, every: int
) -> Iterator[Event]:
    """Yields the steps, and the events of saves in the background at each ``every``
    steps.

    A save that is due while another is in progress is skipped: on slow storage, the job
    would be killed within a save, which the demo does not show.
    """
    pending: Save | None = None
    for state, step in steps:
        yield step
        is_due = step.step % every == 0
        is_busy = pending is not None and not pending.done()
        if pending is not None and (is_due or not is_busy):
            yield _wait_committed(pending)
            pending = None
        if is_due and not is_busy:
            labels = {"digest": digest_tree(state), "mesh": step.mesh}
            began = time.monotonic()
            pending = save_state(run, state, metrics={"loss": step.loss}, labels=labels)
            blocked = time.monotonic() - began
            yield SaveBegun(step=step.step, blocked_seconds=blocked)
    if pending is not None:
        yield _wait_committed(pending)


def _wait_committed(save: Save) -> Committed:
    checkpoint = save.result()
    return Committed(step=checkpoint.step, size_bytes=checkpoint.size_bytes)


def main() -> None:
    """Trains with the options of the command line; prints one line for each event."""
    arguments = _arguments()
    jax.config.update("jax_platforms", "cpu")
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={arguments.devices}"
        # compiles in two thirds of the time, and runs as fast
        " --xla_backend_optimization_level=1"
    )
    # hides the partitioner's advice on sharding; errors still show
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if arguments.processes > 1:
        jax.distributed.initialize(
            arguments.coordinator,
            arguments.processes,
            arguments.process,
            initialization_timeout=120,
        )
    training = Training(arguments.mesh)
    if arguments.store is None:
        steps = training.steps(training.start(), until=arguments.steps)
        events: Iterator[Event] = (step for _, step in steps)
    else:
        events = _stored_events(arguments, training)
    for event in events:
        print(line(event), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo's model.")
    parser.add_argument("--mesh", type=_axes, required=True, metavar="AXIS=SIZE,...")
    parser.add_argument("--steps", type=int, required=True, help="last step")
    parser.add_argument("--devices", type=int, default=8, help="of this process")
    parser.add_argument("--processes", type=int, default=1, help="of the job")
    parser.add_argument("--process", type=int, default=0, help="which one this is")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of the job")
    parser.add_argument("--store", metavar="HOST:PORT")
    parser.add_argument("--insecure", action="store_true", help="as connect takes it")
    for option in ("--ca", "--cert", "--key"):
        parser.add_argument(option, metavar="FILE", help="as connect takes it")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="its token")
    parser.add_argument("--run", metavar="NAMESPACE/RUN")
    parser.add_argument(
        "--save-every", type=int, metavar="STEPS", help="default: never save"
    )
    parser.add_argument(
        "--hold-after",
        type=int,
        metavar="STEP",
        help="wait to be killed, two steps after a save of that step or a later one",
    )
    parser.add_argument(
        "--resume",
        type=lambda text: "latest" if text == "latest" else int(text),
        metavar="CHECKPOINT",
        help="a step, or latest",
    )
    arguments = parser.parse_args()
    if arguments.processes > 1 and arguments.coordinator is None:
        parser.error("--processes needs --coordinator")
    stored = arguments.save_every is not None or arguments.resume is not None
    if stored and (arguments.store is None or arguments.run is None):
        parser.error("--save-every and --resume need --store and --run")
    if arguments.hold_after is not None and arguments.save_every is None:
        parser.error("--hold-after needs --save-every")
    return arguments


def _axes(text: str) -> dict[str, int]:
    return {
        name: int(size)
        for name, size in (axis.split("=", 1) for axis in text.split(","))
    }


def _stored_events(
    arguments: argparse.Namespace, training: Training
) -> Iterator[Event]:
    with connect(
        arguments.store,
        ca=arguments.ca,
        cert=arguments.cert,
        key=arguments.key,
        token=arguments.token_file,
        insecure=arguments.insecure,
    ) as client:
        run = client.run(arguments.run)
        if arguments.resume is None:
            state = training.start()
        else:
            state, restored = training.resume(run, arguments.resume)
            yield restored
        steps = training.steps(state, until=arguments.steps)
        if arguments.save_every is None:
            yield from (step for _, step in steps)
            return
        events = save_steps(steps, run, every=arguments.save_every)
        if arguments.hold_after is None:
            yield from events
        else:
            yield from stop_at_kill_point(events, checkpoint=arguments.hold_after)


if __name__ == "__main__":
    main()
