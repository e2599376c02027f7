"""One module for each format that storesvc reads.

Each has ``open_root(location)``, which returns the ``ForeignRoot`` of a location, or
raises an error that states what was expected there. Begin with ``orbax_step.py``.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

FORMATS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "eformer": "eformer",
        "jax": "jax_arrays",
        "levanter": "levanter",
        "orbax": "orbax_step",
        "safetensors": "safetensors",
    }
)
"""Scheme of the URLs of each format, and its module here, imported on first use."""
