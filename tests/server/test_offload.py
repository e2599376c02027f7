"""Where computations over tables run."""

import asyncio
import threading

import pytest

from storesvc.concurrency import ROW_BYTES, SMALL_ROWS, offload, rows_in


async def test_few_rows_are_worked_on_in_the_event_loop_and_many_in_a_thread() -> None:
    here = threading.get_ident()
    few = await offload(SMALL_ROWS, threading.get_ident)
    many = await offload(SMALL_ROWS + 1, threading.get_ident)

    assert (True, False) == (few == here, many == here)


@pytest.mark.parametrize("rows", [0, SMALL_ROWS + 1])
def test_arguments_results_and_errors_pass_in_both_places(rows: int) -> None:
    assert [3, 2, 1] == asyncio.run(offload(rows, sorted, [2, 1, 3], reverse=True))
    with pytest.raises(ValueError, match="invalid literal"):
        asyncio.run(offload(rows, int, "x"))


def test_rows_of_serialised_tables_are_not_underestimated() -> None:
    assert 0 == rows_in(b"")
    assert SMALL_ROWS + 1 == rows_in(bytes(ROW_BYTES * (SMALL_ROWS + 1)))
