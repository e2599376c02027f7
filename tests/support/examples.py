"""Number of examples of a test, for the full suite and for the quick one."""

import os
from collections.abc import Iterable
from typing import Any, Final

import pytest

FULL: Final = os.environ.get("STORESVC_SUITE") == "full"
"""True if all examples are drawn, as ``make check`` and CI do."""

_PART: Final = 5


def examples(count: int) -> int:
    """Returns the number of examples to try: a fifth of them in the quick suite."""
    return count if FULL else max(1, count // _PART)


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """Returns all cases of a sweep for ``parametrize``: one in ``every`` is quick, the
    others are marked as slow."""
    return [
        case if index % every == 0 else _slow(case) for index, case in enumerate(cases)
    ]


def _slow(case: Any) -> Any:
    values = case if type(case) is tuple else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
