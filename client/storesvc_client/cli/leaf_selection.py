"""Selects the leaves of a checkpoint that a command works on."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from storesvc_client._values.key_patterns import keys_below, matching_keys, nearest_keys
from storesvc_client._views.texts import ENCODED, count_text, printable
from storesvc_client.cli.errors import Refusal
from storesvc_client.cli.paths import CheckpointPath, LeafPath

if TYPE_CHECKING:
    from storesvc_client import (
        ForeignCheckpoint,
        ItemInfo,
        LeafInfo,
        OpenCheckpoint,
    )
    from storesvc_client.cli.paths import Readable


@dataclass(frozen=True, slots=True)
class Selection:
    """Leaves of one checkpoint."""

    checkpoint: CheckpointPath
    """The checkpoint by its step; a tag or "latest" may move before the next call."""
    leaves: "tuple[LeafInfo, ...]"
    """The leaves, in the order of their keys."""
    items: "tuple[ItemInfo, ...]" = ()
    """The items, if the whole checkpoint is selected."""
    unread: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Reason for each item that cannot be read, if the whole checkpoint is
    selected."""

    @property
    def size_bytes(self) -> int:
        """Total bytes of the elements."""
        return sum(leaf.size_bytes for leaf in self.leaves)

    def names_encoded(self, key: str) -> bool:
        """Returns whether it is one leaf, with this key, that holds an encoded value:
        a text, JSON, bytes, or a large integer."""
        return [key] == [leaf.key for leaf in self.leaves if leaf.kind in ENCODED]


def select_leaves(client: "Readable", path: CheckpointPath | LeafPath) -> Selection:
    """Returns the leaves that the path names; all of them without a glob.

    Raises:
        Refusal: The path has a glob, and no leaf matches it.
    """
    where = path.checkpoint if isinstance(path, LeafPath) else path
    checkpoint = _pin(client, where)
    opened = client.run(checkpoint.run).open(checkpoint.which)
    leaves = opened.leaves
    if isinstance(path, CheckpointPath):
        items = tuple(map(opened.items.info, opened.items))
        return Selection(checkpoint, tuple(leaves.values()), items, find_unread(opened))
    found = matching_keys(path.glob, leaves)
    if not found:
        raise Refusal(_absence(path.glob, opened, checkpoint=checkpoint))
    return Selection(checkpoint, tuple(leaves[key] for key in found))


def select_leaf(client: "Readable", path: LeafPath) -> Selection:
    """Returns the one leaf with the key of the path.

    Raises:
        Refusal: There is no such leaf.
    """
    checkpoint = _pin(client, path.checkpoint)
    opened = client.run(checkpoint.run).open(checkpoint.which)
    leaves = opened.leaves
    if path.glob not in leaves and set("*?[") & set(path.glob):
        raise Refusal(
            f"{path.glob!r}: expected the key of one leaf, got a glob; 'storectl ls' "
            "accepts globs"
        )
    if path.glob not in leaves:
        raise Refusal(_absence(path.glob, opened, checkpoint=checkpoint))
    return Selection(checkpoint, (leaves[path.glob],))


def find_unread(opened: "OpenCheckpoint | ForeignCheckpoint") -> Mapping[str, str]:
    """Returns the reason for each item that cannot be read; only checkpoints of other
    projects have such."""
    found: Mapping[str, str] = getattr(opened.info, "unread", {})
    return found


def unread_notes(unread: Mapping[str, str]) -> Iterator[str]:
    """Yields the note of each item or file that is not read."""
    for name, reason in unread.items():
        yield f"not read: {printable(name)}: {printable(reason)}"


def _pin(client: "Readable", path: CheckpointPath) -> CheckpointPath:
    if isinstance(path.which, int):
        return path
    return CheckpointPath(path.run, client.run(path.run).checkpoint(path.which).step)


def _absence(
    glob: str,
    opened: "OpenCheckpoint | ForeignCheckpoint",
    *,
    checkpoint: CheckpointPath,
) -> str:
    leaves = opened.leaves
    name = glob.partition("/")[0]
    if name in (unread := find_unread(opened)):
        return f"the item {name} of {checkpoint} cannot be read: {unread[name]}"
    if glob in opened.items:
        return (
            f"{glob!r} is an item of {checkpoint}, no leaf; 'storectl cat "
            f"{checkpoint}:{glob}' writes it"
        )
    wanted = f"no leaf of {checkpoint} matches {glob!r}"
    if below := keys_below(glob, leaves):
        subtree = glob.rstrip("/")
        return (
            f"{wanted}, which is a subtree of {count_text(len(below), 'leaf')}; "
            f"use '{subtree}/**'"
        )
    if nearest := nearest_keys(glob, leaves):
        return f"{wanted}; nearest: {', '.join(map(printable, nearest))}"
    return f"{wanted}; 'storectl ls {checkpoint}' lists its leaves"
