"""Number of examples of a test, for the full suite and for the quick one."""

import os
from collections.abc import Iterable
from typing import Any, Final

import pytest

FULL: Final = os.environ.get("STORESVC_SUITE") == "full"
"""True if all examples are drawn, as ``make soak`` does, and ``make check`` for slow
tests."""

_PART: Final = 5


def examples(count: int) -> int:
    """Returns the number of examples to try: a fifth of them in the quick suite."""
    return count if FULL else max(1, count // _PART)


def sampled(cases: Iterable[Any], every: int, *, checked_every: int = 1) -> list[Any]:
    """Returns all cases of a sweep for ``parametrize``: one in ``every`` is quick, the
    others are marked as slow, and all of them but one in ``checked_every`` are left to
    ``make soak``."""
    return [
        _marked(case, quick=index % every == 0, checked=index % checked_every == 0)
        for index, case in enumerate(cases)
    ]


def soaked(cases: Iterable[Any], every: int) -> list[Any]:
    """Returns all cases of a slow sweep for ``parametrize``: ``make check`` runs one in
    ``every``, ``make soak`` the others."""
    return [
        _marked(case, quick=False, checked=index % every == 0)
        for index, case in enumerate(cases)
    ]


def _marked(case: Any, *, quick: bool, checked: bool) -> Any:
    values = case if type(case) is tuple else (case,)
    marks = [] if quick else [pytest.mark.slow]
    if not (quick or checked):
        marks.append(pytest.mark.soak)
    return pytest.param(*values, marks=marks)
