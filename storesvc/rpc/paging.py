"""Pages of lists."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

from google.protobuf.message import Message

from storesvc.errors import CorruptDataError
from storesvc.rpc import requests
from storesvc.rpc.status import MAX_MESSAGE_BYTES
from storesvc_proto.v1 import errors_pb2

MAX_PAGE_BYTES: Final = 3 << 20
"""Of the rows of a page, unless one alone is larger."""


class Named(Protocol):
    """Something that the contract has a name for."""

    @property
    def resource(self) -> str:
        """The name."""


N = TypeVar("N", bound=Named)
T = TypeVar("T")
M = TypeVar("M", bound=Message)


@dataclass(slots=True)
class Page(Generic[M]):
    """What a response to a list says."""

    rows: list[M] = field(default_factory=list)
    damaged: list[errors_pb2.DamagedRecord] = field(default_factory=list)
    token: str = ""
    """Of the next page; "" after the last."""


def page(
    listed: str,
    found: Sequence[tuple[N, T | CorruptDataError]],
    *,
    size: int,
    key: Callable[[N], str],
    show: Callable[[N, T], M],
) -> Page[M]:
    """Returns a page; one that is cut short where its rows, labels and all, would not
    fit a message.

    Args:
        listed: What is listed; the token is for that alone.
        found: Names, and what they name or that it is damaged: one more than a page
            holds where there are more.
        size: Rows of a page, damaged ones counted.
        key: What the token says of the last row.
        show: The row of something.
    """
    made: Page[M] = Page()
    held = 0
    for count, (name, thing) in enumerate(found):
        row: M | errors_pb2.DamagedRecord
        if isinstance(thing, CorruptDataError):
            row = _damaged(name, thing, position=len(made.rows))
        else:
            row = show(name, thing)
        held += row.ByteSize()
        if count == size or (count and held > MAX_PAGE_BYTES):
            made.token = requests.page_token(listed, key(found[count - 1][0]))
            break
        if isinstance(row, errors_pb2.DamagedRecord):
            made.damaged.append(row)
        else:
            made.rows.append(row)
    return made


def _damaged(
    name: Named, error: CorruptDataError, *, position: int
) -> errors_pb2.DamagedRecord:
    return errors_pb2.DamagedRecord(
        name=name.resource, message=str(error)[:MAX_MESSAGE_BYTES], position=position
    )
