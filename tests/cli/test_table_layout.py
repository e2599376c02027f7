"""Tables in terminals of any width."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storesvc_client._views.tables import Column, Shrink
from storesvc_client.cli.output import align_rows, cut, narrow_table, text_width
from storesvc_client.cli.parent_details import age_text

COLUMNS = (
    Column("STEP", right=True),
    Column("COMMITTED", shrink=Shrink.TIME),
    Column("LEAVES", right=True, is_minor=True),
    Column("TAGS", shrink=Shrink.END),
    Column("KEY", shrink=Shrink.PREFIX),
)
ROWS = [
    ("100", "2026-11-24 07:55:18+00:00", "12", "-", "params/layers/0/attention/bias"),
    ("7", "2026-11-24 07:55:17+00:00", "3", "-", "params/scale"),
]


def lines(room: int) -> list[str]:
    table = narrow_table(COLUMNS, ROWS, room=room)
    return [*align_rows(table.columns, table.rows)]


def test_a_table_that_fits_is_complete() -> None:
    assert [
        "STEP  COMMITTED                  LEAVES  TAGS  KEY",
        " 100  2026-11-24 07:55:18+00:00      12  -     params/layers/0/attention/bias",
        "   7  2026-11-24 07:55:17+00:00       3  -     params/scale",
    ] == lines(80)


def test_columns_without_a_value_are_left_out_first() -> None:
    assert [
        "STEP  COMMITTED                  LEAVES  KEY",
        " 100  2026-11-24 07:55:18+00:00      12  params/layers/0/attention/bias",
        "   7  2026-11-24 07:55:17+00:00       3  params/scale",
    ] == lines(74)


def test_times_lose_their_seconds_before_a_text_is_cut() -> None:
    assert [
        "STEP  COMMITTED         LEAVES  KEY",
        " 100  2026-11-24 07:55      12  params/layers/0/attention/bias",
        "   7  2026-11-24 07:55       3  params/scale",
    ] == lines(64)


def test_the_beginning_of_all_keys_is_shown_once() -> None:
    table = narrow_table(COLUMNS, ROWS, room=56)

    assert ("KEY below params/",) == table.prefixes
    assert [
        "STEP  COMMITTED         LEAVES  KEY",
        " 100  2026-11-24 07:55      12  layers/0/attention/bias",
        "   7  2026-11-24 07:55       3  scale",
    ] == lines(56)


@given(
    keys=st.sets(st.text("ab1/", min_size=1, max_size=40), min_size=2, max_size=6),
    room=st.integers(1, 120),
)
def test_what_distinguishes_keys_is_never_hidden(keys: set[str], room: int) -> None:
    columns = (Column("KEY", shrink=Shrink.PREFIX), Column("SIZE", right=True))

    table = narrow_table(columns, [(key, "1 B") for key in keys], room=room)

    shown = {row[0] for row in table.rows}
    (prefix,) = [line.removeprefix("KEY below ") for line in table.prefixes] or [""]
    assert keys == {prefix + cell for cell in shown}


def test_minor_columns_are_hidden_before_the_last_ones() -> None:
    hidden = [
        narrow_table(COLUMNS, ROWS, room=room).hidden for room in (56, 52, 39, 10)
    ]

    assert [
        (),
        ("LEAVES",),
        ("LEAVES", "KEY"),
        ("LEAVES", "KEY", "COMMITTED"),
    ] == hidden


def test_numbers_are_never_cut() -> None:
    assert ["STEP", " 100", "   7"] == lines(1)


def test_a_table_without_rows_has_its_titles() -> None:
    table = narrow_table(COLUMNS, [], room=80)

    assert ["STEP  COMMITTED  LEAVES  TAGS  KEY"] == [*align_rows(table.columns, [])]


@pytest.mark.parametrize(
    ("text", "width", "how", "expected"),
    [
        ("loss=2.5 acc=0.5", 10, Shrink.END, "loss=2.5 …"),
        ("params/layers/11/kernel", 16, Shrink.PREFIX, "params/layers/11/kernel"),
        ("short", 10, Shrink.END, "short"),
        ("2026-11-24 07:55", 10, Shrink.TIME, "2026-11-24 07:55"),
        ("模型模型模型", 7, Shrink.END, "模型模…"),
        ("模型模型模型", 8, Shrink.END, "模型模…"),
    ],
)
def test_an_ellipsis_stands_for_what_is_cut(
    text: str, width: int, how: Shrink, expected: str
) -> None:
    assert expected == cut(text, width, how)


@given(
    rows=st.lists(st.tuples(*[st.text("ab1-模", max_size=40)] * 5), max_size=4),
    room=st.integers(1, 120),
)
def test_a_table_fits_once_only_its_first_column_is_left(
    rows: list[tuple[str, ...]], room: int
) -> None:
    table = narrow_table(COLUMNS, rows, room=room)
    lines = align_rows(table.columns, table.rows)

    first = max(map(text_width, ["STEP", *(row[0] for row in rows)]))
    assert all(text_width(line) <= max(room, first) for line in lines)


@pytest.mark.parametrize(
    ("age", "expected"),
    [
        (timedelta(seconds=-3), "0s"),
        (timedelta(seconds=5.9), "5s"),
        (timedelta(seconds=60), "1m"),
        (timedelta(minutes=179), "2h"),
        (timedelta(hours=47), "1d"),
        (timedelta(days=400), "400d"),
        (None, "-"),
    ],
)
def test_an_age_has_the_largest_unit_that_fits(
    age: timedelta | None, expected: str
) -> None:
    now = datetime(2026, 11, 24, tzinfo=UTC)

    assert expected == age_text(None if age is None else now - age, now)
