"""Formats and parses the lines of a training process: one JSON object each.

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
    """Number of the update, from 1."""

    loss: float
    mesh: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveBegun:
    """A save whose snapshot is complete."""

    step: int
    blocked_seconds: float
    """Seconds for which the save blocked training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A checkpoint that the store has acknowledged."""

    step: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A restored state, bitwise equal to the saved one."""

    step: int
    mesh: str
    leaf_count: int
    size_bytes: int
    seconds: float
    digest: str
    """Digest of the restored leaves; the process stops if the saved one differs."""


Event: TypeAlias = Step | SaveBegun | Committed | Restored

_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (Step, SaveBegun, Committed, Restored)
}


def line(event: Event) -> str:
    """Returns an event as a line, without a line break."""
    fields = {
        name: value.hex() if isinstance(value, float) else value
        for name, value in dataclasses.asdict(event).items()
    }
    return json.dumps({"event": type(event).__name__, **fields})


def parse(text: str) -> Event | None:
    """Returns the event of a line, or None for any other line."""
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
