"""Reads safetensors files as the package of that name parses them."""

from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import deserialize

from storesvc.format.dtypes import DTYPES
from storesvc_client._export.safetensors import DTYPE_NAMES

HELD: Final = {theirs: DTYPES[ours] for ours, theirs in DTYPE_NAMES.items()}
"""Dtypes of whole bytes, by their names in safetensors."""


def load_file(file: Path) -> dict[str, NDArray[Any]]:
    """Returns the tensors of a file; the package's own functions that return arrays of
    NumPy lack float8."""
    parsed: Any = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
    return {
        name: np.frombuffer(found["data"], HELD[found["dtype"]]).reshape(found["shape"])
        for name, found in parsed
    }


def load_folder(folder: Path) -> dict[str, NDArray[Any]]:
    """Returns the tensors of all files in a folder."""
    return {
        name: array
        for file in sorted(folder.glob("*.safetensors"))
        for name, array in load_file(file).items()
    }
