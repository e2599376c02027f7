"""Values as JSON; storectl's ``--json`` and the console's ``?json`` are the same.

JSON follows the JSON mapping of protobuf: times are RFC 3339 in UTC, durations are
seconds such as "90s", NaN and the infinities are the strings "NaN", "Infinity" and
"-Infinity"; complex numbers are [real, imaginary]. Sizes are in bytes.
"""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

_NOT_FINITE: Final = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def json_value(value: Any) -> Any:
    """Returns the value as JSON types."""
    if is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        return json_value(named)
    match value:
        case Mapping():
            return {str(key): json_value(item) for key, item in value.items()}
        case list() | tuple():
            return [json_value(item) for item in value]
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case timedelta():
            return f"{value.total_seconds():.6f}".rstrip("0").rstrip(".") + "s"
        case complex():
            return [json_value(value.real), json_value(value.imag)]
        case float() if not math.isfinite(value):
            return _NOT_FINITE[str(value)]
        case None | bool() | int() | float():
            return value
        case _:
            return str(value)
