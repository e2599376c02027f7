"""Converts metadata of Variables to a form that is the same in all flax releases.

Default entries are omitted. ``out_sharding`` is the name for what older releases call
``sharding_names``.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from flax import nnx

DEFAULTS: Final[Mapping[str, Any]] = {
    "eager_sharding": True,
    "hijax": False,
    "mutable": True,
    "ref": False,
}
"""Default metadata of a Variable."""

_REQUIRED: Final = frozenset(nnx.Variable(np.zeros(())).get_metadata())
"""Metadata that the installed flax release requires of each Variable."""

_OLD_SHARDING: Final = "sharding_names"
_SHARDING: Final = "out_sharding"
_NATIVE_SHARDING: Final = (
    _SHARDING if hasattr(nnx.Variable, _OLD_SHARDING) else _OLD_SHARDING
)
"""Name in the installed flax release; newer ones keep the old name as a property."""


def portable(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns metadata with the names of documents, without defaults."""
    return {
        portable_name(key): value
        for key, value in metadata.items()
        if not (key in DEFAULTS and value is DEFAULTS[key])
    }


def native(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns metadata for ``Variable.from_metadata`` of the installed flax release."""
    defaults = {key: value for key, value in DEFAULTS.items() if key in _REQUIRED}
    known = {
        native_name(key): value
        for key, value in metadata.items()
        if key in _REQUIRED or key not in DEFAULTS
    }
    return {**defaults, **known}


def portable_name(key: str) -> str:
    """Returns the name of a metadata entry in documents."""
    return _SHARDING if key == _OLD_SHARDING else key


def native_name(key: str) -> str:
    """Returns the name of a metadata entry in the installed flax release."""
    return _NATIVE_SHARDING if key == _SHARDING else key
