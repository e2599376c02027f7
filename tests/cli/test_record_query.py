"""Conditions and orders of lists, as texts."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any
from weakref import WeakSet

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storesvc_client.cli.records import (
    CHECKPOINTS,
    LEAVES,
    QueryError,
    RecordSelection,
    parse_condition,
    parse_order,
    parse_size,
)

NOW = datetime(2026, 11, 25, 12, tzinfo=UTC)


@dataclass(kw_only=True)
class Fields:
    """The fields of a checkpoint that conditions compare."""

    step: int = 100
    commit_time: datetime = NOW - timedelta(hours=2)
    size_bytes: int = 3 * 1024**3
    pinned: bool = False
    principal: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class Record:
    """A checkpoint with its tags."""

    checkpoint: Fields
    tags: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.checkpoint, name)


def record(
    *,
    tags: tuple[str, ...] = (),
    metrics: Mapping[str, float] | None = None,
    labels: Mapping[str, str] | None = None,
    step: int = 100,
    pinned: bool = False,
) -> Record:
    fields = Fields(
        step=step, pinned=pinned, metrics=metrics or {}, labels=labels or {}
    )
    return Record(checkpoint=fields, tags=tags)


FINAL = record(
    step=200,
    tags=("best", "prod"),
    metrics={"loss": 2.08, "eval/acc": 0.5, "zero": 0.0, "broken": math.nan},
    labels={"stage": "final", "commit": "4e2", "lr": "0.1", "size": "small"},
    pinned=True,
)
PLAIN = record(step=100)


def matches(text: str, of: Record = FINAL) -> bool:
    return parse_condition(text, CHECKPOINTS, now=NOW).matches(of)


def problem(text: str) -> str:
    with pytest.raises(QueryError) as caught:
        parse_condition(text, CHECKPOINTS, now=NOW)
    return str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        *("loss<2.5", "loss <= 2.08", "step>=2e2", "step=200"),
        *("size>2GiB", "size<=3GiB", "size_bytes=3221225472", "size>3_000_000"),
        *("age>1h", "age<'3 hours'", "committed>2026-11-24"),
        *("committed<2026-11-25T11:00:00+00:00", "commit_time>=2026-01-01"),
        *("pinned", "pinned=yes", "pinned!=no", "tags", "tags=best", "tags=pr*"),
        *("tags!=candidate", "stage=final", "stage=fi*", "stage!=draft"),
        *("labels.stage=final", "metrics.loss<3", "labels.size=small"),
        *("eval/acc=0.5", "'eval/acc'=0.5", "zero", "zero=0", "lr=0.1", "lr<0.2"),
        *("broken=nan", "broken", "~broken<1", "~broken>1", "loss!=nan"),
        *("loss<3 & pinned", "loss>3 | pinned", "~(loss>3)", "~loss>3 & ~~pinned"),
        *("loss>3 & pinned | tags=best", "pinned & (loss>3 | tags=best)"),
        *("commit=4e2", "unknown!=x", "unknown!=1", "~unknown", '"stage"="final"'),
    ],
)
def test_a_checkpoint_matches_a_condition(text: str) -> None:
    assert matches(text)


@pytest.mark.parametrize(
    "text",
    [
        *("loss>2.5", "unknown<1", "unknown=1", "unknown=x", "unknown", "stage=fin"),
        *("tags=pr", "tags!=best", "pinned=no", "age>3h", "committed>2026-11-26"),
        *("broken<1", "broken>1", "broken!=nan", "stage<1", "'stage'='fi*'"),
        *("commit=400", "loss<3 & tags=no", "~(loss<3 | stage=final)", "step!=200"),
        *("labels.loss", "metrics.stage", "pinned & (loss>3 | tags=no)", "principal=x"),
    ],
)
def test_a_checkpoint_does_not_match_a_condition(text: str) -> None:
    assert not matches(text)


@pytest.mark.parametrize("text", ["loss<1", "tags", "pinned", "stage=final", "loss"])
def test_a_checkpoint_without_a_value_matches_no_condition_on_it(text: str) -> None:
    assert not matches(text, PLAIN)


def test_brackets_of_a_shape_are_no_pattern() -> None:
    @dataclass
    class Leaf:
        kind: str
        dtype: str
        shape: tuple[int, ...]
        prng_impl: None = None

    leaf = Leaf("array", "float32", (4, 8))

    def is_found(text: str) -> bool:
        return parse_condition(text, LEAVES, now=NOW).matches(leaf)

    assert [True, True, False] == [
        *map(is_found, ("shape=[4,8]", "shape=[4,*]", "shape=[8,*]"))
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "'' at the end: expected a field, got nothing"),
        ("loss<", "'loss<' at the end: expected a number after <, got nothing"),
        ("loss<<2", "'loss<<2' at character 6: expected a number after <, got '<'"),
        ("loss<x", "'loss<x' at character 6: expected a number, which an order needs"),
        ("step=x", "'step=x' at character 6: expected a number, got 'x'"),
        ("size>1.5GiBs", "expected a size, such as 500000 or 1.5GiB, got '1.5GiBs'"),
        ("age<12x", "expected a duration, such as 12h or 3d, got '12x'"),
        ("committed>now", "expected a time, such as 2026-11-24"),
        ("committed=2026-11-24", "expected <, <=, > or >= before the value"),
        ("pinned=perhaps", "expected yes or no, got 'perhaps'"),
        ("tags<best", "expected = or != before the value of tags"),
        ("step", "expected an operator after step, such as < or =, got nothing"),
        ("pinned and loss<3", "expected &, | or the end, got 'and'; & joins"),
        ("not pinned", "expected &, | or the end, got 'pinned'; ~ negates a"),
        ("!pinned", "expected a field, got '!'; ~ negates a condition"),
        ("pinned && loss<3", "expected a field, got '&'; a single & joins"),
        ("pinned & <3", "'pinned & <3' at character 10: expected a field, got '<'"),
        ("(pinned", "expected &, | or ), got nothing"),
        ("pinned)", "at character 7: expected &, | or the end, got ')'"),
        ("'loss<3", "at character 1: expected ' at its end"),
        ("~" * 40 + "pinned", "expected at most 32 nested parentheses"),
        ("(" * 10_000, "expected at most 32 nested parentheses"),
    ],
)
def test_an_error_names_the_place_and_what_is_expected(
    text: str, expected: str
) -> None:
    assert expected in problem(text)


def test_a_field_that_leaves_do_not_have_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(QueryError) as caught:
        parse_condition("siz>3", LEAVES, now=NOW)

    assert (
        "'siz>3' at character 1: expected a field: chunks, dtype, key, kind, shape, "
        "size, got 'siz'; did you mean size?"
    ) == str(caught.value)


@given(st.text(alphabet="abstepinlo<>=!&|~()'\"*.1 ", max_size=30))
def test_any_text_is_a_condition_or_an_error_with_a_place(text: str) -> None:
    try:
        condition = parse_condition(text, CHECKPOINTS, now=NOW)
    except QueryError as e:
        assert "expected" in str(e)
        assert "at character" in str(e) or "at the end" in str(e)
    else:
        assert condition.matches(FINAL) in (True, False)


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_operators_compare_as_numbers_do(value: float, wanted: float) -> None:
    found = record(metrics={"m": value})

    results = {sign: matches(f"m{sign}{wanted!r}", found) for sign in ("<", ">=", "=")}

    assert {"<": value < wanted, ">=": value >= wanted, "=": value == wanted} == results


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("100", 100),
        ("1kB", 1000),
        ("2MB", 2_000_000),
        ("1.5GiB", 3 * 2**29),
        ("1K", 1000),
        ("1Ki", 1024),
        ("1 TiB", 2**40),
        ("1_000", 1000),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_a_size_has_a_unit_of_powers_of_1000_or_1024(text: str, expected: int) -> None:
    assert expected == parse_size(text)


@pytest.mark.parametrize(
    "text", ["", "GiB", "1iB", "-1", "1.5.1", "1GB2", "0x10", "1_", "1__0MB", "9" * 400]
)
def test_other_texts_are_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        parse_size(text)


# --- order ------------------------------------------------------------------------


def steps_by(text: str, records: list[Record]) -> list[int]:
    order = parse_order(text, CHECKPOINTS)
    ordered = sorted(records, key=order.key, reverse=order.descending)
    return [each.checkpoint.step for each in ordered]


def test_records_without_a_number_come_last_in_both_directions() -> None:
    losses = {1: 2.0, 2: None, 3: math.nan, 4: 1.0, 5: math.inf}
    records = [
        record(step=step, metrics={} if loss is None else {"loss": loss})
        for step, loss in losses.items()
    ]

    assert [4, 1, 5, 2, 3] == steps_by("loss", records)
    assert [5, 1, 4, 2, 3] == steps_by("-loss", records)


def test_labels_are_sorted_as_numbers_before_texts() -> None:
    labels = {1: "10", 2: "9", 3: "run10", 4: "run9", 5: "1e0", 6: "nan"}
    records = [record(step=step, labels={"x": text}) for step, text in labels.items()]

    assert [5, 2, 1, 4, 3, 6] == steps_by("x", records)
    assert [3, 4, 1, 2, 5, 6] == steps_by("-x", records)


def test_the_oldest_has_the_greatest_age() -> None:
    records = [record(step=step) for step in (1, 2)]
    records[0].checkpoint.commit_time -= timedelta(days=1)

    assert [1, 2] == steps_by("-age", records)
    assert [1, 2] == steps_by("committed", records)


@pytest.mark.parametrize("text", ["", "-", " "])
def test_an_order_without_a_field_is_an_error(text: str) -> None:
    with pytest.raises(QueryError, match="expected a field: age, begun"):
        parse_order(text, CHECKPOINTS)


# --- selection --------------------------------------------------------------------


@pytest.mark.parametrize("sort", ["step", "-step"])
def test_a_sorted_list_with_a_limit_keeps_no_more_records_than_it_shows(
    sort: str,
) -> None:
    alive = WeakSet[Record]()
    most = 0

    def records() -> Iterator[Record]:
        nonlocal most
        for step in range(200):
            found = record(step=step)
            alive.add(found)
            most = max(most, len(alive))
            yield found

    selection = RecordSelection(CHECKPOINTS, sort=sort)
    shown = [
        each.checkpoint.step for each in selection.select_records(records(), limit=3)
    ]

    assert shown == ([0, 1, 2, 3] if sort == "step" else [199, 198, 197, 196])
    assert most < 10


def test_a_limit_without_an_order_reads_no_more_than_it_needs() -> None:
    read: list[int] = []

    def records() -> Iterator[Record]:
        for step in range(200):
            read.append(step)
            yield record(step=step)

    selection = RecordSelection(CHECKPOINTS, where=["step>=5"])
    shown = islice(selection.select_records(records(), limit=2), 2)

    assert [5, 6] == [each.checkpoint.step for each in shown]
    assert [*range(7)] == read
    assert selection.warning() is None
