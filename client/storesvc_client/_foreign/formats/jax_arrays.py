"""Reads what ``jax.experimental.array_serialization.pytree_serialization`` saves.

A step is a folder with ``pytreedef.json``, the structure and the form of each leaf, and
``array_store/``, an OCDBT database with a zarr3 array for each leaf that is an array,
named by its number. jax has no steps: the name of the folder states it, or it is 0.
jax writes no sign that a save has ended, so a folder counts as finished as soon as both
exist; a missing array is found when the step is opened.
"""

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any, Final

import xxhash

from storesvc.format.keys import InvalidKeyError, join_key
from storesvc_client._foreign.bounded_json import parse_object
from storesvc_client._foreign.foreign_step import ForeignStep
from storesvc_client._foreign.formats.jax_pytreedef import Node, parse_nodes
from storesvc_client._foreign.location import Location
from storesvc_client._foreign.step_search import join, named_steps, place
from storesvc_client._foreign.tensorstore_array import TensorStoreArray, ocdbt
from storesvc_client._foreign.tree_rows import Row, array_row, tree_of
from storesvc_client._foreign.zarr_arrays import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    ArrayPlace,
    database_base,
    open_arrays,
)
from storesvc_client._values.item_values import Container, pack_document_of
from storesvc_client.errors import DataLossError, NotFoundError, PreconditionError

MAX_STRUCTURE_BYTES: Final = 64 << 20

_STRUCTURE: Final = "pytreedef.json"
_STORE: Final = "array_store"
_TREE: Final = "__jax_pytreedef_repr"
_LEAVES: Final = "__jax_leaf_ids"
_NONE: Final = (None, "null")
"""Forms of a leaf that is None."""

_ARRAY: Final = re.compile(r"Array\(([a-z0-9_]+)\[([0-9, ]*)\]\)")


def open_root(location: Location) -> "JaxRoot":
    """Returns the trees that jax saved below a location."""
    return JaxRoot(location)


class JaxRoot:
    """A ``ForeignRoot`` of jax's own array serialization."""

    def __init__(self, location: Location) -> None:
        self._location = location

    @property
    def url(self) -> str:
        """See ``ForeignRoot``."""
        return f"jax:{self._location.url}"

    def steps(self) -> Sequence[int]:
        """See ``ForeignRoot``."""
        return sorted(self._folders())

    def open(self, step: int) -> ForeignStep:
        """See ``ForeignRoot``."""
        folder = self._folders().get(step)
        if folder is None:
            raise NotFoundError(f"{self.url}: there is no finished step {step}")
        return _read_step(self._location, folder, step)

    def _folders(self) -> dict[int, str]:
        return named_steps(
            self._location,
            is_finished=lambda _, names: {_STRUCTURE, f"{_STORE}/"} <= set(names),
            expected=f"a tree that jax saved, with {_STRUCTURE} and {_STORE}/, or "
            "folders of such trees that name steps",
        )


def _read_step(location: Location, folder: str, step: int) -> ForeignStep:
    path = join(folder, _STRUCTURE)
    what = place(location, path)
    data = location.read(path, limit=MAX_STRUCTURE_BYTES)
    fields = parse_object(data, what=what)
    nodes = list(parse_nodes(_tree_bytes(fields, what), what=what))
    leaves = [node for node in nodes if node.what == "leaf"]
    forms = fields.get(_LEAVES)
    if not isinstance(forms, list) or len(forms) != len(leaves):
        raise DataLossError(
            f"{what}: expected the forms of {len(leaves)} leaves in {_LEAVES}"
        )
    none = [leaves[n] for n, form in enumerate(forms) if form in _NONE]
    stored = [n for n, form in enumerate(forms) if form not in _NONE]
    arrays = _open(location, join(folder, _STORE), stored, leaves)
    rows = [
        _row(leaves[n], array, forms[n])
        for n, array in zip(stored, arrays, strict=True)
    ]
    containers = [_container(node.what, node) for node in nodes if node.what != "leaf"]
    containers += [_container("none", node) for node in none]
    tree, ordered = tree_of(
        rows,
        place=place(location, folder),
        advice="save it again with other names",
        structure=pack_document_of(containers),
    )
    return ForeignStep(
        step=step,
        url=f"jax:{place(location, folder)}",
        format="jax",
        tree=tree,
        arrays=ordered,
        digest=_digest(location, folder, data),
    )


def _tree_bytes(fields: dict[str, Any], what: str) -> bytes:
    text = fields.get(_TREE)
    if not isinstance(text, str):
        raise DataLossError(f"{what}: expected the structure of a tree in {_TREE}")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as e:
        raise DataLossError(f"{what}: expected base64 in {_TREE}, got {e}") from e


def _open(
    location: Location, store: str, stored: Sequence[int], leaves: Sequence[Node]
) -> list[TensorStoreArray]:
    base = database_base(location, store)
    places = [
        ArrayPlace(
            name=f"array {_name(leaves[n])!r}",
            driver="zarr3",
            kvstore=ocdbt(base, f"{n}/"),
            is_whole=False,  # chunks of zeros are not stored
        )
        for n in stored
    ]
    return list(open_arrays(location, places))


def _name(leaf: Node) -> str:
    return "/".join(leaf.parts)


def _row(leaf: Node, array: TensorStoreArray, form: Any) -> Row:
    name = _name(leaf)
    return array_row(
        leaf.parts,
        _checked(array, form, name),
        name=name,
        dtype=array.dtype,
        shape=array.shape,
        chunk_shape=array.chunk_shape,
        path_kinds=leaf.path_kinds,
    )


def _container(what: str, node: Node) -> Container:
    try:
        return Container(what, join_key(node.parts), node.path_kinds)
    except InvalidKeyError as e:
        raise PreconditionError(f"container {_name(node)[:200]!r}: {e}") from e


def _checked(array: TensorStoreArray, form: Any, name: str) -> TensorStoreArray:
    """Rejects an array that differs from its form in the structure."""
    found = _ARRAY.fullmatch(form) if isinstance(form, str) else None
    if found is None:
        raise PreconditionError(
            f"array {name!r}: expected an array or None, got {ascii(form)[:80]}"
        )
    shape = tuple(int(n) for n in found[2].split(",") if n.strip())
    if (found[1], shape) != (array.dtype, array.shape):
        raise DataLossError(
            f"array {name!r}: expected {shape} {found[1]}, got {array.shape} "
            f"{array.dtype}; another save may have overwritten it"
        )
    return array


def _digest(location: Location, folder: str, structure: bytes) -> str:
    """Returns the digest of the structure and of the root of the database, which
    changes with every write to it."""
    digest = xxhash.xxh3_128(structure)
    manifest = join(folder, f"{_STORE}/{MANIFEST}")
    digest.update(location.read(manifest, limit=MAX_MANIFEST_BYTES))
    return digest.hexdigest()
