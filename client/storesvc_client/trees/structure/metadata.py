"""Metadata of Variables, the same in all releases of flax.

What every Variable has is left out where it is as usual, and ``out_sharding`` is what
older releases call ``sharding_names``.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from flax import nnx

USUAL: Final[Mapping[str, Any]] = {
    "eager_sharding": True,
    "hijax": False,
    "mutable": True,
    "ref": False,
}
"""What a Variable has unless it was asked for something else."""

_OWN: Final = frozenset(nnx.Variable(np.zeros(())).get_metadata())
"""What each Variable of this release of flax must have."""

_OLD_SHARDING: Final = "sharding_names"
_SHARDING: Final = "out_sharding"
_OWN_SHARDING: Final = (
    _SHARDING if hasattr(nnx.Variable, _OLD_SHARDING) else _OLD_SHARDING
)
"""As this release of flax calls it: newer ones keep the old name as a property."""


def portable(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns metadata under the names of documents, without what is usual."""
    return {
        portable_name(key): value
        for key, value in metadata.items()
        if not (key in USUAL and value is USUAL[key])
    }


def native(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns metadata for ``Variable.from_metadata`` of this release of flax."""
    usual = {key: value for key, value in USUAL.items() if key in _OWN}
    known = {
        native_name(key): value
        for key, value in metadata.items()
        if key in _OWN or key not in USUAL
    }
    return {**usual, **known}


def portable_name(key: str) -> str:
    """Returns what documents call an entry of metadata."""
    return _SHARDING if key == _OLD_SHARDING else key


def native_name(key: str) -> str:
    """Returns what this release of flax calls it."""
    return _OWN_SHARDING if key == _SHARDING else key
