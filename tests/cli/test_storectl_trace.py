"""storectl trace: timelines of saves, and of reports in files."""

from pathlib import Path

import numpy as np
import pytest

import storesvc_client as store
from tests.support.command_line import document, printed, refusal, storectl

NOWHERE = "127.0.0.1:1"
"""Address without a server."""


@pytest.fixture(scope="module")
def reports() -> tuple[store.SaveReport, store.RestoreReport]:
    with store.connect("memory://") as client:
        run = client.run("tests/traced")
        saved = run.save(3, {"x": np.arange(9.0)}).report()
        with run.loop(every=store.Steps(1)) as loop:
            loop.restore_or({"x": np.zeros(9)})
    assert loop.restored is not None
    assert loop.restored.report is not None
    return saved, loop.restored.report


def test_the_report_of_a_restore_is_drawn_without_a_server(
    tmp_path: Path, reports: tuple[store.SaveReport, store.RestoreReport]
) -> None:
    report = reports[1]
    file = tmp_path / "restore.json"
    file.write_text(report.to_json())
    first, *rest = printed(NOWHERE, "trace", "--report", str(file)).splitlines()

    assert first.startswith("restore of tests/traced@3, ")
    assert first.endswith(f": {report.seconds:.3f} s")
    assert "76 B read, 0 B received from other processes, 72 B returned" in rest
    phases = [line.split("  ")[0].strip() for line in rest[rest.index("") + 2 :]]
    assert phases == [span.name for span in report.timeline]


def test_the_report_of_a_save_is_drawn_without_a_server(
    tmp_path: Path, reports: tuple[store.SaveReport, store.RestoreReport]
) -> None:
    file = tmp_path / "save.json"
    file.write_text(reports[0].to_json())
    text = printed(NOWHERE, "trace", "--report", str(file))

    assert text.startswith("save of tests/traced@3, ")
    assert f"trace {reports[0].upload}\n" in text
    assert "commit" in text


def test_the_document_of_a_report_is_the_file(
    tmp_path: Path, reports: tuple[store.SaveReport, store.RestoreReport]
) -> None:
    file = tmp_path / "restore.json"
    file.write_text(reports[1].to_json())
    found = document(NOWHERE, "trace", "--report", str(file))

    assert "restore" == found["report"]
    assert reports[1].seconds == found["seconds"]


def test_hostile_names_are_escaped(
    tmp_path: Path, reports: tuple[store.SaveReport, store.RestoreReport]
) -> None:
    file = tmp_path / "restore.json"
    text = reports[1].to_json()
    file.write_text(text.replace('"rebuild"', '"\\u001b[2J"').replace("traced", "\\r"))
    shown = printed(NOWHERE, "trace", "--report", str(file))

    assert "\\x1b[2J" in shown
    assert "tests/\\r@3" in shown
    assert shown.replace("\n", "").isprintable()


def test_a_file_that_is_no_report_is_rejected_with_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text('{"report": "restore"}')
    shown = refusal(NOWHERE, "trace", "--report", str(file))

    assert f"report {file}: run: expected a text of at most 4096 characters" in shown
    assert "pass a file that a job has written with report.to_json()" in shown
    large = refusal(NOWHERE, "trace", "--report", "/dev/zero")
    assert "report /dev/zero: expected a report of at most 1,048,576 bytes" in large


def test_a_checkpoint_or_a_report_is_needed(tmp_path: Path) -> None:
    file = tmp_path / "restore.json"
    file.touch()

    neither = storectl(NOWHERE, "trace")
    both = storectl(NOWHERE, "trace", "a/b@1", "--report", str(file))
    assert (2, 2) == (neither.exit_code, both.exit_code)
    assert "got neither" in neither.stderr
    assert "got both; omit one of them" in both.stderr


def test_a_file_that_is_absent_is_named(tmp_path: Path) -> None:
    file = tmp_path / "none.json"
    assert (
        f"report {file}: cannot be read: No such file or directory; correct the path"
        == refusal(NOWHERE, "trace", "--report", str(file))
    )
