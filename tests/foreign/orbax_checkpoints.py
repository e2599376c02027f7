"""Checkpoints that Orbax itself writes, for the tests of its reader.

``WRITERS`` are the ways of its interfaces, with their defaults; ``ENCODINGS`` are all
combinations of what can be chosen.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1
from orbax.checkpoint._src.metadata.pytree_metadata_options import PyTreeMetadataOptions

MESH_SHAPE: Final = (4, 2)


def mesh() -> Mesh:
    """Returns a mesh of all devices."""
    return Mesh(np.array(jax.devices()).reshape(MESH_SHAPE), ("x", "y"))


def arrays() -> dict[str, Any]:
    """Returns a tree of arrays only: sharded, of several types, of zeros, of rank 0."""
    spread = NamedSharding(mesh(), PartitionSpec("x", "y"))
    numbers = np.arange(64 * 16).reshape(64, 16)
    return {
        "layers": [
            {"w": jax.device_put(jnp.asarray(numbers + k, dtype), spread)}
            for k, dtype in enumerate((jnp.bfloat16, jnp.float32))
        ],
        "dots.in.keys": jnp.ones(3, jnp.float16),
        "zeros": jnp.zeros((4, 4)),
        "count": jnp.int32(7),
        "float8": jnp.ones(8, jnp.float8_e4m3fn),
        "mask": np.array([True, False]),
        "opt": optax.adam(0.1).init({"w": jnp.ones(2)}),
    }


def everything() -> dict[str, Any]:
    """Returns a tree with every kind of leaf."""
    return {
        **arrays(),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4), 3),
        "step": 7,
        "lr": 0.5,
        "flag": True,
        "name": "übung",
        "empty": [None, {}, [], ()],
    }


def tree_for(writer: str) -> dict[str, Any]:
    """Returns the tree for a writer: with everything that it accepts."""
    tree = everything()
    if writer in ("v0-standard", "v0-manager"):  # StandardSave rejects texts
        del tree["name"]
    return tree


def _v0(handler: Any) -> Callable[[Path, Any], None]:
    def write(path: Path, tree: Any) -> None:
        with ocp.Checkpointer(handler()) as checkpointer:
            checkpointer.save(path, tree)

    return write


def _v0_standard(path: Path, tree: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def _v0_manager(path: Path, tree: Any) -> None:
    options = ocp.CheckpointManagerOptions(
        best_fn=lambda metrics: metrics["loss"],
        step_prefix="ckpt",
        step_format_fixed_length=6,
    )
    with ocp.CheckpointManager(path, options=options) as manager:
        for step in (5, 100):
            manager.save(
                step,
                args=ocp.args.StandardSave(tree),
                metrics={"loss": 0.5},
                custom_metadata={"who": "a test"},
            )
            manager.wait_until_finished()


def _v0_composite(path: Path, tree: Any) -> None:
    """Writes what MaxText writes, with other items next to it."""
    data = iter(grain.MapDataset.range(9).to_iter_dataset())
    next(data)
    with ocp.CheckpointManager(path) as manager:
        manager.save(
            3,
            args=ocp.args.Composite(
                items=ocp.args.PyTreeSave(tree),
                ema=ocp.args.StandardSave({"w": jnp.ones(2)}),
                model_config=ocp.args.JsonSave({"layers": [1, 2]}),
                iter=grain.checkpoint.CheckpointSave(data),
            ),
        )


def _v1(path: Path, tree: Any) -> None:
    v1.save(path, tree)


def _v1_checkpointer(path: Path, tree: Any) -> None:
    with v1.training.Checkpointer(path) as checkpointer:
        checkpointer.save(10, tree)


WRITERS: Final[Mapping[str, Callable[[Path, Any], None]]] = MappingProxyType(
    {
        "v0-standard": _v0_standard,
        "v0-pytree": _v0(ocp.PyTreeCheckpointHandler),
        "v0-zarr3": _v0(lambda: ocp.PyTreeCheckpointHandler(use_zarr3=True)),
        "v0-files": _v0(lambda: ocp.PyTreeCheckpointHandler(use_ocdbt=False)),
        "v0-manager": _v0_manager,
        "v0-composite": _v0_composite,
        "v1-save": _v1,
        "v1-checkpointer": _v1_checkpointer,
    }
)
"""Writes a tree into a folder that does not exist."""


STEP: Final = 12
"""Step that a manager writes with an encoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """What Orbax can be asked for when it writes a tree."""

    version: Literal["v0", "v1"]
    is_ocdbt: bool = True
    is_zarr3: bool = False
    is_managed: bool = False
    """Whether it is a step of a manager."""
    is_compressed: bool = True
    chunk_bytes: int | None = None
    """Maximum bytes of a chunk; None for a chunk a shard."""
    has_rich_types: bool = False
    """Whether the metadata names tuples and named tuples."""

    @property
    def name(self) -> str:
        """Its choices, joined by "-"."""
        data = "zstd" if self.is_compressed else "raw"
        parts = (
            self.version,
            "ocdbt" if self.is_ocdbt else "files",
            "zarr3" if self.is_zarr3 else "zarr2",
            "manager" if self.is_managed else "single",
            data if self.chunk_bytes is None else f"{data}-chunks",
            *(["rich"] if self.has_rich_types else []),
        )
        return "-".join(parts)

    def write(self, path: Path, tree: Any) -> None:
        """Writes a tree into a folder that does not exist."""
        if self.version == "v1":
            with self._context():
                if self.is_managed:
                    with v1.training.Checkpointer(path) as managed:
                        managed.save(STEP, tree)
                else:
                    v1.save(path, tree)
            return
        save_args = jax.tree.map(
            lambda _: ocp.SaveArgs(chunk_byte_size=self.chunk_bytes), tree
        )
        args = ocp.args.PyTreeSave(tree, save_args=save_args)
        if self.is_managed:
            with ocp.CheckpointManager(path, item_handlers=self._handler()) as manager:
                manager.save(STEP, args=args)
        else:
            with ocp.Checkpointer(self._handler()) as checkpointer:
                checkpointer.save(path, args=args)

    def read(self, path: Path) -> Any:
        """Returns the tree as Orbax reads it."""
        if self.version == "v1":
            return _read_v1(path, step=STEP if self.is_managed else None)
        if self.is_managed:
            with ocp.CheckpointManager(path, item_handlers=self._handler()) as manager:
                return manager.restore(STEP)
        with ocp.Checkpointer(self._handler()) as checkpointer:
            return checkpointer.restore(path)

    def _handler(self) -> ocp.PyTreeCheckpointHandler:
        return ocp.PyTreeCheckpointHandler(
            use_ocdbt=self.is_ocdbt,
            use_zarr3=self.is_zarr3,
            use_compression=self.is_compressed,
            pytree_metadata_options=PyTreeMetadataOptions(
                support_rich_types=self.has_rich_types
            ),
        )

    def _context(self) -> v1.Context:
        context = v1.Context()
        saving = context.array.saving
        saving.use_ocdbt = self.is_ocdbt
        saving.use_zarr3 = self.is_zarr3
        saving.use_compression = self.is_compressed
        saving.storage_options.chunk_byte_size = self.chunk_bytes
        context.pytree.saving.pytree_metadata_options = PyTreeMetadataOptions(
            support_rich_types=self.has_rich_types
        )
        return context


def _read_v1(path: Path, step: int | None = None) -> Any:
    if step is None:
        return v1.load(path)
    with v1.training.Checkpointer(path) as checkpointer:
        return checkpointer.load(step)


def _encodings() -> Iterator[Encoding]:
    flags = (True, False)
    for version in ("v0", "v1"):
        for is_managed, is_ocdbt, is_zarr3 in product(flags, flags, flags):
            for is_compressed, chunk_bytes in ((True, None), (False, None), (True, 96)):
                yield Encoding(
                    version=version,
                    is_ocdbt=is_ocdbt,
                    is_zarr3=is_zarr3,
                    is_managed=is_managed,
                    is_compressed=is_compressed,
                    chunk_bytes=chunk_bytes,
                )
        yield Encoding(version=version, has_rich_types=True)


ENCODINGS: Final[Mapping[str, Encoding]] = MappingProxyType(
    {each.name: each for each in _encodings()}
)
"""Every encoding that Orbax 0.12.8 writes, by name."""


SAVINGS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "v1-replicas": {
            "use_replica_parallel": True,
            "min_slice_bytes_for_replica_parallel": 1,
            "enable_replica_parallel_separate_folder": True,
        },
        "v1-small-files": {"ocdbt_target_data_file_size": 512},
        "v1-bare": {"enable_write_sharding_file": False, "array_metadata_store": None},
    }
)
"""Rarer options of arrays in version 1, by name."""


def write_with(path: Path, tree: Any, options: Mapping[str, Any]) -> None:
    """Writes a tree with such options."""
    context = v1.Context()
    for name, value in options.items():
        setattr(context.array.saving, name, value)
    with context:
        v1.save(path, tree)


def read_v0(path: Path) -> Any:
    """Returns a tree as version 0 of Orbax reads it."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path)


def _read_composite(path: Path) -> Any:
    asked = ocp.args.Composite(
        items=ocp.args.PyTreeRestore(), ema=ocp.args.StandardRestore()
    )
    with ocp.CheckpointManager(path) as manager:
        return dict(manager.restore(3, args=asked).items())


READERS: Final[Mapping[str, Callable[[Path], Any]]] = MappingProxyType(
    {
        "v0-standard": read_v0,
        "v0-pytree": read_v0,
        "v0-zarr3": read_v0,
        "v0-files": read_v0,
        "v0-manager": lambda path: read_v0(path / "ckpt_000100" / "default"),
        "v0-composite": _read_composite,
        "v1-save": _read_v1,
        "v1-checkpointer": lambda path: _read_v1(path, step=10),
    }
)
"""Reads with Orbax what the writer of that name writes: the newest step."""

_SHIPPED: Final = "experimental/v1/_src/testing/compatibility/checkpoints"


def shipped_trees() -> Iterator[tuple[str, Path]]:
    """Yields the name and the folder of each tree that Orbax's package ships for its
    own tests; some releases ship none."""
    spec = find_spec("orbax.checkpoint")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent / _SHIPPED
    for manifest in sorted(root.rglob("manifest.ocdbt")):
        if not manifest.parent.name.startswith("ocdbt.process"):
            yield manifest.parent.relative_to(root).as_posix(), manifest.parent


def nnx_state() -> nnx.State[Any, Any]:
    """Returns the state of a small model."""
    return nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
