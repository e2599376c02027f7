"""Migrations of a run: rules by which its older checkpoints have the tree of today.

A migration takes the checkpoints whose leaves have exactly the keys, shapes and dtypes
of the tree that it was made for. So the tree decides, and neither step nor time does:
an older checkpoint is migrated wherever it is restored, one that the code of today
saved is not, and one that the code of yesterday still saves is. Several are applied one
after another, each to the tree that those before it make.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storesvc.format.checksums import digest
from storesvc.format.trees import Tree
from storesvc_client._mapping.planning import ARRAYS
from storesvc_client._mapping.rules import Rules, check_rules
from storesvc_client._restore.open_tree import TreeReader
from storesvc_client.errors import (
    InvalidRequestError,
    MismatchError,
    PreconditionError,
    StoreError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """Rules of a run for checkpoints of one tree; from ``run.migrations``."""

    name: str
    """Name of the rules."""
    rules: Mapping[str, Any]
    """Document of the rules."""
    source: str
    """Digest of the tree that it takes, in hexadecimal."""
    target: str
    """Digest of the tree that it makes."""

    @property
    def digest(self) -> str:
        """Digest of rules and source, in hexadecimal; ``remove`` takes it."""
        return digest(json.dumps([self.rules, self.source]).encode()).hex()

    @classmethod
    def make(cls, reader: TreeReader, rules: Rules) -> "Migration":
        """Returns the migration of a tree by rules.

        Raises:
            MismatchError: The rules do not fit the tree.
            InvalidRequestError: They make a tree with the same leaves.
        """
        source, target = map(digest_tree, (reader.tree, reader.map(rules).tree))
        if source == target:
            raise InvalidRequestError(
                f"{rules.name}: expected rules that change keys, shapes or dtypes of "
                f"{reader.name}, by which its migrated checkpoints are known; got the "
                "same leaves; give the rules with mapping= to each restore"
            )
        name = Path(rules.name).name
        return cls(name=name, rules=rules.document, source=source, target=target)

    def pack(self) -> bytes:
        """Returns it as bytes."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({"version": 1, **fields}).encode()

    @classmethod
    def unpack(cls, data: bytes, *, place: str) -> "Migration":
        """Returns the migration of bytes.

        Raises:
            PreconditionError: They are none, or of a later release.
        """
        try:
            fields = json.loads(data)
            if fields.pop("version") != 1:
                raise ValueError("a version of a later release")
            found = cls(**fields)
            check_rules(found.rules, name=found.name)
        except (ValueError, TypeError, KeyError, AttributeError, StoreError) as e:
            raise PreconditionError(
                f"migrations of {place}: expected rules that this release reads, got "
                f"{e}; upgrade storesvc, or restore with mapping="
            ) from e
        return found


def digest_tree(tree: Tree) -> str:
    """Returns the digest of keys, shapes and dtypes of the leaves, in hexadecimal.

    A text or a large integer is stored as bytes, whose number is no part of the tree.
    """
    rows = sorted(
        (leaf.key, *((leaf.shape, leaf.dtype) if leaf.kind in ARRAYS else ()))
        for leaf in tree.leaves[: tree.tree_count]
    )
    return digest(json.dumps(rows).encode()).hex()


def migrate(reader: TreeReader, packed: Iterable[bytes], *, place: str) -> TreeReader:
    """Returns the reader of the tree that the migrations of a run make of a checkpoint;
    the same reader if none applies."""
    for data in packed:
        migration = Migration.unpack(data, place=place)
        if digest_tree(reader.tree) == migration.source:
            # as reports and errors show it; ``remove`` takes these characters
            name = f"migration {migration.name} ({migration.digest[:12]})"
            reader = reader.map(check_rules(migration.rules, name=name))
    return reader


def map_older(reader: TreeReader, rules: Rules) -> TreeReader:
    """Returns the reader of the tree that rules make of a checkpoint.

    Raises:
        MismatchError: The rules do not fit the checkpoint.
        InvalidRequestError: They would fit what they make, too.
    """
    mapped = reader.map(rules)
    try:
        mapped.map(rules)
    except MismatchError:
        return mapped
    raise InvalidRequestError(
        f"{rules.name}: expected rules that do not fit the tree that they make of "
        f"{reader.name}, as restore_or restores it without them once it is saved; got "
        "rules that fit both; name what only older checkpoints have in from=, without "
        "optional, or add the rules to the run with run.migrations.add"
    )
