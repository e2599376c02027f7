"""What a training process prints: one JSON object a line, each of one kind below.

Floats travel as hexadecimal text, so that equal text means equal bits.

>>> parse(line(Step(step=3, loss=2.5, mesh="dp=2,fsdp=2,tp=2")))
Step(step=3, loss=2.5, mesh='dp=2,fsdp=2,tp=2')
>>> parse("a warning of some library") is None
True
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["Committed", "Event", "Restored", "SaveBegun", "Step", "line", "parse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One update of the parameters."""

    step: int
    """Which update: the first is 1."""

    loss: float
    mesh: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveBegun:
    """A save whose snapshot is taken."""

    step: int
    blocked_seconds: float
    """How long training stood still for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A checkpoint that the store has acknowledged."""

    step: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A state that is whole again, and bitwise what was saved."""

    step: int
    mesh: str
    leaf_count: int
    size_bytes: int
    seconds: float
    digest: str
    """Of the restored leaves; the process goes on only if the saved one is equal."""


Event: TypeAlias = Step | SaveBegun | Committed | Restored

_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (Step, SaveBegun, Committed, Restored)
}


def line(event: Event) -> str:
    """Returns the line, without its end, that tells of an event."""
    fields = {
        name: value.hex() if isinstance(value, float) else value
        for name, value in dataclasses.asdict(event).items()
    }
    return json.dumps({"event": type(event).__name__, **fields})


def parse(text: str) -> Event | None:
    """Returns the event that a line tells of, or None for any other line."""
    try:
        fields = json.loads(text)
        kind = _KINDS[fields.pop("event")]
    except (ValueError, KeyError, AttributeError):
        return None
    floats = {field.name for field in dataclasses.fields(kind) if field.type is float}
    values: dict[str, Any] = {
        name: float.fromhex(value) if name in floats else value
        for name, value in fields.items()
    }
    return kind(**values)
