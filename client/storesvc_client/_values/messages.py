"""Values from messages of the contract: each field as its descriptor says.

A time becomes a ``datetime`` in UTC, a duration a ``timedelta``, a repeated field a
tuple, a map a dict, and a value of an enum a text, such as "live" for ``STATE_LIVE``.
"""

from collections.abc import Callable, Mapping, MutableMapping, MutableSequence
from dataclasses import fields
from datetime import UTC
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, TypeVar, cast

from google.protobuf.descriptor import Descriptor, EnumDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

T = TypeVar("T")

UNKNOWN: Final = "unknown"
"""Text of a value of an enum that a newer server sent and this release lacks."""

Converter = Callable[[Any], Any]


def read_message(cls: type[T], message: Message, **given: Any) -> T:
    """Returns a value of a dataclass with the fields of a message.

    A field that may be None is None if the message lacks it.

    Args:
        cls: The dataclass; the message has fields of the same names.
        **given: Fields that do not follow from a field of the same name.
    """
    found = given
    for name, is_optional, convert in _plan(cast("Any", cls), message.DESCRIPTOR):
        if name not in given:
            lacks = is_optional and not message.HasField(name)
            found[name] = None if lacks else convert(getattr(message, name))
    return cls(**found)


@lru_cache
def enum_texts(enum: EnumDescriptor) -> Mapping[int, str]:
    """Returns the texts of the values of an enum by number, without the unspecified
    one.

    >>> from storesvc_proto.v1.upload_service_pb2 import Upload
    >>> enum_texts(Upload.State.DESCRIPTOR)[Upload.STATE_LIVE]
    'live'
    """
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    texts = {v.number: v.name.removeprefix(prefix).lower() for v in enum.values}
    return MappingProxyType({number: texts[number] for number in texts if number})


def enum_number(enum: EnumDescriptor, text: str | None) -> Any:
    """Returns the number of a text of ``enum_texts``; 0 for None."""
    return next((n for n, known in enum_texts(enum).items() if known == text), 0)


@lru_cache
def _plan(cls: Any, message: Descriptor) -> tuple[tuple[str, bool, Converter], ...]:
    """Returns the fields of a dataclass: name, whether it may be None, conversion."""
    known = message.fields_by_name
    return tuple(
        (
            one.name,
            "None" in str(one.type),
            _convert
            if (field := known.get(one.name)) is None or field.enum_type is None
            else _name_value(enum_texts(field.enum_type)),
        )
        for one in fields(cls)
    )


def _name_value(texts: Mapping[int, str]) -> Converter:
    return lambda number: texts.get(number, UNKNOWN)


def _convert(value: Any) -> Any:
    match value:
        case Timestamp():
            return value.ToDatetime(UTC)
        case Duration():
            return value.ToTimedelta()
        case MutableMapping():
            return dict(value)
        case MutableSequence():
            return tuple(value)
        case _:
            return value
