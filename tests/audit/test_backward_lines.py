"""Lines of an audit log, read from its end in any blocks; and its entries."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storesvc.audit.reader import (
    OLD_IN_A_ROW,
    AuditFilter,
    BackwardLines,
    Entry,
    Line,
    PageSearch,
    Position,
    Stage,
    Unreadable,
    parse_line,
)
from storesvc.auth.policy import AllRuns, Authentication, Namespace, Resource
from storesvc.format.names import RunName

TIME = "2026-11-24T07:55:00.123456789Z"
TIME_NS = 1_795_506_900_123_456_789

MOST = 6
"""Maximum bytes of a line in these tests."""


def expected_lines(data: bytes) -> list[tuple[int, bytes | None]]:
    """Returns where the lines of a file begin and their bytes, the last one first."""
    found, start = list[tuple[int, bytes | None]](), 0
    for text in data.split(b"\n"):
        if text:
            found.append((start, text if len(text) <= MOST else None))
        start += len(text) + 1
    return found[::-1]


def read_lines(data: bytes, cuts: set[int], stops: set[int]) -> list[Line]:
    """Reads a file in blocks; forgets all but the position at some of their borders."""
    lines = BackwardLines(Position(offset=len(data)), max_line_bytes=MOST)
    found, end = list[Line](), len(data)
    for start in sorted({0, *(cut for cut in cuts if cut < len(data))}, reverse=True):
        found += lines.add(data[start:end])
        end = start
        if start in stops:
            lines = BackwardLines(lines.position, max_line_bytes=MOST)
            end = lines.position.offset
    return found + lines.finish()


@given(
    st.lists(st.sampled_from([b"\n", b"a", b"bc", b"d" * 7, b"e" * 20])).map(b"".join),
    st.sets(st.integers(1, 60)),
    st.sets(st.integers(1, 60)),
)
def test_lines_are_the_same_for_all_blocks_and_pauses(
    data: bytes, cuts: set[int], stops: set[int]
) -> None:
    found = read_lines(data, cuts, stops)

    assert expected_lines(data) == [(line.start, line.data) for line in found]
    for line in found:
        assert data[line.start : line.end] == (line.data or data[line.start : line.end])
        assert b"\n" not in data[line.start : line.end]
    short = [line for line in found if line.data is not None]
    assert [line.is_whole for line in short] == [
        data[line.end : line.end + 1] == b"\n" for line in short
    ]


def test_a_line_that_is_too_long_takes_no_memory() -> None:
    lines = BackwardLines(Position(offset=10**9), max_line_bytes=100)
    for _ in range(50):
        assert lines.add(b"x" * 60) == []

    assert len(lines._kept) <= 160
    assert lines.position == Position(offset=10**9 - 3000, long_end=10**9)
    (line,) = lines.add(b"ab\n" + b"x" * 57)
    assert (10**9 - 3057, 10**9, None) == (line.start, line.end, line.data)


def line_of(**values: Any) -> bytes:
    """Returns a line of an entry with some values."""
    whole = {
        "seq": 7,
        "server": "host",
        "time": TIME,
        "stage": "ended",
        "id": "abc",
        "principal": "user:a",
        "authentication": "token",
        "peer": "ipv4:127.0.0.1:9",
        "method": "DeleteCheckpoint",
        "permissions": [{"permission": "checkpoints.delete", "resource": "prod/llama"}],
        "detail": {"name": "namespaces/prod/runs/llama/checkpoints/1"},
        "reason": "",
        "latency_ms": 1.5,
        "prev": "0" * 64,
    }
    return json.dumps({**whole, **values}).encode()


def entry_of(**values: Any) -> Entry:
    """Returns the entry of such a line."""
    found = parse_line(line_of(**values))
    assert isinstance(found, Entry)
    return found


def test_a_line_becomes_an_entry() -> None:
    assert entry_of(left_out=3) == Entry(
        seq=7,
        time_ns=TIME_NS,
        stage=Stage.ENDED,
        server="host",
        request_id="abc",
        principal="user:a",
        authentication=Authentication.TOKEN,
        peer="ipv4:127.0.0.1:9",
        method="DeleteCheckpoint",
        permissions=(("checkpoints.delete", "prod/llama"),),
        detail={"name": "namespaces/prod/runs/llama/checkpoints/1"},
        latency_ms=1.5,
        left_out=3,
    )


@pytest.mark.parametrize(
    "line",
    [
        b"secret-token",
        b"\xff\xfe",
        b"[]",
        b"7",
        b'{"seq":1',
        b"[" * 200_000,
        b'{"seq":' + b"9" * 5000 + b"}",
        line_of(seq=0),
        line_of(seq=-1),
        line_of(seq=2**63),
        line_of(seq=True),
        line_of(seq="7"),
        line_of(time="yesterday"),
        line_of(time="2026-13-45T07:55:00.123456789Z"),
        line_of(time=7),
        line_of(time="0001-01-01T00:00:00.000000000Z"),
        line_of(time="1969-12-31T23:59:59.999999999Z"),
        line_of(time="9999-01-01T00:00:00.000000000Z"),
        line_of(missing="secret-token"),
        line_of(missing={"permission": "x", "resource": 7}),
        line_of(stage="secret-token"),
        line_of(authentication="secret-token"),
        line_of(authentication=[]),
        line_of(principal=None),
        line_of(principal="\ud800"),
        line_of(permissions={}),
        line_of(permissions=["secret-token"]),
        line_of(permissions=[{"permission": 1}]),
        line_of(detail=[]),
        line_of(detail={"name": 7}),
        line_of(detail={"\ud800": "x"}),
        line_of(latency_ms=float("nan")),
        line_of(latency_ms=-1),
        line_of(latency_ms="1"),
        line_of(latency_ms=True),
        line_of(latency_ms=10**400),
    ],
    ids=range(36),
)
def test_a_line_that_is_no_entry_is_marked_and_its_text_is_not_returned(
    line: bytes,
) -> None:
    found = parse_line(line)

    assert isinstance(found, Unreadable)
    assert "expected" in found.problem
    assert "secret-token" not in found.problem


@given(st.binary() | st.text().map(str.encode))
def test_any_bytes_are_an_entry_or_marked(data: bytes) -> None:
    assert isinstance(parse_line(data), Entry | Unreadable)


RUN = RunName("prod", "llama")
MISSING = {"permission": "checkpoints.read", "resource": "prod/llama"}


@pytest.mark.parametrize(
    ("resource", "values", "expected"),
    [
        (AllRuns(), {"detail": {}, "permissions": []}, True),
        (RUN, {}, True),
        (RUN, {"detail": {}}, True),  # by the permission
        (RUN, {"permissions": []}, True),  # by the name, as of a denial
        (RUN, {"detail": {"name": "namespaces/prod/runs/llama"}}, True),
        (RUN, {"detail": {}, "permissions": [], "missing": MISSING}, True),
        (
            Namespace("prod"),
            {"detail": {}, "permissions": [], "missing": MISSING},
            True,
        ),
        (
            Namespace("lab"),
            {"detail": {}, "permissions": [], "missing": MISSING},
            False,
        ),
        (RunName("prod", "llam"), {}, False),
        (RunName("pro", "llama"), {}, False),
        (RUN, {"detail": {}, "permissions": []}, False),
        (Namespace("prod"), {}, True),
        (Namespace("prod"), {"detail": {}}, True),
        (Namespace("prod"), {"permissions": []}, True),
        (Namespace("pro"), {}, False),
    ],
    ids=range(15),
)
def test_a_filter_by_resource_matches_what_is_about_it(
    resource: Resource, values: dict[str, Any], expected: bool
) -> None:
    assert expected == AuditFilter(resource=resource).matches(entry_of(**values))


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (AuditFilter(), True),
        (AuditFilter(principal="user:a", method="DeleteCheckpoint"), True),
        (AuditFilter(principal="user:b", method="DeleteCheckpoint"), False),
        (AuditFilter(principal="user:a", method="SetTag"), False),
        (AuditFilter(stage=Stage.ENDED), True),
        (AuditFilter(stage=Stage.DENIED), False),
        (AuditFilter(authentication=Authentication.TOKEN), True),
        (AuditFilter(authentication=Authentication.ANONYMOUS), False),
        (AuditFilter(start_ns=TIME_NS, end_ns=TIME_NS + 1), True),
        (AuditFilter(start_ns=TIME_NS + 1), False),
        (AuditFilter(end_ns=TIME_NS), False),
    ],
    ids=range(11),
)
def test_a_filter_matches_all_fields(wanted: AuditFilter, expected: bool) -> None:
    assert expected == wanted.matches(entry_of())


def searched(wanted: AuditFilter, *lines: bytes) -> PageSearch:
    """Searches lines, the newest first."""
    search, at = PageSearch(wanted, 100), 10**6
    for text in lines:
        if not search.add(Line(start=at - len(text), end=at, data=text)):
            break
        at -= len(text) + 1
    return search


def at_minute(minute: int) -> bytes:
    """Returns the line of an entry of a minute, which is its number."""
    return line_of(time=f"2026-11-24T07:{minute:02}:00.000000000Z", seq=minute)


SINCE = AuditFilter(start_ns=TIME_NS - 15 * 60 * 10**9)  # 07:40:00.123


def test_a_search_ends_after_many_entries_long_before_the_earliest_time() -> None:
    old = [at_minute(29)] * OLD_IN_A_ROW
    search = searched(SINCE, at_minute(41), *old, at_minute(42))

    assert [41] == [row.seq for row in search.rows if isinstance(row, Entry)]
    assert search.is_over


@pytest.mark.parametrize("minute", [29, 31])
def test_a_search_goes_on_past_entries_of_a_clock_that_was_wrong(minute: int) -> None:
    wrong = [at_minute(minute)] * (OLD_IN_A_ROW - 1)
    search = searched(SINCE, *wrong, at_minute(39), *wrong, at_minute(42))

    assert [42] == [row.seq for row in search.rows if isinstance(row, Entry)]
    assert not search.is_over


def test_lines_that_are_no_entries_match_every_filter() -> None:
    search = searched(AuditFilter(principal="user:b"), line_of(), b"x", line_of())

    (row,) = search.rows
    assert isinstance(row, Unreadable)
    assert "1 bytes at byte" in row.problem
    assert "storectl audit verify" in row.problem


def test_a_line_that_was_cut_off_is_known_by_the_entry_after_it() -> None:
    search = searched(AuditFilter(), line_of(torn=True), b'{"seq":', b'{"seq":')

    first, second, third = search.rows
    assert isinstance(first, Entry)
    assert first.follows_torn_line
    assert isinstance(second, Unreadable)
    assert isinstance(third, Unreadable)
    assert "cut off, as by a crash" in second.problem
    assert "cut off" not in third.problem
