"""Reports as JSON: what a job writes is read again, and nothing else is."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import storesvc_client as store
from storesvc_client._telemetry.reports import (
    MAX_REPORT_BYTES,
    parse_report,
    report_text,
)
from tests.support.sessions import restore_report


@pytest.fixture(scope="module")
def reports() -> tuple[store.SaveReport, store.RestoreReport]:
    with store.connect("memory://") as client:
        run = client.run("tests/reports")
        saved = run.save(3, {"x": np.arange(9.0)}).report()
        return saved, restore_report(run)


def test_a_report_that_was_written_is_read_again(
    reports: tuple[store.SaveReport, store.RestoreReport],
) -> None:
    saved, restored = reports

    assert saved == store.SaveReport.from_json(saved.to_json())
    assert restored == store.RestoreReport.from_json(restored.to_json().encode())
    assert restored == parse_report(restored.to_json())


def test_a_report_of_the_other_kind_is_rejected(
    reports: tuple[store.SaveReport, store.RestoreReport],
) -> None:
    saved, restored = reports

    with pytest.raises(store.InvalidRequestError, match=r"SaveReport\.from_json"):
        store.RestoreReport.from_json(saved.to_json())
    with pytest.raises(store.InvalidRequestError, match=r"RestoreReport\.from_json"):
        store.SaveReport.from_json(restored.to_json())


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("report", "gc", "expected 'save' or 'restore', got 'gc'"),
        ("seconds", -1, "seconds: expected seconds, 0 to 1e"),
        ("seconds", math.nan, "expected seconds, 0 to 1e"),
        ("seconds", math.inf, "expected seconds, 0 to 1e"),
        ("seconds", 10**400, "expected seconds, 0 to 1e"),
        ("seconds", True, "expected seconds, 0 to 1e"),
        ("read_bytes", 1.5, "read_bytes: expected a whole number"),
        ("read_bytes", 1 << 70, "read_bytes: expected a whole number"),
        ("step", None, "step: expected a whole number, at least 0, got None"),
        ("run", 7, "run: expected a text of at most"),
        ("run", "x" * 5000, "run: expected a text of at most"),
        ("start_time", "soon", "start_time: expected a time with its time zone"),
        ("start_time", "2026-01-01T00:00:00", "expected a time with its time zone"),
        ("start_time", "0001-01-01T00:00:00+23:00", "expected a time with its"),
        ("timeline", {}, "timeline: expected a list"),
        ("timeline", [7], "timeline: expected an object, got 7"),
        ("timeline", [{}] * 2000, "timeline: expected a list of at most"),
        ("timings", {"plan": "\x1b[31m"}, r"got '\\x1b\[31m'"),
        ("damaged", {"-1": ""}, "damaged: expected steps, got '-1'"),
        ("is_verified", "yes", "is_verified: expected true or false, got 'yes'"),
    ],
)
def test_a_damaged_field_is_named(
    reports: tuple[store.SaveReport, store.RestoreReport],
    field: str,
    value: Any,
    expected: str,
) -> None:
    text = json.dumps(json.loads(reports[1].to_json()) | {field: value})

    with pytest.raises(store.InvalidRequestError, match=expected) as error:
        parse_report(text, "report r.json")
    assert str(error.value).startswith("report r.json: ")
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        "[]",
        "7",
        b"\xff\xfe\xfd",
        "{}",
        " " * (MAX_REPORT_BYTES + 1),
        "9" * 5000,
    ],
)
def test_a_text_of_another_kind_is_rejected(text: str | bytes) -> None:
    with pytest.raises(store.InvalidRequestError, match="expected"):
        parse_report(text)


@given(
    field=st.sampled_from(["timeline", "timings", "seconds", "slowest_process", "run"]),
    value=st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["name", "seconds", "plan"]), inner)
        ),
        max_leaves=5,
    ),
)
def test_any_report_is_drawn_or_rejected(
    reports: tuple[store.SaveReport, store.RestoreReport], field: str, value: Any
) -> None:
    text = json.dumps(json.loads(reports[1].to_json()) | {field: value})
    try:
        found = parse_report(text)
    except store.InvalidRequestError as e:
        assert str(e).isprintable()
        return
    drawn = report_text(found)
    assert drawn.replace("\n", "").isprintable()
