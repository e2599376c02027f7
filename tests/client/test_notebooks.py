"""Notebooks show runs, checkpoints, trees, diffs, reports and lists as tables."""

import dataclasses
import itertools
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import storesvc_client as store
from storesvc_client._rpc import retry
from storesvc_client._telemetry import progress
from storesvc_client._views.notebook import (
    MAX_ROWS,
    Listing,
    heading,
    note,
    restore_report_html,
    save_report_html,
    table,
    verification_html,
)
from storesvc_client._views.tables import Column, Shrink
from storesvc_client._views.texts import printable
from tests.support.in_process_server import InProcessServer
from tests.support.sessions import restore_report

HOSTILE = "<script>alert('1')</script>\u202e&\"\x07"
TREE = {"params": {"w": np.ones((4, 4), np.float32), "b": np.zeros(4)}, "step": 7}
TAGS = {"table", "caption", "thead", "tbody", "tr", "th", "td", "div", "strong"}


class _Checked(HTMLParser):
    """Checks that HTML has tables only: no script, no link, no colour."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS, tag
        for name, value in attrs:
            assert name in {"style", "colspan"}, name
            if name == "style":
                rules = dict(rule.split(":", 1) for rule in (value or "").split(";"))
                assert rules.get("color", "inherit") == "inherit"
                assert not any("background" in rule for rule in rules)


def shown(value: Any) -> ET.Element:
    """Returns the parsed HTML of a value, which must be well formed."""
    html = value._repr_html_()
    checked = _Checked()
    checked.feed(html)
    checked.close()
    return ET.fromstring(f"<div>{html}</div>")


def words(value: Any) -> str:
    """Returns the text of a value's HTML, with a blank between cells."""
    return " ".join(text for text in shown(value).itertext() if text)


def rows(value: Any) -> list[list[str]]:
    """Returns the cells of all rows of a value's tables, headers included."""
    return [
        ["".join(cell.itertext()) for cell in row] for row in shown(value).iter("tr")
    ]


def test_a_checkpoint_shows_its_fields(run: store.Run) -> None:
    found = run.save(3, TREE, metrics={"loss": 0.5}, labels={"by": "me"}).result()

    fields = dict(rows(found))
    assert f"{run.name}@3" in words(found)
    assert ("3", "loss=0.5", "by=me", "no") == tuple(
        fields[name] for name in ("leaves", "metrics", "labels", "pinned")
    )
    assert "104 B" == fields["size"]
    assert "deleted" not in fields

    run.update(3, pinned=True)
    assert "yes" == dict(rows(run.checkpoint(3)))["pinned"]
    run.update(3, pinned=False)
    deleted = dict(rows(run.delete(3)))
    assert {"deleted", "can be undeleted until"} <= deleted.keys()


def test_an_open_checkpoint_shows_its_tree(run: store.Run) -> None:
    run.save(1, TREE | {"key": jax.random.key(1)}).result()
    opened = run.open()

    drawn = rows(opened)
    assert f"{run.name}@1  4 leaves, 112 B" in words(opened)
    assert ["├── key", "key<threefry2x32>[]", "8 B"] in drawn
    assert ["│   └── w", "float32[4,4]", "64 B"] in drawn
    assert ["└── step", "int64[]", "8 B"] in drawn


def test_leaves_show_as_a_table_and_are_a_mapping(run: store.Run) -> None:
    run.save(1, TREE).result()
    leaves = run.open().leaves

    assert ["params/b", "params/w", "step"] == list(leaves)
    assert "<3 leaves, 104 B>" == repr(leaves)
    assert ["KEY", "DTYPE", "SHAPE", "SIZE", "CHUNKS"] == rows(leaves)[0]
    assert ["params/w", "float32", "[4,4]", "64 B", "1"] in rows(leaves)
    assert dict(leaves) == leaves


@pytest.mark.slow
def test_a_run_shows_its_newest_checkpoints(run: store.Run) -> None:
    assert f"run {run.name}" in words(run)  # there is no such run yet

    for step in range(10):
        run.save(step, TREE).result()
    assert [*"9876543210"] == [row[0] for row in rows(run)[1:]]
    run.save(10, TREE).result()

    found = rows(run)
    assert ["10", *"987654321"] == [row[0] for row in found[1:-1]]
    assert ["older ones: run.checkpoints()"] == found[-1]
    for step in range(11):
        run.delete(step)
    assert words(run).endswith("no checkpoints")


@pytest.mark.slow
def test_a_run_whose_server_is_away_shows_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "PATIENCE_SECONDS", 0.2)
    server = InProcessServer(tmp_path / "store")
    try:
        client = store.connect(server.address, timeout=1)
    finally:
        server.close()
    run = client.run("tests/away")

    assert words(run).startswith(f"tests/away in {server.address} ")
    assert server.address in words(run).partition(server.address)[2]
    client.close()


def test_a_diff_shows_the_leaves_that_differ(run: store.Run) -> None:
    run.save(1, TREE | {"gone": 1.0}).result()
    other = TREE | {"step": 8, "new": np.ones(2)}
    run.save(2, other).result()
    found = run.diff(1, 2)

    assert f"<Diff {run.name}@1 to {run.name}@2, 3 differences>" == repr(found)
    assert "1 added, 1 content, 1 removed, 2 leaves the same" in words(found)
    assert ["new", "added", "-", "float64[2]", "1"] in rows(found)
    assert ["gone", "removed", "float64[]", "-", "1"] in rows(found)
    assert ["step", "content", "int64[]", "same", "1 of 1"] in rows(found)
    same = run.diff(2, 2)
    assert [] == rows(same)
    assert "4 leaves the same" in words(same)


def test_items_show_next_to_the_tree_and_in_a_diff(run: store.Run) -> None:
    items = {"config": {"layers": 2}, "notes": HOSTILE, "gone": b""}
    run.save(1, TREE, items=items).result()
    own = store.PerProcess({"at": 7})
    later = run.save(2, TREE, items={"config": {"layers": 3}, "data": own}).result()
    found, diff = run.items(1), run.diff(1, 2)

    assert "2" == dict(rows(later))["items"]
    expected = [
        ["ITEM", "KIND", "SIZE"],
        ["config", "json", "12 B"],
        ["gone", "bytes", "0 B"],
        ["notes", "text", f"{len(HOSTILE.encode())} B"],
    ]
    assert expected == rows(found)
    assert expected == rows(run.open(1))[-len(expected) :]
    assert ["data", "1 x json", "8 B"] in rows(run.items(2))
    assert f"items of {run.name}@1 3 items" in words(found)

    assert f"<Diff {run.name}@1 to {run.name}@2, 0 differences, 4 items changed>" == (
        repr(diff)
    )
    assert "<ItemDifference added data/0>" == repr(diff.items[1])
    assert "3 leaves the same items: 1 added, 1 content, 2 removed" in words(diff)
    assert [
        ["ITEM", "WHAT", "BEFORE", "AFTER"],
        ["config", "content", "json, 12 B", "json, 12 B"],
        ["data/0", "added", "-", "json, 8 B"],
        ["gone", "removed", "bytes, 0 B", "-"],
        ["notes", "removed", expected[3][1] + ", " + expected[3][2], "-"],
    ] == rows(diff)

    run.save(3, TREE).result()
    assert "no items" in words(run.items(3))


def test_a_restore_that_stepped_back_shows_the_damage(run: store.Run) -> None:
    run.save(1, TREE).result()
    report = dataclasses.replace(restore_report(run), damaged={2: HOSTILE})

    assert ["damaged step 2", printable(HOSTILE)] in rows(report)


def test_reports_show_bytes_and_phases(run: store.Run) -> None:
    report = run.save(1, TREE).report()
    restored = restore_report(run)

    assert repr(report).startswith(f"<SaveReport {run.name}@1, 116 B sent, 0 B reused")
    assert repr(restored).startswith(
        f"<RestoreReport {run.name}@1, 116 B read, 104 B returned, "
    )
    for value, what in ((report, "save"), (restored, "restore")):
        found = rows(value)
        assert f"{what} of {run.name}@1" in words(value)
        assert ["PHASE", "SECONDS"] in found
        at = found.index(["PHASE", "SECONDS"])
        assert {*value.timings} == {name for name, _ in found[at + 1 :]}
        seconds = [float(took) for _, took in found[at + 1 :]]
        assert sorted(seconds, reverse=True) == seconds


def test_reports_of_a_job_name_the_slowest_process(run: store.Run) -> None:
    report = dataclasses.replace(
        run.save(1, TREE).report(),
        last_process="process 2 (host-2)",
        needs_like=("opt: AdamState",),
        slowest="",
    )
    slowest = store.ProcessReading(
        process="process 3 (<b>)",
        read_bytes=1,
        seconds=2.5,
        slowest="",
        slowest_seconds=0,
    )
    restored = dataclasses.replace(
        restore_report(run), slowest_process=slowest, slowest=""
    )

    html = save_report_html(report)
    assert "process 2 (host-2)" in html
    assert "opt: AdamState" in html
    assert "process 3 (&lt;b&gt;), 2.5 s" in restore_report_html(restored)


def test_a_verification_shows_the_damage(run: store.Run) -> None:
    run.save(1, TREE).result()
    found = run.verify()
    assert f"<Verification {run.name}@1, 3 chunks, no damage>" == repr(found)
    assert "3 chunks, 116 B: no damage" in words(found)

    damage = store.Damage(key="", index=(0, 1), kind="checksum", message=HOSTILE)
    damaged = dataclasses.replace(found, damages=(damage,))
    assert "1 damage>" in repr(damaged)
    assert ["''", "[0,1]", "checksum"] == rows(damaged)[1][:3]
    assert "<script>" not in verification_html(damaged)


def test_lists_show_as_tables_and_yield_all_their_rows(
    client: store.Client, run: store.Run
) -> None:
    for step in range(3):
        run.save(step, TREE, labels={"n": str(step)}).result()
    run.tags.set("best", 1)
    hold = run.holds.create(2, owner="tests")

    checkpoints = run.checkpoints()
    assert isinstance(checkpoints, Iterator)
    assert "<iterator over checkpoints>" == repr(checkpoints)
    assert 2 == next(checkpoints).step
    assert ["1", "0"] == [row[0] for row in rows(checkpoints)[1:]]
    assert rows(checkpoints) == rows(checkpoints)
    assert [1, 0] == [found.step for found in checkpoints]
    assert "no checkpoints" in words(checkpoints)

    assert [run.name, "2"] in [row[:2] for row in rows(client.runs("tests"))]
    tag = rows(run.tags.list())[1]
    assert ["best", "1", "no"] == [*tag[:2], tag[3]]
    assert ["2", "tests"] == rows(run.holds.list())[1][1:3]
    assert "no uploads" in words(run.uploads.list())
    assert "no uploads" in words(client.uploads(run.name))
    decisions = run.retention.preview(store.KeepLatest(1))
    assert isinstance(decisions, list)
    assert [["2", "yes"], ["1", "yes"], ["0", "no"]] == [
        row[:2] for row in rows(decisions)[1:]
    ]
    assert "tagged" in rows(decisions)[2][2]
    hold.close()


def test_live_uploads_show_as_a_table(
    run: store.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "INTERVAL_SECONDS", 0.0)  # for the first chunk
    begun, goes_on = threading.Event(), threading.Event()

    def hold(_: store.Progress) -> None:
        begun.set()
        goes_on.wait(60)

    tree = {"x": np.ones(1 << 18)}  # a small save is one call, after it was copied
    save = run.save(4, tree, progress=hold)
    assert begun.wait(60)
    found = rows(run.uploads.list())
    goes_on.set()
    save.result()

    assert [run.name, "4", "0 of 1"] == [found[1][at] for at in (0, 2, 5)]


def test_an_error_in_a_list_is_shown_and_raised_in_its_place(run: store.Run) -> None:
    saved = run.save(1, TREE).result()

    def broken() -> Iterator[store.Checkpoint]:
        yield saved
        raise store.DataLossError("the record of step 0 is damaged <b>")

    found = Listing("checkpoint", broken())
    assert "the list ends here: the record of step 0 is damaged <b>" in words(found)
    assert saved == next(found)
    with pytest.raises(store.DataLossError, match="step 0"):
        next(found)
    assert [] == list(found)


def test_a_list_of_nothing_shows_why(client: store.Client) -> None:
    tags = client.run("tests/nowhere").tags.list()

    assert "no tags" in words(tags)
    assert "the list ends here: run tests/nowhere" in words(tags)
    with pytest.raises(store.NotFoundError, match="tests/nowhere"):
        next(tags)


def test_ten_thousand_checkpoints_show_fifty_and_a_count(run: store.Run) -> None:
    saved = run.save(0, TREE).result()
    many = (dataclasses.replace(saved, step=step) for step in range(10_000))
    found = Listing("checkpoint", many)

    html = found._repr_html_()
    assert len(html) < 60_000
    cells = rows(found)
    assert "10,000 checkpoints" in words(found)
    assert [str(step) for step in range(MAX_ROWS)] == [row[0] for row in cells[1:-1]]
    assert ["and 9,950 more checkpoints"] == cells[-1]
    assert [0, 1] == [one.step for one in itertools.islice(found, 2)]


def test_a_tree_of_many_leaves_shows_fifty_lines(run: store.Run) -> None:
    run.save(1, {f"leaf-{n}x": np.full(n + 1, 1) for n in range(60)}).result()
    opened = run.open()

    assert ["and 10 more lines"] == rows(opened)[-1]
    assert ["and 10 more leaves"] == rows(opened.leaves)[-1]
    assert 60 == len(opened.leaves)


def test_hostile_texts_are_shown_as_text(client: store.Client, run: store.Run) -> None:
    key = f"k{HOSTILE}"
    run.save(1, {key: np.ones(1)}, labels={"note": HOSTILE}).result()
    run.configure(labels={"note": HOSTILE})
    run.save(2, {key: np.zeros(1)}, labels={"note": HOSTILE}).result()
    opened = run.open()
    run.holds.create(1, owner="<img src=x onerror=alert(1)>").close()

    values: list[Any] = [
        *(run, run.latest(), opened, opened.leaves, run.diff(1, 2)),
        *(run.checkpoints(), client.runs(), run.holds.list()),
    ]
    for value in values:
        html: str = value._repr_html_()
        assert "<script" not in html
        assert "<img" not in html
        assert "\u202e" not in html
        assert "\x07" not in html
        shown(value)
    assert "<script>alert(" in words(run.latest())
    assert "\\u202e" in words(run.latest())


@given(st.text(), st.text(), st.text())
def test_any_text_is_well_formed(title: str, cell: str, below: str) -> None:
    columns = (Column(title), Column("", right=True, shrink=Shrink.DRAWING))
    html = table(columns, [(cell, below)], caption=below, omitted=cell)

    found = ET.fromstring(f"<div>{heading(title)}{note(cell)}{html}</div>")
    assert 1 == len(found.findall("table"))


def test_values_have_short_texts(run: store.Run) -> None:
    run.save(1, TREE).result()
    run.save(2, TREE | {"step": 9}).result()
    hold = run.holds.create(1)
    event = next(run.watch("latest"))
    (change,) = run.diff(1, 2).differences
    damage = store.Damage(key="a", index=(), kind="missing", message="a is missing")
    decision = run.retention.preview(store.KeepLatest(1))[1]

    assert "<Tag best at step 1, protected>" == repr(
        run.tags.set("best", 1, protected=True)
    )
    (info,) = run.holds.list()
    assert repr(info).startswith(f"<HoldInfo {info.id} on step 1 until 2")
    assert f"<Event committed {run.name}@2>" == repr(event)
    assert "<LeafDifference content step>" == repr(change)
    assert "<Damage missing: a is missing>" == repr(damage)
    assert "<RetentionDecision step 1 deleted>" == repr(decision)
    hold.close()


def test_metrics_and_tags_are_columns_with_losses_first(run: store.Run) -> None:
    run.save(1, TREE, metrics={"accuracy": 0.5, "train/loss": 2.5}).result()
    run.save(2, TREE, metrics={"train/loss": 2.25}).result()
    run.tags.set("best", 2)
    run.update(1, pinned=True)

    header, newest, oldest = rows(run)

    assert ["TAGS", "train/loss", "accuracy", "LABELS", "STATE"] == header[4:]
    assert ["best", "2.25", "-", "-", ""] == newest[4:]
    assert ["", "2.5", "0.5", "-", "pinned"] == oldest[4:]
    assert header[:4] + header[5:] == rows(run.checkpoints())[0]


def test_a_trace_shows_its_processes(run: store.Run) -> None:
    run.save(1, TREE).result()

    header, row = rows(run.trace(1))

    assert ["PROCESS", "HOST", "SECONDS", "SENT", "LONGEST PHASE"] == header
    assert "0" == row[0]
    assert row[4].endswith(" s")


def test_statistics_of_a_leaf_show_their_numbers(run: store.Run) -> None:
    run.save(1, {"w": np.arange(4.0)}).result()

    found = dict(rows(run.open(1).statistics("w")))

    assert ("0", "3", "1.5", "1") == (
        found["minimum"],
        found["maximum"],
        found["mean"],
        found["zero"],
    )


def test_a_diff_is_in_the_order_of_numbers(run: store.Run) -> None:
    run.save(1, [np.zeros(1)] * 12).result()
    run.save(2, [np.ones(1)] * 12).result()

    assert [str(n) for n in range(12)] == [row[0] for row in rows(run.diff(1, 2))[1:]]
