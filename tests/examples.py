"""How many examples Hypothesis draws: a fifth where nobody asks for the full suite."""

import os
from typing import Final

FULL: Final = os.environ.get("STORESVC_SUITE") == "full"
"""Whether all examples are drawn, as ``make check`` and CI do."""

_PART: Final = 5


def examples(count: int) -> int:
    """Returns how many of them a test draws."""
    return count if FULL else max(1, count // _PART)
