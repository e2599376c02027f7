"""IDs of test cases that are equal in every process, as parallel runs need."""

import re
from typing import Final

_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


def stable_id(value: object) -> str:
    """Returns the text of a value without its address in memory."""
    return _ADDRESS.sub("", str(value))
