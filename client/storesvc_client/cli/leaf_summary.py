"""Summarizes the values of a leaf: minimum, maximum, mean, and count of NaN.

Minimum, maximum and mean are taken over the values that are not NaN, infinities
included. A number that does not exist is None:

==============  ====================================================
booleans        counted as 0 and 1: the mean is the share of true
integers        exact, except for the mean
complex         mean and NaN count only: they have no order
PRNG keys       None: their bits are no quantities
texts, bytes    None, as are large integers
empty arrays    None, and a NaN count of 0
==============  ====================================================
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from storesvc_client._views.texts import ENCODED

if TYPE_CHECKING:
    import numpy as np

    from storesvc_client import LeafInfo

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_BLOCK: Final = 1 << 20
"""Elements converted at a time, which bounds the memory on top of the leaf's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Four numbers that summarize the values of a leaf."""

    min: complex | None
    max: complex | None
    mean: complex | None
    nan_count: int | None


def summarize(leaf: "LeafInfo", array: "Array") -> Summary:
    """Returns the summary of a leaf."""
    import numpy as np

    if leaf.prng_impl or leaf.kind in ENCODED:
        return Summary(min=None, max=None, mean=None, nan_count=None)
    flat = array.reshape(-1)
    least, greatest, total, count = [], [], 0.0, 0
    for start in range(0, flat.size, _BLOCK):
        values = _computable(flat[start : start + _BLOCK])
        values = values[~np.isnan(values)]
        if not values.size:
            continue
        count += values.size
        # Infinities of both signs give NaN, large finite numbers may give inf.
        with np.errstate(over="ignore", invalid="ignore"):
            total += values.sum(dtype=np.result_type(values, np.float64)).item()
        if not np.iscomplexobj(values):
            least.append(values.min().item())
            greatest.append(values.max().item())
    return Summary(
        min=min(least, default=None),
        max=max(greatest, default=None),
        mean=total / count if count else None,
        nan_count=flat.size - count,
    )


def _computable(values: "Array") -> "Array":
    """Returns the values, exactly, in a dtype with NumPy arithmetic."""
    import numpy as np

    if values.dtype.isbuiltin == 1:
        return values
    is_integer = values.dtype.name.startswith(("int", "uint"))
    return values.astype(np.int8 if is_integer else np.float32)
