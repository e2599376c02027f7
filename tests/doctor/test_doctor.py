"""``storectl doctor`` and ``store.doctor`` of directories and servers."""

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from click.testing import CliRunner

import storesvc_client as store
from storesvc.storage.location import storage_at
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc_client._doctor.doctor import Examination, below, flip_a_bit
from storesvc_client._doctor.drill import DrillRun, check_flip
from storesvc_client._doctor.findings import PROBLEMS, Severity, judge_clock
from storesvc_client._doctor.kinds import (
    PRICES_DATE,
    Workload,
    estimate_cost,
    file_system,
)
from storesvc_client._doctor.storage_checks import best_concurrency, tail_share
from storesvc_client.cli import main
from tests.doctor.examined import LITTLE
from tests.support.in_process_server import InProcessServer

PAGE: Final = Path(__file__).parents[2] / "docs" / "doctor.md"


def test_a_server_raises_no_alarm_and_keeps_nothing(server: InProcessServer) -> None:
    examination = Examination(lambda _: None, LITTLE)
    examination.examine_server(server.address, {}, server.root.as_uri())
    found = examination.end()

    assert [] == [f for f in found.findings if f.severity is not Severity.OK]
    assert {"version", "encryption", "policy", "save", "clock", "direct"} <= {
        f.check for f in found.findings
    }
    with store.connect(server.address) as client:
        assert [] == [*client.runs()]
        assert [] == [*client.uploads()]


def test_a_server_that_is_down_is_a_failure() -> None:
    found = store.doctor("127.0.0.1:9")

    (finding,) = found.findings
    assert finding.code == "check.failed"
    assert "cannot be reached" in finding.found
    assert found.exit_code == 2


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_the_command_prints_findings_and_leaves_a_store_as_it_was(
    tmp_path: Path,
) -> None:
    with store.connect(tmp_path) as client:
        client.run("docs/kept").save(1, {"w": 1.0}).result()
    before = files(tmp_path)

    text = CliRunner().invoke(main, ["doctor", str(tmp_path)])
    document = CliRunner().invoke(main, ["doctor", str(tmp_path), "--json"])

    assert re.search("^ok +conditions ", text.stdout, re.MULTILINE)
    assert "A store works here" in text.stdout
    shown = json.loads(document.stdout)
    assert [] == [f for f in shown["findings"] if f["severity"] == "failure"]
    assert text.exit_code == document.exit_code == shown["exit_code"]
    assert shown["measured"]["save_mib_per_second"] > 0
    assert "a save was killed before its commit" in text.stdout
    assert "found by verify and restore" in text.stdout
    assert before == files(tmp_path)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_flipped_bit_is_found_however_many_chunks_share_its_file(
    tmp_path: Path, count: int
) -> None:
    root = tmp_path.as_uri()
    leaves = {str(number): np.full(1 << 17, number + 1.0) for number in range(count)}
    with store.connect(root) as client:
        client.run("doctor/drill").save(1, leaves).result()

    file = asyncio.run(_flip_below(root))

    with store.connect(root) as client:
        assert client.run("doctor/drill").verify(1).damages
        with pytest.raises(store.DataLossError):
            client.run("doctor/drill").restore(1)
    assert "/pool/" in file


async def _flip_below(root: str) -> str:
    return await flip_a_bit(await TensorStoreBucket.open(root), "data/")


def test_a_flip_that_is_missed_names_what_missed_it(tmp_path: Path) -> None:
    place = DrillRun(target=tmp_path.as_uri(), state_bytes=1 << 16)

    (finding,) = check_flip(place, lambda: "a file without one")

    assert "flipped-bit.missed" == finding.code
    assert "of a file without one" in finding.found
    assert finding.found.endswith("got none by verify and restore")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_a_failure(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)

    assert store.doctor(tmp_path).exit_code == 2


def test_a_root_of_an_unknown_kind_is_rejected() -> None:
    with pytest.raises(store.InvalidRequestError, match=r"^doctor: root 'ftp://a/b'"):
        store.doctor("ftp://a/b")


def test_errors_before_the_first_check_exit_with_2(tmp_path: Path) -> None:
    wrong = {
        "https://ckpt.example:7070": "or HOST:PORT of a server",
        f"{tmp_path} --tree a/b@1": "holds no store; give the bytes of a checkpoint",
        f"{tmp_path} --direct {tmp_path}": "expected the address of a server with it",
        f"{tmp_path} --tree much": "expected a size",
    }
    for arguments, words in wrong.items():
        ended = CliRunner().invoke(main, ["doctor", *arguments.split(), "--json"])

        assert 2 == ended.exit_code
        assert words in json.loads(ended.stderr)["error"]["message"]
    assert [] == [*tmp_path.iterdir()]


@pytest.mark.parametrize("holds", [True, False])
def test_a_root_that_direct_saves_cannot_use_is_named(
    server: InProcessServer, tmp_path: Path, *, holds: bool
) -> None:
    other = tmp_path / "other"
    if holds:
        with store.connect(other) as client:
            client.run("a/b").save(1, {"w": 1.0}).result()
    examination = Examination(lambda _: None, LITTLE)

    examination.examine_server(server.address, {}, other.as_uri())

    found = examination.end()
    (finding,) = (each for each in found.findings if each.check == "direct")
    assert ("direct.rejected" if holds else "direct.unreachable") == finding.code
    assert "expected the root of store" in finding.found
    assert found.exit_code == 1


def test_the_cost_is_that_of_the_bytes_that_saves_add() -> None:
    storage = storage_at("gs://bucket/ckpts")
    whole = Workload(48 << 30, 48 << 30, 600.0)

    (all_new,) = estimate_cost(whole, storage)
    (some_new,) = estimate_cost(whole._replace(added_bytes=48 << 20), storage)

    # 4320 saves a month, of 384 data files of 128 MiB; 437 checkpoints at a time
    assert "1,723,680 writing requests ($8.62)" in all_new.found
    assert "20.5 TiB stored ($419.52) a month" in all_new.found
    assert "90,720 writing requests ($0.45)" in some_new.found
    assert "us-central1, STANDARD, https://cloud.google.com" in some_new.found
    assert PRICES_DATE in some_new.found


def test_the_page_has_each_problem() -> None:
    rows = re.findall(
        r"^\| `(.+?)` \| (\w+) \| (.+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE
    )

    assert rows == [
        (code, found.severity.value, found.meaning, found.action)
        for code, found in PROBLEMS.items()
    ]
    assert sorted(PROBLEMS) == [*PROBLEMS]


def test_the_file_system_is_that_of_the_deepest_mount() -> None:
    mounts = "/dev/a / ext4 rw 0 0\ntmpfs /a\\040b tmpfs rw 0 0\nx /a nfs4 rw 0 0\n"

    assert "ext4" == file_system(Path("/c"), mounts)
    assert "nfs4" == file_system(Path("/a/c"), mounts)
    assert "tmpfs" == file_system(Path("/a b/c"), mounts)


@pytest.mark.parametrize(("skew", "problems"), [(1.5, 0), (-3.0, 1), (400.0, 1)])
def test_clocks_may_differ_by_two_seconds(skew: float, problems: int) -> None:
    (finding,) = judge_clock(skew, "the server")

    assert problems == (finding.code == "clock.differs")


def test_the_fewest_requests_near_the_best_rate_are_recommended() -> None:
    rates = {1: 100.0, 4: 380.0, 16: 950.0, 32: 1000.0, 64: 990.0}

    assert 16 == best_concurrency(rates)


def test_a_tail_is_reported_unless_this_machine_is_as_slow() -> None:
    seconds = [0.001] * 98 + [0.3] * 2

    assert 0.02 == tail_share(seconds, noise_seconds=0.001)
    assert 0.0 == tail_share(seconds, noise_seconds=0.11)
    assert 0.0 == tail_share([0.001] * 1000 + [0.3], noise_seconds=0.0)


def test_a_folder_of_a_root_keeps_its_options() -> None:
    root = "gs://b/p?endpoint=http://127.0.0.1:9&concurrency=8"

    assert "gs://b/p/x/y?endpoint=http://127.0.0.1:9&concurrency=8" == below(
        root, "x/y"
    )
