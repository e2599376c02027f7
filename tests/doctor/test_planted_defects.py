"""Each defect of a storage is named; places without one raise no alarm."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc_client._doctor.findings import Diagnosis, Finding, Severity
from tests.doctor.examined import examine
from tests.doctor.planted import (
    Cache,
    Clock,
    FoldedNames,
    PlantedGcs,
    Settings,
    ShiftedRanges,
)
from tests.fake_gcs.faults import ALWAYS, Corrupt, Delay, Status, Truncate
from tests.fake_s3 import FakeS3
from tests.support.examples import sampled
from tests.support.other_emulators import CONDITIONS

Planted = AbstractContextManager[str]


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORSTORE_GCS_HTTP_URL", raising=False)
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "any")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")


@contextmanager
def planted(
    *faults: tuple[str, Any], times: int = ALWAYS, **options: Any
) -> Iterator[str]:
    with PlantedGcs(**options) as gcs:
        for pattern, fault in faults:
            gcs.fault(pattern, fault, times=times)
        yield gcs.root


@contextmanager
def slow_tail() -> Iterator[str]:
    with PlantedGcs() as gcs:
        for number in range(3):
            gcs.fault("GET .*/small", Delay(0.6), after=40 * number + 5)
        yield gcs.root


def settings(**properties: Any) -> Planted:
    return planted(wrap=partial(Settings, properties=properties))


def deletion(**condition: Any) -> dict[str, Any]:
    rule = {"action": {"type": "Delete"}, "condition": {"age": 30, **condition}}
    return {"rule": [rule]}


DEFECTS: Final[dict[str, tuple[Callable[[], Planted], str, str]]] = {
    **{
        f"the condition on {what} is ignored": (
            partial(planted, ignored=[pattern]),
            "conditions.ignored",
            f"ignores the condition on the {what}",
        )
        for what, pattern in CONDITIONS.items()
    },
    "lists are cached": (
        lambda: planted(wrap=partial(Cache, pattern="GET .*/o[?].*prefix.*list/")),
        "lists.incomplete",
        "without 24 of them",
    ),
    "reads are cached": (
        lambda: planted(wrap=partial(Cache, pattern="GET .*overwritten")),
        "reads.stale",
        "got 4 older versions",
    ),
    "ranges are shifted": (
        lambda: planted(wrap=ShiftedRanges),
        "ranges.wrong",
        "other bytes",
    ),
    "bits are flipped": (
        lambda: planted(("GET .*ranged", Corrupt())),
        "ranges.wrong",
        "other bytes",
    ),
    "responses are truncated": (
        lambda: planted(("GET .*ranged", Truncate(100))),
        "ranges.wrong",
        "as written, got [",
    ),
    "names are folded": (
        lambda: planted(wrap=FoldedNames),
        "names.folded",
        "'names/Case'",
    ),
    "requests are throttled": (
        lambda: planted((r"GET .*rate/", Status(429)), times=3),
        "rate.throttled",
        "requests because of load",
    ),
    "2 % of reads are slow": (slow_tail, "latency.tail", "2.0 % of"),
    "deletions are denied": (
        lambda: planted(("DELETE .*permissions", Status(403))),
        "permissions.delete",
        "expected this identity to delete",
    ),
    "lists are denied": (
        lambda: planted(("GET .*/o[?].*doctor", Status(403))),
        "permissions.list",
        "expected this identity to list",
    ),
    "old versions are kept": (
        lambda: settings(versioning={"enabled": True}),
        "versioning.on",
        "keeps each overwritten",
    ),
    "deleted objects stay": (
        lambda: settings(softDeletePolicy={"retentionDurationSeconds": "604800"}),
        "soft-delete.on",
        "for 7 days",
    ),
    "a lifecycle rule deletes objects": (
        lambda: settings(lifecycle=deletion()),
        "lifecycle.deletes",
        "deletes objects below '/'",
    ),
    "a retention policy locks objects": (
        lambda: settings(retentionPolicy={"retentionPeriod": "86400"}),
        "retention-lock.on",
        "for 1 day",
    ),
    "the requester pays": (
        lambda: settings(billing={"requesterPays": True}),
        "requester-pays.on",
        "must name a project",
    ),
    "objects are archived": (
        lambda: settings(storageClass="COLDLINE"),
        "storage-class.cold",
        "COLDLINE",
    ),
    "the clock is wrong": (
        lambda: planted(wrap=partial(Clock, skew=timedelta(minutes=-5))),
        "clock.differs",
        "behind",
    ),
}


@pytest.mark.parametrize("name", sampled(list(DEFECTS), every=4))
def test_a_planted_defect_is_named(name: str) -> None:
    plant, code, words = DEFECTS[name]

    with plant() as root:
        found = examine(root)

    (named,) = (f for f in found.findings if f.code == code)
    assert words in named.found
    assert named.meaning
    assert named.action
    assert found.exit_code == (2 if named.severity is Severity.FAILURE else 1)


def problems(found: Diagnosis) -> list[Finding]:
    return [f for f in found.findings if f.severity is not Severity.OK]


@contextmanager
def clean_gcs() -> Iterator[str]:
    with PlantedGcs(wrap=partial(Clock, skew=timedelta())) as gcs:
        yield gcs.root


@contextmanager
def clean_s3() -> Iterator[str]:
    with FakeS3(buckets=["b-1"]) as s3:
        yield f"s3://b-1/store?endpoint={s3.url}&region=us-east-1"


@pytest.mark.parametrize("place", [clean_gcs, clean_s3])
def test_a_clean_bucket_raises_no_alarm(
    place: Callable[[], Planted],
) -> None:
    with place() as root:
        found = examine(root)

    assert [] == problems(found)
    assert found.exit_code == 0


def test_a_clean_directory_raises_no_alarm_and_is_left_as_it_was(
    tmp_path: Path,
) -> None:
    place = tmp_path / "not" / "yet"

    found = examine(place.as_uri())

    assert {"file-system"} >= {f.check for f in problems(found)}  # it may be in memory
    assert not (tmp_path / "not").exists()


def test_a_rule_for_other_names_is_no_finding() -> None:
    with settings(lifecycle=deletion(matchesPrefix=["logs/"])) as root:
        found = examine(root)

    assert [] == [f for f in found.findings if f.check == "lifecycle"]


def test_a_rule_for_old_versions_is_no_finding() -> None:
    rules = deletion(isLive=False)
    with settings(lifecycle=rules, versioning={"enabled": True}) as root:
        found = examine(root)

    (versioning,) = problems(found)
    assert "until a lifecycle rule deletes it" in versioning.found


STORECTL: Final = (
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "runpy.run_module('storesvc_client.cli', run_name='__main__')"
)


@pytest.mark.slow
@pytest.mark.parametrize("check", ["conditions", "latency", "rate"])
def test_an_interrupted_examination_leaves_nothing(tmp_path: Path, check: str) -> None:
    with PlantedGcs() as gcs:
        for root in (gcs.root, str(tmp_path / "not" / "yet")):
            with subprocess.Popen(
                [sys.executable, "-c", STORECTL, "doctor", root],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ) as storectl:
                assert storectl.stdout is not None
                assert any(check in line for line in storectl.stdout)
                storectl.send_signal(signal.SIGINT)
                _, errors = storectl.communicate()

            assert (130, "storectl: interrupted\n") == (storectl.returncode, errors)
        assert [] == asyncio.run(list_objects(gcs.root))
    assert [] == [*tmp_path.iterdir()]


async def list_objects(root: str) -> list[str]:
    return await (await TensorStoreBucket.open(root)).list("")
