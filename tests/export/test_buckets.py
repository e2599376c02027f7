"""Exports into buckets: URLs and options as of imports, complete or unfinished."""

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load

import storesvc_client as store
from storesvc_client._export.orbax import COMMITTED
from storesvc_client._foreign.locations import Location, open_location
from tests.conftest import gcs_root, s3_root
from tests.export.parts import Save
from tests.fake_gcs import ALWAYS, FakeGcs, Status
from tests.fake_gcs.emulator import Emulator

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("quiet")]

TREE: dict[str, Any] = {"w": np.arange(500.0), "b": {"c": np.arange(6).reshape(2, 3)}}


LARGE: dict[str, Any] = {
    "w": np.random.default_rng(0).random(40_000),
    "n": np.arange(9),
}
"""A tree of 320 kB, far more than the documents of a step."""

PAYLOAD_BYTES = 320_000


class Bucket:
    """A storage, and roots in it that no other test uses."""

    def __init__(self, emulator: Emulator, new_root: Callable[[], str]) -> None:
        self.emulator = emulator
        self.new_root = new_root


@pytest.fixture(params=["gs", "s3"])
def bucket(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """A bucket of each provider; its faults and its log end with the test."""
    is_gs = request.param == "gs"
    emulator: Any = request.getfixturevalue("gcs" if is_gs else "s3")
    emulator.clear()
    yield Bucket(emulator, gcs_root if is_gs else lambda: s3_root(emulator))
    emulator.clear()


def below(root: str, name: str) -> str:
    """Returns the URL of a folder or file below a root, with the root's options."""
    path, mark, options = root.partition("?")
    return f"{path}/{name}{mark}{options}"


def downloaded(location: Location, to: Path, folder: str = "") -> Path:
    """Copies a folder of a location to the disk."""
    for name in location.names(folder):
        path = f"{folder}/{name}".strip("/")
        if name.endswith("/"):
            downloaded(location, to, path)
            continue
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        (to / path).write_bytes(location.read(path, limit=1 << 20))
    return to


def check(found: Any) -> None:
    """Compares with ``TREE``, leaf by leaf."""
    assert {"w", "b"} == found.keys()
    np.testing.assert_array_equal(TREE["w"], found["w"])
    np.testing.assert_array_equal(TREE["b"]["c"], found["b"]["c"])


def restored(root: str, folder: Path) -> Any:
    """Returns what Orbax restores from the step of an export."""
    at = downloaded(open_location(root), folder)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(at / "100" / "default")


def test_orbax_restores_a_step_from_a_bucket(
    bucket: Bucket, saved: Save, tmp_path: Path
) -> None:
    root = bucket.new_root()
    opened = saved("memory://", TREE)

    opened.export(f"orbax:{root}")

    check(restored(root, tmp_path))
    assert ["100/"] == list(open_location(root).names())
    with pytest.raises(store.PreconditionError, match="never replaced"):
        opened.export(f"orbax:{root}")


def test_safetensors_are_written_to_a_bucket_in_shards_and_in_one_file(
    bucket: Bucket, saved: Save
) -> None:
    root = bucket.new_root()
    opened = saved("memory://", TREE)

    one = opened.export(f"safetensors:{below(root, 'one.safetensors')}")
    many = opened.export(f"safetensors:{root}", max_shard_bytes=4000)

    found = open_location(root)
    whole = load(found.read("one.safetensors", limit=1 << 20))
    np.testing.assert_array_equal(TREE["w"], whole["w"])
    assert (("one.safetensors",), 3) == (one.files, len(many.files))
    assert sorted([*one.files, *many.files]) == list(found.names())


def test_npz_is_written_to_a_bucket(
    bucket: Bucket, saved: Save, tmp_path: Path
) -> None:
    root = bucket.new_root()

    saved("memory://", TREE).export(f"npz:{below(root, 'all.npz')}")

    with np.load(downloaded(open_location(root), tmp_path) / "all.npz") as found:
        np.testing.assert_array_equal(TREE["w"], found["w"])


def test_a_failure_leaves_a_step_without_its_mark_and_a_retry_completes_it(
    bucket: Bucket, saved: Save, tmp_path: Path
) -> None:
    root = bucket.new_root()
    opened = saved("memory://", TREE)
    bucket.emulator.fault(r"(PUT|POST) .*_sharding", Status(403), times=ALWAYS)

    with pytest.raises(store.PreconditionError, match=r"_sharding: access denied"):
        opened.export(f"orbax:{root}")
    names = open_location(root).names("100")
    assert ([".storesvc-export", "default/"], False) == (names, COMMITTED in names)
    bucket.emulator.clear()
    opened.export(f"orbax:{root}")

    check(restored(root, tmp_path))
    names = open_location(root).names("100")
    assert ["_CHECKPOINT_METADATA", COMMITTED, "default/"] == sorted(names)
    data = open_location(root).names("100/default/d")
    assert len(set(data)) == 2, "the data files of the failed export are removed"


def test_an_option_of_the_file_system_takes_precedence(
    gcs: FakeGcs, saved: Save
) -> None:
    root = gcs_root()
    options = {"endpoint_url": gcs.url, "token": "anon"}

    saved("memory://", TREE).export(
        f"npz:{root}/x.npz?endpoint=http://127.0.0.1:9", storage_options=options
    )

    assert ["x.npz"] == list(open_location(root).names())


@pytest.mark.slow
def test_the_bucket_of_the_store_copies_the_data_files_itself(
    bucket: Bucket, saved: Save, tmp_path: Path
) -> None:
    opened = saved(bucket.new_root(), LARGE, items={"config": {"x": 1}})
    target, emulator = bucket.new_root(), bucket.emulator
    emulator.clear()

    report = opened.export(f"orbax:{target}")

    assert report.copied_bytes == emulator.copied_bytes >= PAYLOAD_BYTES
    moved = sum(each.received_bytes + each.sent_bytes for each in emulator.log)
    assert moved < PAYLOAD_BYTES / 4
    found = restored(target, tmp_path)
    np.testing.assert_array_equal(LARGE["w"], found["w"])
    np.testing.assert_array_equal(LARGE["n"], found["n"])


def request_times(
    bucket: Bucket, saved: Save, pattern: str
) -> tuple[list[int], list[int]]:
    """Exports a large tree; returns which of the requests were copies, and which match
    a pattern of method and target."""
    opened = saved(bucket.new_root(), LARGE)
    bucket.emulator.clear()
    opened.export(f"orbax:{bucket.new_root()}")
    log = [*enumerate(bucket.emulator.log)]
    copied = [at for at, each in log if each.copied_bytes]
    lines = [(at, f"{each.method} {each.target}") for at, each in log]
    return copied, [at for at, line in lines if re.match(pattern, line)]


def test_the_hold_on_the_checkpoint_ends_after_the_copies(
    bucket: Bucket, saved: Save
) -> None:
    copied, ended = request_times(bucket, saved, "DELETE .*hold")

    assert max(copied) < min(ended)


def test_copies_are_complete_before_the_step_is(bucket: Bucket, saved: Save) -> None:
    copied, written = request_times(bucket, saved, rf"(PUT|POST) .*{COMMITTED}")

    assert 0 < len(copied)
    assert max(copied) < min(written)


@pytest.mark.slow
def test_what_the_bucket_cannot_copy_is_read_and_written(
    bucket: Bucket, saved: Save, tmp_path: Path
) -> None:
    opened = saved(bucket.new_root(), LARGE)
    bucket.emulator.clear()

    cast = opened.export(f"orbax:{bucket.new_root()}", cast="float32")
    chosen = opened.export(f"orbax:{bucket.new_root()}", select="w")
    elsewhere = opened.export(f"orbax:{tmp_path}")

    copied = [each.copied_bytes for each in (cast, chosen, elsewhere)]
    assert ([0, 0, 0], 0) == (copied, bucket.emulator.copied_bytes)


@pytest.mark.slow
def test_a_bucket_that_denies_copies_is_read_and_written(
    bucket: Bucket, saved: Save, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.disable(logging.NOTSET)
    opened, target = saved(bucket.new_root(), LARGE), bucket.new_root()
    _deny_copies(bucket)

    report = opened.export(f"orbax:{target}")

    assert 0 == report.copied_bytes
    assert "the bucket did not copy them" in caplog.text
    np.testing.assert_array_equal(LARGE["w"], restored(target, tmp_path)["w"])


@pytest.mark.slow
def test_a_copy_that_fails_leaves_no_finished_step(
    bucket: Bucket, saved: Save, tmp_path: Path
) -> None:
    opened, target = saved(bucket.new_root(), LARGE), bucket.new_root()
    _deny_copies(bucket, 400)

    with pytest.raises(store.UnavailableError, match="export again"):
        opened.export(f"orbax:{target}")
    assert COMMITTED not in open_location(target).names("100")
    bucket.emulator.clear()
    opened.export(f"orbax:{target}")

    np.testing.assert_array_equal(LARGE["w"], restored(target, tmp_path)["w"])


def _deny_copies(bucket: Bucket, code: int = 403) -> None:
    """Has the storage reject the next copy with a status; on S3, a copy is a PUT of a
    data file below the step."""
    pattern = r"POST .*/rewriteTo/|PUT .*/100/default/d/"
    bucket.emulator.fault(pattern, Status(code), times=1)
