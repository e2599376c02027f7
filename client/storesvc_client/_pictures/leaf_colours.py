"""Colours of leaves, with the entries of their legend: by dtype, or by change."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from storesvc_client._pictures.svg import DTYPE_COLOURS, GREY
from storesvc_client._values.texts import dtype_text
from storesvc_client._values.values import LeafInfo

Shares: TypeAlias = Mapping[str, float | None]
"""Share of changed chunks by key, from 0 to 1; None: not known. Leaves without an entry
are unchanged."""

OTHER: Final = "other"
UNKNOWN: Final = "not known"

CHANGES: Final = (
    ("unchanged", "#8d99a6", 0.0),
    ("up to 25 % changed", "#e8c35a", 0.25),
    ("up to 50 %", "#e89a3c", 0.5),
    ("up to 75 %", "#d9653b", 0.75),
    ("up to 100 %", "#b03a48", 1.0),
)
"""Names, colours and upper limits of shares of changed chunks."""

_PREFERRED: Final = {"float32": 0, "bfloat16": 1, "float16": 1, "float64": 2}
"""Colours that dtypes have unless a larger one has them."""


class Colouring(Protocol):
    """A rule that colours leaves."""

    @property
    def title(self) -> str:
        """Words for "by ...", such as "dtype"."""
        ...

    @property
    def colours(self) -> Mapping[str, str]:
        """Colours by entry of the legend, in its order."""
        ...

    def entry(self, leaves: Sequence[LeafInfo]) -> str:
        """Returns the entry of the legend that leaves belong to together."""
        ...

    def remark(self, leaves: Sequence[LeafInfo]) -> str:
        """Returns what a tooltip adds about leaves; "" for nothing."""
        ...


@dataclass(frozen=True, slots=True)
class ByDtype:
    """Colours by dtype; leaves together have the dtype of most of their bytes."""

    colours: Mapping[str, str]
    title: str = "dtype"

    @classmethod
    def of(cls, leaves: Iterable[LeafInfo]) -> "ByDtype":
        """Returns the colours of the dtypes with the most bytes; the others share
        grey."""
        free, colours = [*DTYPE_COLOURS], {}
        for dtype, _ in _bytes_by_dtype(leaves).most_common(len(free)):
            wanted = DTYPE_COLOURS[_PREFERRED.get(dtype, -1)]
            colour = wanted if wanted in free else free[0]
            free.remove(colour)
            colours[dtype] = colour
        return cls({**colours, OTHER: GREY})

    def entry(self, leaves: Sequence[LeafInfo]) -> str:
        """See ``Colouring.entry``."""
        if len(leaves) == 1:
            dtype = dtype_text(leaves[0])
        else:
            ((dtype, _),) = _bytes_by_dtype(leaves).most_common(1)
        return dtype if dtype in self.colours else OTHER

    def remark(self, leaves: Sequence[LeafInfo]) -> str:
        """See ``Colouring.remark``."""
        return "" if len(leaves) == 1 else ", ".join(_bytes_by_dtype(leaves))


@dataclass(frozen=True, slots=True)
class ByChange:
    """Colours by share of changed chunks; leaves together have their share of bytes."""

    shares: Shares
    title: str = "share of changed chunks"

    @property
    def colours(self) -> Mapping[str, str]:
        """See ``Colouring.colours``."""
        return {name: colour for name, colour, _ in CHANGES} | {UNKNOWN: GREY}

    def entry(self, leaves: Sequence[LeafInfo]) -> str:
        """See ``Colouring.entry``."""
        share = changed_share(leaves, self.shares)
        if share is None:
            return UNKNOWN
        # beyond 1 only by rounding, or by a server that counts wrongly
        return next(
            (name for name, _, most in CHANGES if share <= most), CHANGES[-1][0]
        )

    def remark(self, leaves: Sequence[LeafInfo]) -> str:
        """See ``Colouring.remark``."""
        share = changed_share(leaves, self.shares)
        return "change not known" if share is None else f"{percent(share)} changed"


def changed_share(leaves: Sequence[LeafInfo], shares: Shares) -> float | None:
    """Returns the share of changed bytes; None if that of a leaf is not known."""
    changed, total = 0.0, 0
    for leaf in leaves:
        share = shares.get(leaf.key, 0.0)
        if share is None:
            return None
        changed += share * leaf.size_bytes
        total += leaf.size_bytes
    return changed / total if total else 0.0


def percent(share: float) -> str:
    """Returns a share as text; 0 % and 100 % only if nothing or everything counts."""
    if 0 < share < 0.01:
        return "< 1 %"
    if 0.99 < share < 1:
        return "> 99 %"
    return f"{share:.0%}".replace("%", " %")


def _bytes_by_dtype(leaves: Iterable[LeafInfo]) -> Counter[str]:
    sizes = Counter[str]()
    for leaf in leaves:
        sizes[dtype_text(leaf)] += leaf.size_bytes
    return sizes
