"""Pages of a sorted list of names, between the bounds of a request."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Bounds of the names that a listing returns."""

    prefix: str = ""
    delimiter: str = ""
    """Names that contain it after the prefix are listed as one group that ends with it.
    """
    first: str = ""
    before: str = ""
    """Exclusive upper bound of the names; empty: no bound."""

    def group(self, name: str) -> str:
        """Returns the entry for a name: the name itself, or its group."""
        if not self.delimiter:
            return name
        found = name.find(self.delimiter, len(self.prefix))
        return name if found < 0 else name[: found + len(self.delimiter)]

    def is_group(self, listed: str) -> bool:
        """Returns whether an entry is a group."""
        return bool(self.delimiter) and self.delimiter in listed[len(self.prefix) :]


@dataclass(slots=True)
class Page:
    """One page of a listing."""

    names: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    more_after: str | None = None
    """The last entry if more follow."""


def list_names(names: Sequence[str], where: Range, *, after: str, most: int) -> Page:
    """Returns the next page of a listing.

    Args:
        names: All names, sorted.
        where: Bounds of the listing.
        after: Last entry of the page before; empty: this is the first page.
        most: Most entries of the page, groups included.
    """
    page, last = Page(), after
    at = bisect.bisect_left(names, max(where.prefix, where.first))
    if after:
        at = max(at, _behind(names, where, after))
    while at < len(names) and names[at].startswith(where.prefix):
        name = names[at]
        if where.before and name >= where.before:
            break
        if len(page.names) + len(page.groups) == most:
            page.more_after = last
            break
        last = where.group(name)
        (page.groups if where.is_group(last) else page.names).append(last)
        at = _behind(names, where, last)
    return page


def _behind(names: Sequence[str], where: Range, listed: str) -> int:
    """Returns the index of the first name after an entry, or after all of its group."""
    if not where.is_group(listed):
        return bisect.bisect_right(names, listed)
    return bisect.bisect_right(names, listed, key=lambda name: name[: len(listed)])
