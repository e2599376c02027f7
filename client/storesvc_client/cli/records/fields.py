"""Fields of the records that ``ls`` lists, for ``--where`` and ``--sort``.

A field has the name of its column, or its name with ``--json``. Other names are metrics
and labels; ``metrics.NAME`` and ``labels.NAME`` are nothing else, also where a field
has the same name.

>>> CHECKPOINTS.field("loss").value(tagged)
2.5
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from storesvc_client._values.texts import dtype_text, natural_key, shape_text
from storesvc_client.cli.paths import (
    CheckpointPath,
    LeafPath,
    NamespacePath,
    RunPath,
    StorePath,
    is_foreign,
)

Value: TypeAlias = float | str | bool | datetime | tuple[str, ...] | None
"""The value of a field; None, "" or an empty tuple if the record has none."""

_Map: TypeAlias = Callable[[Any], Mapping[str, Any]]


class Kind(Enum):
    """The type of a field; the text describes a value that is expected."""

    NUMBER = "a number"
    SIZE = "a size, such as 500000 or 1.5GiB"
    TIME = "a time, such as 2026-11-24 or 2026-11-24T07:55"
    AGE = "a duration, such as 12h or 3d"
    FLAG = "yes or no"
    TEXT = "a text"
    TEXTS = "a text, of a list"
    ANY = "a number or a text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of records of one type."""

    name: str
    kind: Kind
    value: Callable[[Any], Value]

    @property
    def may_stand_alone(self) -> bool:
        """True if its name alone is a condition."""
        return self.kind in (Kind.FLAG, Kind.TEXTS, Kind.ANY)

    def is_set(self, record: Any) -> bool:
        """Returns whether a record has a value."""
        match self.value(record):
            case None | "" | () | False:
                return False
            case _:
                return True

    def sort_value(self, record: Any) -> tuple[object, ...] | None:
        """Returns a value that is comparable with others of this field; None if the
        record has none, or NaN. Numbers sort before texts."""
        match self.value(record):
            case None | "" | ():
                return None
            case datetime() as time:
                # the older, the greater its age
                return (-time.timestamp() if self.kind is Kind.AGE else time,)
            case tuple() as texts:
                return (1, natural_key(" ".join(texts)))
            case str() as text if self.kind is Kind.ANY:
                number = as_number(text)
                if number is None:
                    return (1, natural_key(text))
                return None if math.isnan(number) else (0, number)
            case str() as text:
                return (1, natural_key(text))
            case number:
                return None if math.isnan(number) else (0, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The fields of records of one type."""

    noun: str
    fields: Mapping[str, Field]
    """Fields by name, as in the columns."""
    json_names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Names of fields by their names in JSON, where they differ."""
    maps: Mapping[str, _Map] = field(default_factory=lambda: MappingProxyType({}))
    """Mappings of a record from names to values, by name: metrics, labels. The first
    has precedence for a name that both have."""

    def field(self, name: str) -> Field | None:
        """Returns the field of a name; None if the records cannot have it."""
        known = self.fields.get(self.json_names.get(name, name))
        if known is not None:
            return known
        prefix, dot, rest = name.partition(".")
        if dot and prefix in self.maps:
            of_map = _of_maps([self.maps[prefix]], rest)
            return Field(name=name, kind=Kind.ANY, value=of_map)
        if self.maps:
            of_maps = _of_maps([*self.maps.values()], name)
            return Field(name=name, kind=Kind.ANY, value=of_maps)
        return None

    def names_of(self, record: Any) -> set[str]:
        """Returns the names of the metrics and labels of a record."""
        return {name for map_of in self.maps.values() for name in map_of(record)}


def as_number(text: str) -> float | None:
    """Returns the number of a text, an integer if it is one; None for another text.

    >>> as_number("1e3"), as_number("1_000"), as_number("fast")
    (1000.0, 1000, None)
    """
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return None


def _of_maps(maps: Sequence[_Map], name: str) -> Callable[[Any], Value]:
    def value(record: Any) -> Value:
        found = (map_of(record) for map_of in maps)
        return next((values[name] for values in found if name in values), None)

    return value


def _fields(**kinds: tuple[Kind, str | Callable[[Any], Value]]) -> dict[str, Field]:
    return {
        name: Field(
            name=name,
            kind=kind,
            value=attrgetter(where) if isinstance(where, str) else where,
        )
        for name, (kind, where) in kinds.items()
    }


def _sizes(at: str = "") -> dict[str, Field]:
    return _fields(
        size=(Kind.SIZE, f"{at}size_bytes"),
        leaves=(Kind.NUMBER, f"{at}leaf_count"),
        items=(Kind.NUMBER, f"{at}item_count"),
        chunks=(Kind.NUMBER, f"{at}chunk_count"),
    )


def _of_checkpoints(at: str = "") -> dict[str, Field]:
    return _sizes(at) | _fields(
        step=(Kind.NUMBER, f"{at}step"),
        committed=(Kind.TIME, f"{at}commit_time"),
        begun=(Kind.TIME, f"{at}create_time"),
        age=(Kind.AGE, f"{at}commit_time"),
        stored=(Kind.SIZE, f"{at}stored_bytes"),
        own=(Kind.SIZE, f"{at}own_bytes"),
        pinned=(Kind.FLAG, f"{at}pinned"),
        principal=(Kind.TEXT, f"{at}principal"),
        uid=(Kind.TEXT, f"{at}uid"),
    )


def _maps(*names: str, at: str = "") -> dict[str, _Map]:
    return {name: attrgetter(f"{at}{name}") for name in names}


_SIZE_NAMES: Final = {
    "size_bytes": "size",
    "leaf_count": "leaves",
    "item_count": "items",
    "chunk_count": "chunks",
}
_CHECKPOINT_NAMES: Final = _SIZE_NAMES | {
    "commit_time": "committed",
    "create_time": "begun",
    "stored_bytes": "stored",
    "own_bytes": "own",
}

CHECKPOINTS: Final = Schema(
    noun="checkpoint",
    fields=_of_checkpoints("checkpoint.") | _fields(tags=(Kind.TEXTS, "tags")),
    json_names=_CHECKPOINT_NAMES,
    maps=_maps("metrics", "labels", at="checkpoint."),
)
"""Fields of ``TaggedCheckpoint``."""

DELETED: Final = Schema(
    noun="deleted checkpoint",
    fields=_of_checkpoints()
    | _fields(deleted=(Kind.TIME, "delete_time"), purge=(Kind.TIME, "purge_time")),
    json_names=_CHECKPOINT_NAMES | {"delete_time": "deleted", "purge_time": "purge"},
    maps=_maps("metrics", "labels"),
)
"""Fields of ``Checkpoint``."""

FOREIGN: Final = Schema(
    noun="checkpoint",
    fields=_fields(
        step=(Kind.NUMBER, "step"),
        written=(Kind.TIME, "create_time"),
        age=(Kind.AGE, "create_time"),
    )
    | _sizes(),
    json_names=_SIZE_NAMES | {"create_time": "written"},
    maps=_maps("metrics", "labels"),
)
"""Fields of ``ForeignInfo``."""

RUNS: Final = Schema(
    noun="run",
    fields=_fields(
        run=(Kind.TEXT, "name"),
        latest=(Kind.NUMBER, "latest_step"),
        created=(Kind.TIME, "create_time"),
        age=(Kind.AGE, "create_time"),
        uid=(Kind.TEXT, "uid"),
    ),
    json_names={"name": "run", "latest_step": "latest", "create_time": "created"},
    maps=_maps("labels"),
)
"""Fields of ``RunInfo``."""

LEAVES: Final = Schema(
    noun="leaf",
    fields=_fields(
        key=(Kind.TEXT, "key"),
        kind=(Kind.TEXT, "kind"),
        dtype=(Kind.TEXT, dtype_text),
        shape=(Kind.TEXT, shape_text),
        size=(Kind.SIZE, "size_bytes"),
        chunks=(Kind.NUMBER, "chunk_count"),
    ),
    json_names={"size_bytes": "size", "chunk_count": "chunks"},
)
"""Fields of ``LeafInfo``."""


def schema_of(path: StorePath | None, *, deleted: bool) -> Schema:
    """Returns the fields of the records at a path.

    Args:
        path: The path; None: all runs.
        deleted: Whether they are the deleted checkpoints of a run.
    """
    match path:
        case None | NamespacePath():
            return RUNS
        case CheckpointPath() | LeafPath():
            return LEAVES
        case RunPath(run) if is_foreign(run):
            return FOREIGN
        case RunPath():
            return DELETED if deleted else CHECKPOINTS
