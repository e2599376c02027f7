"""Pages of lists, and the tokens that continue them."""

import hashlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

from google.protobuf.message import Message

from storesvc.errors import CorruptDataError, InvalidFieldError, InvalidPageTokenError
from storesvc.format.names import InvalidNameError
from storesvc.rpc.status import MAX_TEXT_BYTES
from storesvc_proto.v1 import errors_pb2

DEFAULT_PAGE: Final = 100
"""Rows of a page if the request does not set a size."""

MAX_PAGE: Final = 1000
"""Maximum rows of a page."""

MAX_PAGE_BYTES: Final = 3 << 20
"""Maximum bytes of the rows of a page, unless a single row is larger."""

_TOKEN_CHECK_BYTES: Final = 8


class Named(Protocol):
    """A name of an object of the contract."""

    @property
    def resource(self) -> str:
        """The resource name."""


class ListRequest(Protocol):
    """A request of a list rpc."""

    @property
    def page_size(self) -> int:
        """Requested number of rows; 0: the default."""

    @property
    def page_token(self) -> str:
        """Token of the page; "": the first one."""


N = TypeVar("N", bound=Named)
P = TypeVar("P")
T = TypeVar("T")
M = TypeVar("M", bound=Message)


@dataclass(slots=True)
class Page(Generic[M]):
    """The fields of the response of a list rpc."""

    rows: list[M] = field(default_factory=list)
    damaged: list[errors_pb2.DamagedRecord] = field(default_factory=list)
    token: str = ""
    """Token of the next page; "" after the last one."""


async def list_page(
    request: ListRequest,
    listed: str,
    *,
    find: Callable[
        [P | None, int], Awaitable[Sequence[tuple[N, T | CorruptDataError]]]
    ],
    parse: Callable[[str], P],
    key: Callable[[N], str],
    show: Callable[[N, T], M],
) -> Page[M]:
    """Returns the page that a request asks for; cuts it short if its rows would not fit
    into a message.

    Args:
        listed: Identifies the list; a token of another list is rejected.
        find: Returns names with objects or their damage after the last row of the
            previous page, up to a limit.
        key: Returns the text of a row for the token.

    Raises:
        InvalidFieldError: ``page_size`` is negative.
        InvalidPageTokenError: The token was not issued for this list.
    """
    size = page_size(request.page_size)
    last = parse_last_row(listed, request.page_token, parse)
    found = await find(last, size + 1)
    made: Page[M] = Page()
    held = 0
    for count, (name, thing) in enumerate(found):
        row: M | errors_pb2.DamagedRecord
        if isinstance(thing, CorruptDataError):
            row = errors_pb2.DamagedRecord(
                name=name.resource,
                message=str(thing)[:MAX_TEXT_BYTES],
                position=len(made.rows),
            )
        else:
            row = show(name, thing)
        held += row.ByteSize()
        if count == size or (count and held > MAX_PAGE_BYTES):
            made.token = page_token(listed, key(found[count - 1][0]))
            break
        if isinstance(row, errors_pb2.DamagedRecord):
            made.damaged.append(row)
        else:
            made.rows.append(row)
    return made


def page_size(requested: int) -> int:
    if requested < 0:
        raise InvalidFieldError(f"page_size: expected 0 or more, got {requested}")
    return min(requested or DEFAULT_PAGE, MAX_PAGE)


def page_token(listed: str, last: str) -> str:
    return urlsafe_b64encode(_token_check(listed, last) + last.encode()).decode()


def parse_last_row(listed: str, token: str, parse: Callable[[str], P]) -> P | None:
    """Returns the last row of the previous page; None for the first page.

    Raises:
        InvalidPageTokenError: The token was not issued for this list.
    """
    if not token:
        return None
    try:
        data = urlsafe_b64decode(token)
        check, last = data[:_TOKEN_CHECK_BYTES], data[_TOKEN_CHECK_BYTES:].decode()
    except (Base64Error, ValueError):
        check, last = b"", ""
    if check != _token_check(listed, last):
        raise _invalid_token(listed)
    try:
        return parse(last)
    except InvalidNameError as e:
        raise _invalid_token(listed) from e


def _invalid_token(listed: str) -> InvalidPageTokenError:
    return InvalidPageTokenError(
        f"page_token: expected a token of a list of {listed}, got another text; start "
        "without a token"
    )


def _token_check(listed: str, last: str) -> bytes:
    # A checksum, not a secret: it detects tokens of other lists and truncated ones.
    return hashlib.blake2b(
        f"{listed}\0{last}".encode(), digest_size=_TOKEN_CHECK_BYTES
    ).digest()
