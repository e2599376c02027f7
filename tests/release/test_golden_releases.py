"""Each later release works on the store that a release wrote: reads all of it, verifies
it, saves onto it in its format, and collects it.

The folders are written by ``python -m tests.release.golden``, one a release.
"""

import json
import re
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from storesvc.format import layout
from storesvc.format.seal import FORMAT_VERSION, OLDEST_VERSION, OLDEST_WRITTEN
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.format.test_golden import sealed_places, version_of
from tests.release.artefacts import ROOT, release_version
from tests.release.golden import JOINT, RELEASES, RUN, describe
from tests.support import stored_records
from tests.support.audited import Audited
from tests.support.command_line import printed, succeed, table

FOLDERS = sorted(RELEASES.iterdir())


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the folder of a release."""
    return Path(shutil.copytree(request.param, tmp_path / "golden"))


def expected_values(golden: Path) -> Any:
    """Returns what must be read from the store of a release."""
    return json.loads((golden / "expected.json").read_text())


def read_steps(run: store.Run) -> dict[str, dict[str, str]]:
    """Restores and verifies all checkpoints."""
    assert all(run.verify(step).ok for step in run.steps())
    return {str(step): describe(run.restore(step)) for step in run.steps()}


def read_items(run: store.Run) -> dict[str, str]:
    """Returns the items of the joint save."""
    found = run.items(JOINT)
    items = {name: found[name] for name in found if name != "data"}
    return describe(items | {"data": found.per_process("data")})


def test_all_that_a_release_recorded_is_read(golden: Path) -> None:
    expected = expected_values(golden)
    with store.connect((golden / "store").as_uri()) as client:
        run = client.run(RUN)
        policy = run.retention.get()
        assert policy is not None
        found = [run.checkpoint(step) for step in run.steps()]
        deleted = run.checkpoints(deleted=True)
        read = {
            "format": client.upgrade(dry_run=True)[0],
            "steps": read_steps(run),
            "items": read_items(run),
            "metrics": {str(each.step): dict(each.metrics) for each in found},
            "labels": {str(each.step): dict(each.labels) for each in found},
            "pinned": [each.step for each in found if each.pinned],
            "deleted": [each.step for each in deleted],
            "tags": {tag.name: tag.step for tag in run.tags.list()},
            "holds": {hold.owner: hold.step for hold in run.holds.list()},
            "uploads": [upload.step for upload in run.uploads.list()],
            "policy": store.format_policy(policy),
        }

    assert expected | read == expected


def test_a_release_is_saved_onto_in_its_format_and_collected(golden: Path) -> None:
    root, expected = golden / "store", expected_values(golden)
    with store.connect(root.as_uri()) as client:
        if expected["format"] < OLDEST_WRITTEN:
            client.upgrade(OLDEST_WRITTEN)
        run = client.run(RUN)
        before = run.restore(2)
        run.save(100, before | {"new": np.arange(5)}, base=2).result()
        run.tags.set("new", 100)
        list(client.collect(grace=timedelta(0)))
        written = max(version_of(root / place) for place in sealed_places(root))
        assert max(expected["format"], OLDEST_WRITTEN) == written
        client.upgrade()
        run.save(101, before).result()
        list(client.collect(grace=timedelta(0)))
        steps = read_steps(run)
        deleted = [each.step for each in run.checkpoints(deleted=True)]

    assert expected["deleted"][0] not in deleted  # it was due
    assert describe(before | {"new": np.arange(5)}) == steps.pop("100")
    assert expected["steps"]["2"] == steps.pop("101")
    assert expected["steps"] == steps
    assert (
        FORMAT_VERSION
        == stored_records.read(root, layout.STORE, pb.StoreRecord).format_version
    )


def test_storectl_lists_the_checkpoints_of_a_release(golden: Path) -> None:
    _, *rows = table(printed(str(golden / "store"), "ls", RUN))

    assert sorted(expected_values(golden)["steps"]) == sorted(row[0] for row in rows)


@pytest.mark.slow
def test_the_audit_log_of_a_release_is_verified_and_continued(golden: Path) -> None:
    log, expected = golden / "audit.log", expected_values(golden)
    assert expected["audit_entries"] == len(log.read_bytes().splitlines())
    succeed("audit", "verify", str(log))
    audited = Audited(golden, log)
    try:
        with store.connect(audited.server.address) as client:
            client.run(RUN).tags.set("new", 1)
    finally:
        audited.server.stop()

    assert ("ended", "SetTag") in audited.calls()[expected["audit_entries"] - 2 :]
    succeed("audit", "verify", str(log))


def test_each_release_has_a_golden_store() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d[^]]*)\]", text, re.MULTILINE)

    assert sorted(released) == [folder.name for folder in FOLDERS]


def test_golden_stores_are_small() -> None:
    for folder in FOLDERS:
        files = (path for path in folder.rglob("*") if path.is_file())
        assert sum(path.stat().st_size for path in files) < 1_000_000


def test_the_table_of_versions_has_the_formats_of_this_release() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs" / "compatibility.md").read_text().splitlines()
        if re.match(r"\| \d+\.\d+\.\d+ \|", line)
    ]
    major, minor, _ = release_version().split(".")
    neighbours = [f"{major}.{int(minor) + by}" for by in (-1, 0, 1)]

    def list_versions(first: int) -> str:
        return ", ".join(map(str, range(first, FORMAT_VERSION + 1)))

    assert release_version() == rows[-1][0]
    assert set(neighbours) >= set(rows[-1][1].split(", ")) >= set(neighbours[1:])
    assert [
        list_versions(OLDEST_VERSION),
        list_versions(OLDEST_WRITTEN),
        str(FORMAT_VERSION),
    ] == rows[-1][2:]
    assert {folder.name for folder in FOLDERS} <= {row[0] for row in rows}
