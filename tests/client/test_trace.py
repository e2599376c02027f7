"""The timeline of a save, kept with its checkpoint."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import storesvc_client as store
from storesvc_client._telemetry.reports import PhaseSpan, timeline_text, trace_text
from tests.support.command_line import storectl
from tests.support.sessions import restore_report


def spans(*rows: tuple[str, float, float]) -> tuple[PhaseSpan, ...]:
    return tuple(
        PhaseSpan(name=n, start_seconds=s, end_seconds=e, busy_seconds=e - s)
        for n, s, e in rows
    )


def test_a_checkpoint_keeps_the_timeline_of_its_save(run: store.Run) -> None:
    report = run.save(3, {"x": np.ones(1 << 18, np.float32)}).report()

    trace = run.trace(3)

    assert (trace.run, trace.step) == (run.name, 3)
    assert trace.upload == report.upload == run.checkpoint(3).uid
    (writer,) = trace.writers
    assert writer.owner.startswith("host ")
    assert (writer.total_bytes, writer.sent_bytes) == (
        report.total_bytes,
        report.sent_bytes,
    )
    assert writer.start_time == report.start_time
    assert 0 < writer.seconds <= report.seconds
    # what came after its call of FinishWriter is not in it
    kept = [span.name for span in writer.timeline]
    assert kept == [span.name for span in report.timeline if span.name in kept]
    assert {"plan", "snapshot", "begin", "digest"} <= {*kept}
    assert not {"finish", "commit"} & {*kept}


def test_the_timeline_of_a_report_has_its_timings(run: store.Run) -> None:
    report = run.save(0, {"x": np.ones(1 << 16, np.float32)}).report()

    for found in (report, restore_report(run)):
        assert {s.name: s.busy_seconds for s in found.timeline} == found.timings
        starts = [s.start_seconds for s in found.timeline]
        assert starts == sorted(starts)
        assert all(
            0 <= s.start_seconds <= s.end_seconds <= found.seconds
            for s in found.timeline
        )
        assert found.timeline[0].name in found.timeline_text()


def test_storectl_trace_prints_it(run: store.Run, server_address: str) -> None:
    run.save(7, {"x": np.ones(9)}).result()

    shown = storectl(server_address, "trace", f"{run.name}@latest").stdout
    found = json.loads(
        storectl(server_address, "trace", f"{run.name}@7", "--json").stdout
    )

    assert shown.startswith(f"{run.name}@7: committed ")
    assert f"trace {run.checkpoint(7).uid}" in shown
    assert "process 0 (host " in shown
    assert "\nplan " in shown
    assert [one["writer"] for one in found["writers"]] == [0]
    assert found["upload"] == run.checkpoint(7).uid


def test_bars_share_one_axis() -> None:
    text = timeline_text(spans(("plan", 0, 1), ("write", 1, 4)), 4.0, width=60)

    header, plan, write = text.splitlines()
    assert header.endswith("4.000 s")
    assert len(header) == 60
    assert plan.count("#") * 3 == pytest.approx(write.count("#"), abs=3)
    assert write.index("#") == plan.rindex("#") + 1
    assert len(write) == 60


@pytest.mark.parametrize("width", [0, 20, 41, 60, 200])
@pytest.mark.parametrize(
    "rows",
    [
        spans(),
        spans(("plan", 0, 0)),
        spans(("await previous", 0, 1e6), ("place", 1e-9, 2e-9)),
    ],
)
def test_any_timeline_fits_any_width(rows: tuple[PhaseSpan, ...], width: int) -> None:
    seconds = max((row.end_seconds for row in rows), default=0.0)

    lines = timeline_text(rows, seconds, width=width).splitlines()

    assert len(lines) == len(rows) + 1
    assert max(map(len, lines)) <= max(width, 60)


def test_the_owner_of_a_hostile_client_is_printable(run: store.Run) -> None:
    run.save(1, {"x": [1.0]}).result()
    trace = run.trace(1)
    hostile = dataclasses.replace(trace.writers[0], owner="\x1b[31mred\n")

    text = trace_text(dataclasses.replace(trace, writers=(hostile,)))

    assert "\x1b" not in text
    assert len(text.splitlines()) == len(str(trace).splitlines())


def test_checkpoints_of_earlier_releases_have_none() -> None:
    golden = Path(__file__).parents[1] / "golden" / "v1"
    (root,) = [p for p in (golden, golden / "store") if (p / "store.binpb").exists()]
    with store.connect(root.as_uri()) as client:
        (first, *_) = client.runs()
        trace = client.run(first.name).trace("latest")

    assert trace.writers == ()
    assert "kept no timeline" in str(trace)
