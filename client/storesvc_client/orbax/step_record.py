"""The record that a manager keeps in a step: its items, metrics and metadata.

It is the item ``orbax`` of the checkpoint, a JSON value. A tree is stored in the tree
of the checkpoint, below the name of its item, or at the root if it is the only one and
has Orbax's default name. A JSON item is an item of the checkpoint; so are the files of
a handler, as one archive for each process. Names of items in a store are narrower than
Orbax's, so the record has both. A step that was saved by other means has no record, and
its tree is the default item.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

from storesvc_client.errors import DataLossError, InvalidRequestError

RECORD: Final = "orbax"
"""Item of a checkpoint that has the record."""

DEFAULT_ITEM: Final = "default"
"""Name that Orbax gives to the only item of a step."""

_VERSION: Final = 1

Kind: TypeAlias = Literal["tree", "json", "files"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One item of Orbax in a step."""

    kind: Kind
    place: str
    """Name of the item of the checkpoint; of a tree its first key, "" at the root."""
    custom_metadata: Any = None
    """Metadata that the caller saved with a tree, a value of JSON."""
    handler: str | None = None
    """Class of version 1 that wrote the files; None: a handler of version 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Items, metrics and metadata of a step."""

    parts: Mapping[str, Part]
    """By the name that Orbax's callers use."""
    metrics: Any = None
    custom_metadata: Any = None

    @property
    def is_default(self) -> bool:
        """True if the step has one unnamed item."""
        return DEFAULT_ITEM in self.parts

    def value(self) -> dict[str, Any]:
        """Returns the record as a value of JSON."""
        parts = {name: _row(part) for name, part in self.parts.items()}
        return {
            "version": _VERSION,
            "items": parts,
            "metrics": self.metrics,
            "custom_metadata": self.custom_metadata,
        }

    @classmethod
    def parse(cls, place: str, value: Any) -> "StepRecord":
        """Returns the record of a value of JSON.

        Raises:
            DataLossError: It is no record; names the place.
        """
        try:
            if value["version"] != _VERSION:
                raise ValueError(f"its version is {value['version']!r}")
            parts = {name: _part(row) for name, row in value["items"].items()}
            return cls(
                parts=parts,
                metrics=value["metrics"],
                custom_metadata=value["custom_metadata"],
            )
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise DataLossError(
                f"{place} item {RECORD!r}: expected a record of version {_VERSION} "
                f"that storesvc_client.orbax wrote, got another value ({e}); upgrade "
                "storesvc, or restore with run.restore"
            ) from e


def foreign_record() -> StepRecord:
    """Returns the record of a step that was saved by other means."""
    return StepRecord(parts={DEFAULT_ITEM: Part(kind="tree", place="")})


def plan_parts(
    kinds: Mapping[str, Kind], *, default: str, is_default: bool
) -> dict[str, Part]:
    """Returns the places of the items of a step.

    Args:
        kinds: Kind of each item, by name.
        default: Name of an item whose tree is stored at the root ...
        is_default: ... if it is the only one.

    Raises:
        InvalidRequestError: A name is empty.
    """
    parts: dict[str, Part] = {}
    for name, kind in kinds.items():
        if not name:
            raise InvalidRequestError("items: expected names, got an empty one")
        if kind == "tree":
            at_root = is_default and name == default and len(kinds) == 1
            parts[name] = Part(kind=kind, place="" if at_root else name)
        else:
            taken = {part.place for part in parts.values()} | {RECORD}
            parts[name] = Part(kind=kind, place=_item_name(name, taken))
    return parts


def _item_name(name: str, taken: Iterable[str]) -> str:
    """Returns a name that an item of a checkpoint may have."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    base = plain if plain[:1].isalpha() else f"item-{plain}".strip("-")
    found, number = base, 1
    while found in taken:
        number += 1
        found = f"{base}-{number}"
    return found


def _row(part: Part) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": part.kind, "place": part.place}
    for name in ("custom_metadata", "handler"):
        if getattr(part, name) is not None:
            row[name] = getattr(part, name)
    return row


def _part(row: Any) -> Part:
    kind, place = row["kind"], row["place"]
    if kind not in get_args(Kind) or type(place) is not str:
        raise ValueError(f"an item is {row!r}")
    more = {name: row.get(name) for name in ("custom_metadata", "handler")}
    return Part(kind=kind, place=place, **more)
