"""Containers that the leaves of a tree do not show, as a document. Needs no jax.

A checkpoint holds leaves, and their paths show the dicts and lists above them. The
document records type, key and path kinds of None, empty containers and tuples; it is
stored as ``LeafTable.structure`` if the tree has no other document.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from storesvc.format.keys import INTEGER_KINDS, fits_key, split_key
from storesvc_client._values.documents import CONTAINERS, pack_document, unpack_document
from storesvc_client._values.values import PathPart
from storesvc_client.errors import StructureError

TUPLE: Final = "tuple"
"""A tuple that is not empty; its items have entries of their own."""

EMPTY: Final[dict[type, str]] = {
    type(None): "none",
    dict: "{}",
    list: "[]",
    tuple: "()",
}
"""Names of None and of empty containers."""

_MADE: Final = {name: kind for kind, name in EMPTY.items() if kind is not type(None)}


@dataclass(frozen=True, slots=True)
class Container:
    """One None, empty container or tuple."""

    what: str
    key: str
    path_kinds: str

    @property
    def path(self) -> tuple[PathPart, ...]:
        """Path of the container, in the form of a leaf's path."""
        parts = zip(split_key(self.key), self.path_kinds, strict=True)
        return tuple(
            int(text) if kind in INTEGER_KINDS else text for text, kind in parts
        )

    @property
    def value(self) -> Any:
        """A new empty container, or None."""
        return _MADE[self.what]() if self.what in _MADE else None


def pack_document_of(containers: Iterable[Container]) -> bytes:
    """Returns the document of containers; b"" if there are none.

    Raises:
        StructureError: It is larger than readers accept.
    """
    rows = sorted([each.what, each.key, each.path_kinds] for each in containers)
    return CONTAINERS + pack_document({"containers": rows}) if rows else b""


def unpack_containers(document: bytes) -> list[Container]:
    """Returns the containers of a document, or none if it is of another type.

    Raises:
        StructureError: The document is malformed.
    """
    if not document.startswith(CONTAINERS):
        return []
    fields = unpack_document(document.removeprefix(CONTAINERS))
    try:
        rows = fields["containers"]
        found = [Container(what, key, kinds) for what, key, kinds in rows]
        for each in found:
            if each.what not in (TUPLE, *EMPTY.values()):
                raise ValueError(f"{each.what!r} is not a container")
            if not fits_key(each.path_kinds, each.key):
                raise ValueError(f"{each.path_kinds!r} does not fit {each.key!r}")
    except (ValueError, TypeError, AttributeError, KeyError) as e:
        raise StructureError(
            f"the document of its containers is malformed ({e}); restore with like="
        ) from e
    return found
