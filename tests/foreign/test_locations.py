"""Locations outside a store: local folders, memory, buckets and web servers."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
import tensorstore as ts
from fsspec.registry import _registry

from storesvc_client._foreign.locations import Location, open_location
from storesvc_client.errors import (
    DataLossError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
)
from tests.conftest import gcs_root, s3_root
from tests.fake_gcs import FakeGcs
from tests.fake_s3 import FakeS3
from tests.foreign.web_server import QuietHandler, serving
from tests.foreign.written_files import put_files

FILES = {"a.json": b"{}", "sub/data": b"0123456789", "sub/deep/more": b"x"}
"""Files of each location."""

OUTWARD = ["../other", "/etc/passwd", "sub/../../x", "", ".", "a//b", "a\0b", "a\\b"]
"""Paths that no location accepts."""


def filled(url: str) -> Location:
    """Returns a location that holds ``FILES``."""
    found = open_location(url)
    put_files(FILES, found)
    return found


@pytest.fixture(params=["file", "path", "memory", "gs", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Location]:
    """A location of each kind that holds ``FILES``."""
    make: dict[str, Callable[[], str]] = {
        "file": tmp_path.as_uri,
        "path": lambda: str(tmp_path),
        "memory": lambda: f"memory://{tmp_path.name}",
        "gs": gcs_root,
        "s3": lambda: s3_root(request.getfixturevalue("s3")),
    }
    if request.param == "gs":
        request.getfixturevalue("gcs")
    yield filled(make[request.param]())
    if request.param == "memory":
        fsspec.filesystem("memory").rm("/", recursive=True)


@pytest.mark.emulated
def test_every_kind_of_location_lists_and_reads_the_same(location: Location) -> None:
    assert ["a.json", "sub/"] == list(location.names())
    assert ["data", "deep/"] == list(location.names("sub"))
    assert ["data", "deep/"] == list(location.names("sub/"))
    assert [] == list(location.names("absent"))
    assert 10 == location.size("sub/data")
    assert location.size("absent") is None
    assert location.size("sub") is None
    assert b"{}" == location.read("a.json", limit=2)
    assert b"345" == location.read_range("sub/data", 3, 6)
    assert b"" == location.read_range("sub/data", 3, 3)
    into = bytearray(4)
    location.read_into("sub/data", 6, memoryview(into))
    assert b"6789" == bytes(into)


@pytest.mark.emulated
def test_every_kind_of_location_rejects_what_is_absent_or_too_large(
    location: Location,
) -> None:
    with pytest.raises(NotFoundError, match=r"absent: expected a file, found none"):
        location.read("absent", limit=10)
    with pytest.raises(NotFoundError, match="absent"):
        location.read_range("absent", 0, 1)
    with pytest.raises(DataLossError, match="expected at most 9 bytes, got 10"):
        location.read("sub/data", limit=9)
    with pytest.raises(DataLossError, match="expected the bytes 5 to 11, got a file"):
        location.read_range("sub/data", 5, 11)


@pytest.mark.emulated
def test_no_path_leads_out_of_a_location(location: Location) -> None:
    for path in OUTWARD:
        with pytest.raises(DataLossError, match="expected a relative path"):
            location.read(path, limit=10)
        with pytest.raises(DataLossError, match="expected a relative path"):
            location.size(path)
    for path in [path for path in OUTWARD if path]:
        with pytest.raises(DataLossError, match="expected a relative path"):
            location.names(path)


def test_a_list_shows_what_was_written_after_the_previous_one(
    location: Location,
) -> None:
    assert ["a.json", "sub/"] == list(location.names())
    put_files({"new": b""}, location)
    assert ["a.json", "new", "sub/"] == list(location.names())


@pytest.mark.emulated
def test_the_stamp_of_a_file_changes_when_it_is_written_again(
    location: Location, tmp_path: Path
) -> None:
    before = location.stamps("sub")
    assert ["data", "deep/"] == list(before)
    assert "" == before["deep/"]
    assert before == location.stamps("sub")
    assert {} == location.stamps("absent")
    put_files({"sub/data": b"9876543210"}, location)
    if location.is_local:
        os.utime(tmp_path / "sub/data", (1, 1))
    assert before["data"] != location.stamps("sub")["data"]


@pytest.mark.emulated
def test_tensorstore_reads_at_the_same_place_in_a_bucket(gcs: FakeGcs) -> None:
    found = filled(gcs_root())
    with found.opening():
        store = ts.KvStore.open(found.kvstore("sub")).result()
    assert b"0123456789" == store.read("data").result().value


def test_the_url_of_a_location_has_no_options(s3: FakeS3) -> None:
    root = s3_root(s3)
    assert root.partition("?")[0] == open_location(root).url
    assert "?" not in open_location(root).url


def test_a_link_inside_the_folder_is_followed_and_one_that_leaves_it_is_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "secret").write_bytes(b"s")
    root = tmp_path / "root"
    (root / "d").mkdir(parents=True)
    (root / "d/real").write_bytes(b"r")
    (root / "inside").symlink_to("d/real")
    location = open_location(root)
    assert b"r" == location.read("inside", limit=1)
    assert str(root) in location.kvstore()["path"]
    (root / "d/outside").symlink_to(tmp_path / "secret")
    (root / "up").symlink_to("..")
    for path in ("d/outside", "up/secret"):
        with pytest.raises(DataLossError, match="expected files of this folder, got a"):
            location.read(path, limit=1)
        with pytest.raises(DataLossError, match="symbolic link"):
            location.read_range(path, 0, 1)
    with pytest.raises(DataLossError, match="symbolic link"):
        location.kvstore("d")
    with pytest.raises(DataLossError, match="symbolic link"):
        location.names("up")


def test_tensorstore_gets_no_folder_in_which_links_of_links_lead_out(
    tmp_path: Path,
) -> None:
    (tmp_path / "secret").write_bytes(b"s")
    root = tmp_path / "root"
    (root / "step/w").mkdir(parents=True)
    (root / "other/up").mkdir(parents=True)
    (root / "step/w/0").symlink_to("../../other/up")
    (root / "other/up/again").symlink_to("../../step")
    (root / "other/up/nowhere").symlink_to("nowhere")
    (root / "other/up/itself").symlink_to("itself")
    location = open_location(root)
    assert location.kvstore("step")["path"].endswith("/root/step/")

    (root / "other/up/0").symlink_to("../../../secret")
    with pytest.raises(DataLossError, match=r"other/up/0: .*symbolic link to .*secret"):
        location.kvstore("step")


@pytest.mark.parametrize("is_linked", [False, True])
def test_tensorstore_gets_no_folder_with_a_pipe(
    *, is_linked: bool, tmp_path: Path
) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    location = open_location(tmp_path)
    os.mkfifo(tmp_path / "pipe" if is_linked else tmp_path / "a/b/pipe")
    if is_linked:
        (tmp_path / "a/b/link").symlink_to("../../pipe")
    with pytest.raises(DataLossError, match=r"pipe: expected files .*got a pipe"):
        location.kvstore("a")


def test_links_of_a_hugging_face_cache_lead_to_its_blobs_and_no_further(
    tmp_path: Path,
) -> None:
    repository = tmp_path / "hub/models--org--name"
    revision = repository / "snapshots/abc"
    (repository / "blobs").mkdir(parents=True)
    revision.mkdir(parents=True)
    (repository / "blobs/123").write_bytes(b"weights")
    (tmp_path / "hub/token").write_bytes(b"secret")
    (revision / "model.safetensors").symlink_to("../../blobs/123")
    (revision / "config.json").symlink_to("../../../token")
    location = open_location(revision)
    assert b"weights" == location.read("model.safetensors", limit=7)
    with pytest.raises(DataLossError, match="symbolic link"):
        location.read("config.json", limit=10)


def test_a_pipe_is_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    location = open_location(tmp_path)
    assert location.size("pipe") is None
    with pytest.raises(NotFoundError, match="pipe: expected a file"):
        location.read("pipe", limit=10)


def test_a_web_server_is_listed_and_one_without_ranges_is_rejected(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.json").write_bytes(b"{}")
    (tmp_path / "sub").mkdir()
    with serving(tmp_path, QuietHandler) as url:
        location = open_location(url)
        assert ["a.json", "sub/"] == list(location.names())
        assert b"{}" == location.read("a.json", limit=2)
        assert "http" == location.kvstore("sub")["driver"]
        with pytest.raises(PreconditionError, match="expected a server of ranges"):
            location.read_range("a.json", 1, 2)
    with pytest.raises(UnavailableError, match=r"a\.json: cannot be read"):
        location.read("a.json", limit=2)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/x",
        "zip://x::/etc/y.zip",
        "file://host/x",
        "gs://b",
        "",
        "a\0",
        "gs//bucket/x",
        "hf:/org/model",
        "gs://bucket/x?driver=gcs_grpc",
    ],
)
def test_other_urls_are_rejected(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="expected"):
        open_location(url)


def test_the_extra_of_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    # fsspec keeps the classes that earlier tests used
    monkeypatch.delitem(_registry, "hf", raising=False)
    with pytest.raises(InvalidRequestError, match=r"pip install 'storesvc\[hf\]'"):
        open_location("hf://org/name")
