"""Every leaf of every format is the same bytes at each stage of a way in and out: read
by its own package, mounted, imported, exported, read by the package of the exit, and
mounted again. What an exit cannot hold is rejected by its name; everything else leaves
by it.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1

import storesvc_client as store
from storesvc.format.keys import split_key
from tests.foreign.written_formats import FORMATS
from tests.support.command_line import printed
from tests.support.examples import sampled
from tests.support.safetensors_files import HELD, load_folder

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),
    # of futures that the new interface of Orbax leaves to event loops that it closed
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Bits = tuple[Any, ...]
"""What two equal leaves have in common."""


def bits(leaf: Any) -> Bits:
    """Returns type, or dtype and shape, and the bytes of a leaf."""
    if isinstance(leaf, str | bool | int | float):
        return type(leaf).__name__, leaf
    if is_key(leaf):
        return str(leaf.dtype), leaf.shape, bits(jax.random.key_data(leaf))
    array = np.asarray(leaf)
    return array.dtype.name, array.shape, array.tobytes()


def is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by the parts of their paths, joined by "."."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in found
    }


def all_bits(tree: Any) -> dict[str, Bits]:
    return {name: bits(leaf) for name, leaf in leaves(tree).items()}


class Exit(NamedTuple):
    """A format of exports, as its own package reads it."""

    url: Callable[[Path], str]
    options: Mapping[str, Any]
    read: Callable[[Path, int], Any]
    """Returns the tree of a step, or its arrays by dotted names."""
    holds: Callable[[Any], bool]
    """Returns whether it can hold a leaf, as ``docs/interop.md`` says."""
    is_mounted: bool = True


def _read_manager(folder: Path, step: int) -> Any:
    with ocp.CheckpointManager(folder) as manager:
        return manager.restore(step)


def _read_npz(folder: Path, step: int) -> Any:
    with np.load(folder / "all.npz", allow_pickle=False) as found:
        return {".".join(split_key(name)): found[name] for name in found.files}


def _is_held_by_orbax(leaf: Any) -> bool:
    return str(getattr(leaf, "dtype", "")) != "uint4"


def _is_array_of(dtypes: set[Any]) -> Callable[[Any], bool]:
    return lambda leaf: (
        isinstance(leaf, np.ndarray | jax.Array)
        and not is_key(leaf)
        and leaf.dtype in dtypes
    )


NUMPY = {dtype for dtype in HELD.values() if dtype.isbuiltin == 1}

EXITS = {
    "orbax-v0": Exit(
        "orbax:{}".format, {"layout": "v0"}, _read_manager, _is_held_by_orbax
    ),
    "orbax-v1": Exit(
        "orbax:{}".format,
        {"layout": "v1"},
        lambda folder, step: v1.load(folder / str(step)),
        _is_held_by_orbax,
    ),
    "safetensors": Exit(
        "safetensors:{}".format,
        {},
        lambda folder, step: load_folder(folder),
        _is_array_of(set(HELD.values())),
    ),
    "npz": Exit(
        "npz:{}/all.npz".format,
        {},
        _read_npz,
        _is_array_of({*NUMPY, np.dtype(np.complex128)}),
        is_mounted=False,
    ),
}


ORBAX = [name for name in FORMATS if name.startswith("orbax")]
OTHERS = [name for name in FORMATS if name not in ORBAX]


class Written(NamedTuple):
    """A checkpoint of a format."""

    url: str
    tree: dict[str, Any]
    """Its leaves by dotted names, as its own package reads them."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    """Writes the checkpoint of a format once."""
    known: dict[str, Written] = {}

    def write(name: str) -> Written:
        if name not in known:
            found = FORMATS[name]
            folder = tmp_path_factory.mktemp("written") / name
            found.write(folder)
            known[name] = Written(f"{found.kind}:{folder}", leaves(found.read(folder)))
        return known[name]

    return write


@pytest.fixture(scope="module")
def imported(
    tmp_path_factory: pytest.TempPathFactory, written: Callable[[str], Written]
) -> Iterator[Callable[[str], store.Run]]:
    """Imports the newest step of a format into a store on disk, by the command line."""
    root = (tmp_path_factory.mktemp("imported") / "store").as_uri()
    known: set[str] = set()
    with store.connect(root) as client:

        def load(name: str) -> store.Run:
            run = f"tests/{name}"
            if name not in known:
                printed(root, "import", f"{written(name).url}@latest", run)
                known.add(name)
            return client.run(run)

        yield load


@pytest.mark.parametrize(
    "name", [*sampled(ORBAX, every=16, checked_every=2), *sampled(OTHERS, every=4)]
)
def test_every_leaf_is_the_same_when_mounted_and_imported(
    name: str, written: Callable[[str], Written], run: store.Run
) -> None:
    own = {key: bits(leaf) for key, leaf in written(name).tree.items()}

    mounted = store.open_foreign(written(name).url)
    assert own == all_bits(mounted.restore())
    run.import_from(mounted)

    assert own == all_bits(run.restore())
    assert dict(mounted.items()) == dict(run.items())
    assert run.verify().ok


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *sampled(product(ORBAX, EXITS), every=51, checked_every=10),
        *sampled(product(OTHERS, EXITS), every=11),
    ],
)
def test_every_leaf_is_the_same_when_exported_and_back(
    name: str,
    way: str,
    written: Callable[[str], Written],
    imported: Callable[[str], store.Run],
    run: store.Run,
    tmp_path: Path,
) -> None:
    tree, out = written(name).tree, EXITS[way]
    opened = imported(name).open()
    keys = {".".join(split_key(key)): key for key in opened.leaves}
    assert tree.keys() == keys.keys()
    held = [each for each, leaf in tree.items() if out.holds(leaf)]
    url = out.url(tmp_path / "out")

    options = dict(out.options)
    if len(held) < len(tree):
        refused = "|".join(re.escape(keys[k]) for k in tree if k not in held)
        with pytest.raises(
            store.PreconditionError, match=f"leaf '({refused})': expected .*, got"
        ):
            opened.export(url, drop_items=True, **options)
        options["select"] = [keys[each] for each in held]
    report = opened.export(url, drop_items=True, **options)

    items = set(opened.items) - set(report.dropped_items)
    if "select" in options or way == "safetensors":  # whose reader has no items
        items = set()
    expected = {each: bits(tree[each]) for each in held}
    assert len(held) == report.leaf_count
    assert expected == all_bits(out.read(tmp_path / "out", opened.info.step))
    if out.is_mounted:
        mounted = store.open_foreign(url)
        assert expected == all_bits(mounted.restore())
        assert all(mounted.items()[each] == opened.items[each] for each in items)
        run.import_from(mounted)
        assert expected == all_bits(run.restore())
