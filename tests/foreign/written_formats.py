"""Every format that is mounted, as its own package writes and reads it.

Each value is a way in which checkpoints are stored: Orbax with every encoding and by
each of its interfaces, safetensors alone, in shards and in the cache of Hugging Face,
eformer's two writers, levanter's two layouts, jax's own serialization. eformer needs
another jax than the tests have, so its checkpoints are those that
``tests/easydel/eformer_writer.py`` wrote; levanter's are written as
``test_levanter.py`` says.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.array_serialization import pytree_serialization
from jax.experimental.array_serialization.serialization import (
    GlobalAsyncCheckpointManager,
)
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint import v1
from safetensors.numpy import save_file

from tests.foreign import test_jax_arrays, test_levanter, test_safetensors
from tests.foreign.orbax_checkpoints import (
    ENCODINGS,
    READERS,
    SAVINGS,
    WRITERS,
    Encoding,
    arrays,
    everything,
    mesh,
    read_v0,
    shipped_trees,
    tree_for,
    write_with,
)
from tests.support import eformer_parts
from tests.support.safetensors_files import HELD, load_file, load_folder

EFORMER: Final = Path(__file__).parents[1] / "golden" / "foreign" / "eformer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format as its own package writes and reads it."""

    kind: str
    """Its name in the URL of a mount."""
    write: Callable[[Path], object]
    """Writes a checkpoint into a folder that does not exist."""
    read: Callable[[Path], Any]
    """Returns the tree of its newest step, or its arrays by dotted names."""


@cache
def _orbax_tree() -> dict[str, Any]:
    """Returns a tree with every kind of leaf and with chunks of odd shapes."""
    rows = NamedSharding(mesh(), PartitionSpec("x"))
    whole = NamedSharding(mesh(), PartitionSpec())
    numbers = jnp.arange(12 * 7, dtype=jnp.float32).reshape(12, 7)
    return {
        **everything(),
        "replicated": {
            "in_part": jax.device_put(numbers, rows),
            "wholly": jax.device_put(numbers, whole),
        },
        "odd": jnp.arange(5 * 9, dtype=jnp.int8).reshape(5, 9),
        "wide": np.linspace(-1, 1, 7 * 11).reshape(7, 11),
        "wave": np.array([1 + 2j, -0.0]),
        "edges": np.array([np.nan, -0.0, np.inf], np.float32),
        "quarter": jnp.arange(-4, 4, dtype=jnp.int4),
        "large": 2**62,
    }


def _all_dtypes() -> dict[str, Any]:
    """Returns an array of each dtype that safetensors holds in whole bytes."""
    drawn = np.random.default_rng(0)
    tensors = {
        f"dtypes.{dtype.name}": np.frombuffer(
            bytes([0, 1]) * 24 if dtype == np.bool_ else drawn.bytes(48), dtype
        )
        for dtype in HELD.values()
    }
    return {**tensors, **test_safetensors.WEIGHTS}


def _write_single(path: Path) -> None:
    path.mkdir()
    save_file(_all_dtypes(), path / "model.safetensors", {"format": "np"})


def _write_shards(path: Path) -> None:
    path.mkdir()
    test_safetensors.write_sharded(path)
    (path / "config.json").write_text('{"layers": 2}')


def _write_cache(path: Path) -> None:
    """Writes a repository as Hugging Face's downloads leave it."""
    for name in ("blobs", "refs", "snapshots/abc"):
        (path / name).mkdir(parents=True)
    (path / "refs" / "main").write_text("abc")
    test_safetensors.write_sharded(path / "blobs")
    for blob in (path / "blobs").iterdir():
        (path / "snapshots/abc" / blob.name).symlink_to(f"../../blobs/{blob.name}")


def _write_steps(path: Path) -> None:
    for step in (5, 100):
        (path / f"checkpoint-{step}").mkdir(parents=True)
        weights = {"w": np.full((3, 2), step), "b": np.arange(3.0) * step}
        save_file(weights, path / f"checkpoint-{step}" / "model.safetensors")


def _copy_eformer(step: int, path: Path) -> None:
    shutil.copytree(EFORMER / f"run-{step}", path / f"run-{step}")


def _read_eformer(step: int, path: Path) -> Any:
    assert (path / f"run-{step}").is_dir()
    tree = eformer_parts.expected_tree(step)
    return {key.replace("/", "."): array for key, array in tree.items()}


def _write_levanter(path: Path, *, is_old: bool) -> None:
    manager = GlobalAsyncCheckpointManager()
    test_levanter.write(manager, path / "step-100", is_old=is_old)


def _read_levanter(path: Path, *, is_old: bool) -> Any:
    manager = GlobalAsyncCheckpointManager()
    names = list(test_levanter.ARRAYS)
    folder = path / "step-100"
    here = [SingleDeviceSharding(jax.devices()[0])] * len(names)
    if is_old:
        paths = [str(folder / name) for name in names]
        found = manager.deserialize_with_paths(here, paths)
    else:
        found = manager.deserialize(here, test_levanter.specs(folder))
    return {
        name.replace("/", "."): array for name, array in zip(names, found, strict=True)
    }


def _read_jax(path: Path) -> Any:
    return pytree_serialization.load(path, SingleDeviceSharding(jax.devices()[0]))


def _orbax_formats() -> Iterator[tuple[str, Format]]:
    for name, encoding in ENCODINGS.items():
        write = partial(_write_encoded, encoding)
        yield f"orbax-{name}", Format(kind="orbax", write=write, read=encoding.read)
    for name, read in READERS.items():
        write = partial(_write_by, name)
        yield f"orbax-by-{name}", Format(kind="orbax", write=write, read=read)
    for name in SAVINGS:
        write = partial(_write_with, name)
        read = _read_bare if name == "v1-bare" else v1.load
        yield f"orbax-{name}", Format(kind="orbax", write=write, read=read)
    yield (
        "orbax-v1-several",
        Format(kind="orbax", write=_write_several, read=v1.load_checkpointables),
    )


def _write_encoded(encoding: Encoding, path: Path) -> None:
    encoding.write(path, _orbax_tree())


def _write_by(writer: str, path: Path) -> None:
    WRITERS[writer](path, tree_for(writer))


def _write_with(name: str, path: Path) -> None:
    tree = arrays() if name == "v1-bare" else _orbax_tree()
    write_with(path, tree, SAVINGS[name])


def _read_bare(path: Path) -> Any:
    """Reads arrays whose shardings are not stored: they need a target."""
    return v1.load(path, arrays())


def _write_several(path: Path) -> None:
    trees = {"model": arrays(), "opt": [jnp.ones(3), {"count": 7}]}
    v1.save_checkpointables(path, trees)


def _shipped_formats() -> Iterator[tuple[str, Format]]:
    """Yields what Orbax's package ships, which older versions of it wrote."""
    trees = dict(shipped_trees())
    whole = "checkpoint_metadata_present/pytree_checkpointable_has_metadata"
    for name, place, item in (
        ("v0-direct", "v0_checkpoints/direct_checkpoint", ""),
        ("v0-composite", "v0_checkpoints/composite_checkpoint", "state"),
        ("v1-composite", "v1_checkpoints/composite_checkpoint", "state"),
    ):
        tree = trees.get(f"{place}/{whole}/{item}".rstrip("/"))
        if tree is not None:
            step = tree.parent if item else tree
            write = partial(shutil.copytree, step)
            read = partial(_read_item, item)
            yield (
                f"orbax-shipped-{name}",
                Format(kind="orbax", write=write, read=read),
            )


def _read_item(item: str, path: Path) -> Any:
    return read_v0(path / item)


def _eformer_formats() -> Iterator[tuple[str, Format]]:
    for step, name in (
        (eformer_parts.STRUCTURED_STEP, "structured"),
        (eformer_parts.UNPREFIXED_STEP, "unprefixed"),
        (eformer_parts.SAFETENSORS_STEP, "safetensors"),
    ):
        yield (
            f"eformer-{name}",
            Format(
                kind="eformer",
                write=partial(_copy_eformer, step),
                read=partial(_read_eformer, step),
            ),
        )


FORMATS: Final[Mapping[str, Format]] = MappingProxyType(
    {
        **dict(_orbax_formats()),
        **dict(_shipped_formats()),
        "safetensors-single": Format(
            kind="safetensors", write=_write_single, read=load_folder
        ),
        "safetensors-shards": Format(
            kind="safetensors", write=_write_shards, read=load_folder
        ),
        "safetensors-cache": Format(
            kind="safetensors",
            write=_write_cache,
            read=lambda path: load_folder(path / "snapshots/abc"),
        ),
        "safetensors-steps": Format(
            kind="safetensors",
            write=_write_steps,
            read=lambda path: load_file(path / "checkpoint-100/model.safetensors"),
        ),
        **dict(_eformer_formats()),
        "levanter-ocdbt": Format(
            kind="levanter",
            write=partial(_write_levanter, is_old=False),
            read=partial(_read_levanter, is_old=False),
        ),
        "levanter-files": Format(
            kind="levanter",
            write=partial(_write_levanter, is_old=True),
            read=partial(_read_levanter, is_old=True),
        ),
        "jax": Format(
            kind="jax",
            write=lambda path: pytree_serialization.save(test_jax_arrays.TREE, path),
            read=_read_jax,
        ),
    }
)
