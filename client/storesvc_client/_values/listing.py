"""Lists that notebooks show as tables.

``Listing`` is an iterator over rows that a server sends page by page. Showing it reads
the rows that are left and keeps them, so that a later loop yields them all the same.
``Rows`` and ``Leaves`` are a list and a dict.

Example:
    >>> @listed("number")
    ... def numbers() -> Iterator[int]:
    ...     yield from (1, 2)
    >>> list(numbers())
    [1, 2]
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Generic, ParamSpec, Self, TypeVar

from storesvc_client._values.texts import count_text, plural, size_text
from storesvc_client.errors import StoreError

if TYPE_CHECKING:
    from storesvc_client._values.values import LeafInfo

T = TypeVar("T")
P = ParamSpec("P")


class Listing(Iterator[T], Generic[T]):
    """An iterator over the rows of a list, which a notebook shows as a table."""

    def __init__(self, noun: str, rows: Iterator[T]) -> None:
        """Creates the list; nothing is read yet.

        Args:
            noun: What a row is, such as "checkpoint".
            rows: Reads the rows.
        """
        self._noun = noun
        self._rows = rows
        self._read_ahead = deque[T]()
        """Rows that were read to be shown, and not yielded yet."""
        self._error: StoreError | None = None
        """Error after these rows, to be raised in its place."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if self._read_ahead:
            return self._read_ahead.popleft()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return next(self._rows)

    def __repr__(self) -> str:
        return f"<iterator over {plural(self._noun)}>"

    def _repr_html_(self) -> str:
        from storesvc_client._values.notebook import list_html

        if self._error is None:
            try:
                self._read_ahead.extend(self._rows)
            except StoreError as e:
                self._error = e
        ending = "" if self._error is None else f"the list ends here: {self._error}"
        return list_html(self._read_ahead, noun=self._noun, ending=ending)


def listed(
    noun: str,
) -> Callable[[Callable[P, Iterator[T]]], Callable[P, Listing[T]]]:
    """Returns a decorator for functions that return an iterator: they then return a
    ``Listing``.

    Args:
        noun: What a row is, such as "checkpoint".
    """

    def decorated(function: Callable[P, Iterator[T]]) -> Callable[P, Listing[T]]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Listing[T]:
            return Listing(noun, function(*args, **kwargs))

        return call

    return decorated


class Rows(list[T]):
    """A list that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        from storesvc_client._values.notebook import list_html

        return list_html(self)


class Leaves(dict[str, "LeafInfo"]):
    """Leaves by key, which a notebook shows as a table."""

    def __repr__(self) -> str:
        size = size_text(sum(leaf.size_bytes for leaf in self.values()))
        return f"<{count_text(len(self), 'leaf')}, {size}>"

    def _repr_html_(self) -> str:
        from storesvc_client._values.notebook import leaves_html

        return leaves_html(self)
