"""Encodes configurations as JSON and decodes them, for plain data only.

An enumeration member becomes its value and is not restored as a member. A value that is
not plain becomes ``{"opaque": description}``, which decodes to an ``Opaque``: code that
rebuilds a configuration skips it, code that compares two uses the description.

>>> encode_data({"axes": (1, 2)})
{'dict': [['axes', {'tuple': [1, 2]}]]}
>>> decode_data(encode_data({"axes": (1, 2)}))
{'axes': (1, 2)}
"""

import enum
from dataclasses import dataclass
from typing import Any, Final

from storesvc_client.trees.structure.limits import JSON, check_json
from storesvc_client.trees.structure.plain import (
    NOT_PLAIN,
    decode_plain,
    encode_plain,
    tag_of,
)
from storesvc_client.trees.structure.refusals import Place, refusal, shown
from storesvc_client.trees.structure.values import ValueEncoder

_PLACE: Final = "data"


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value of which a document holds only a description."""

    description: JSON


def encode_data(value: Any) -> JSON:
    """Returns plain data as JSON, and descriptions of other values."""
    return _DataEncoder().encode(value)


def decode_data(document: JSON) -> Any:
    """Returns the data of a document, with an ``Opaque`` for each description.

    Raises:
        StructureError: The document is malformed.
    """
    check_json(document, _PLACE)
    return _decode(document, _PLACE)


def _decode(value: JSON, place: Place) -> Any:
    decoded = decode_plain(value, place, _decode)
    if decoded is not NOT_PLAIN:
        return decoded
    if tag_of(value, {"opaque"}) and isinstance(value["opaque"], dict):
        return Opaque(value["opaque"])
    raise refusal(place, "plain data", shown(value))


class _DataEncoder(ValueEncoder):
    """Encodes plain data only; names of classes and functions are descriptions."""

    def encode_object(self, value: Any) -> JSON | None:
        """Returns the value of an enumeration member, or None for other objects."""
        if isinstance(value, enum.Enum):
            return encode_plain(value.value, self.encode)
        return super().encode_object(value) if self.describing else None
