"""Trees, and comparisons of what other projects read, for the tests of exports."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

import storesvc_client as store

RUN = "tests/export"
STEP = 100

ARRAYS: dict[str, Any] = {
    "params": {
        "embed": jnp.arange(2000, dtype=jnp.bfloat16).reshape(40, 50),
        "layers": [
            {"kernel": np.arange(12.0, dtype=np.float32).reshape(3, 4) + at}
            for at in range(2)
        ],
        "scale": jnp.float32(1.5),
        "half": np.arange(3, dtype=np.float16),
        "eight": jnp.arange(4, dtype=jnp.float8_e4m3fn),
        "empty": np.zeros((0, 3), np.float32),
    },
    "counts": np.array([[1, -(2**40)]]),
    "flags": np.array([True, False]),
}
"""Arrays of dtypes that safetensors holds."""


class Save(Protocol):
    """The fixture ``saved``."""

    def __call__(self, root: str, tree: Any, **options: Any) -> store.OpenCheckpoint:
        """Saves a tree over a root, and opens the checkpoint."""


@contextmanager
def saving() -> Iterator[Save]:
    """Yields a function that saves; closes its clients at the end."""
    with ExitStack() as clients:

        def save(root: str, tree: Any, **options: Any) -> store.OpenCheckpoint:
            run = clients.enter_context(store.connect(root)).run(RUN)
            run.save(STEP, tree, **options).result()
            return run.open(STEP)

        yield save


def dotted(tree: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the leaves of a tree by their dotted paths, as arrays of NumPy."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in leaves
    }


def bits(leaf: Any) -> tuple[Any, ...]:
    """Returns what two equal leaves have in common: kind, dtype, shape and bytes."""
    if isinstance(leaf, str | bool | int | float) or leaf is None:
        return type(leaf), leaf
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), leaf.shape, bits(jax.random.key_data(leaf))
    array = np.asarray(leaf)
    return isinstance(leaf, jax.Array), array.dtype, array.shape, array.tobytes()


def data_files(root: Path) -> list[Path]:
    """Returns the data files of a store, largest first."""
    files = [f for f in root.glob("data/*/*/pool/*/*") if f.is_file()]
    return sorted(files, key=lambda file: -file.stat().st_size)


def flip(file: Path, position: int) -> None:
    """Flips one bit of a file."""
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)
