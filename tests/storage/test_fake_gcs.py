"""The emulator of GCS behaves like GCS, fails where a test requests it, and logs its
requests."""

import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import IncompleteRead
from typing import Any, TypeAlias

import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

from tests.fake_gcs import (
    ALWAYS,
    Delay,
    FakeGcs,
    Late,
    Lost,
    Mute,
    Reset,
    Stall,
    Status,
    Tokens,
    Truncate,
)
from tests.fake_gcs.objects import Range, list_names
from tests.support.gcs_calls import (
    BUCKET,
    CHUNK,
    OBJECTS,
    UPLOADS,
    GcsCalls,
    Reply,
    crc32c,
    md5,
    place_of,
)

MiB = 1 << 20

UploadCall: TypeAlias = Callable[..., Reply]

each_upload = pytest.mark.parametrize(
    "upload",
    [GcsCalls.upload, GcsCalls.upload_with_metadata, GcsCalls.upload_in_chunks],
    ids=["media", "multipart", "resumable"],
)


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeGcs]:
    """An emulator that the tests share."""
    with FakeGcs(buckets=[BUCKET]) as gcs:
        yield gcs


@pytest.fixture
def gcs(shared: FakeGcs) -> Iterator[FakeGcs]:
    """The shared emulator, without faults and with an empty log."""
    shared.clear()
    yield shared
    shared.clear()


@pytest.fixture
def calls(gcs: FakeGcs) -> Iterator[GcsCalls]:
    """Calls of the emulator."""
    with GcsCalls(gcs.url) as calls:
        yield calls


@pytest.fixture
def store(gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch, name: str) -> ts.KvStore:
    """A TensorStore key-value store on the emulator, for one test."""
    return opened(gcs, monkeypatch, f"{name}/")


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Name of an object that no other test uses."""
    return f"dir of/{request.node.name}"


def opened(
    gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch, path: str, **spec: Any
) -> ts.KvStore:
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", gcs.url)
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "any")
    base = {"driver": "gcs", "bucket": BUCKET, "path": path}
    retries = {"max_retries": 4, "initial_delay": "10ms", "max_delay": "50ms"}
    return ts.KvStore.open(
        {**spec, "base": base} if spec else base,
        context=ts.Context({"gcs_request_retries": retries}),
    ).result()


# --- Uploads --------------------------------------------------------------------------


@each_upload
def test_an_upload_response_has_the_fields_that_clients_verify(
    calls: GcsCalls, name: str, upload: UploadCall
) -> None:
    data = bytes(range(256)) * 4096

    document = upload(calls, name, data).document

    assert name == document["name"]
    assert str(len(data)) == document["size"]
    assert (crc32c(data), md5(data)) == (document["crc32c"], document["md5Hash"])
    assert document == calls.about(name).document
    assert data == calls.read(name).body


@each_upload
def test_a_write_with_the_stored_generation_succeeds(
    calls: GcsCalls, name: str, upload: UploadCall
) -> None:
    first = upload(calls, name, b"1", ifGenerationMatch=0)
    second = upload(calls, name, b"2", ifGenerationMatch=first.generation)

    assert (200, 200) == (first.status, second.status)
    assert first.generation < second.generation
    assert b"2" == calls.read(name).body


@each_upload
@pytest.mark.parametrize(
    "condition",
    [{"ifGenerationMatch": 0}, {"ifGenerationMatch": 17}, {"ifMetagenerationMatch": 2}],
    ids=str,
)
def test_a_write_with_a_failed_condition_changes_nothing(
    calls: GcsCalls, name: str, upload: UploadCall, condition: dict[str, int]
) -> None:
    before = upload(calls, name, b"before").document

    refused = upload(calls, name, b"after", **condition)

    assert 412 == refused.status
    assert "conditionNotMet" == refused.document["error"]["errors"][0]["reason"]
    assert before == calls.about(name).document
    assert b"before" == calls.read(name).body


@each_upload
def test_a_write_may_exclude_a_generation(
    calls: GcsCalls, name: str, upload: UploadCall
) -> None:
    absent = upload(calls, name, b"x", ifGenerationNotMatch=0)
    there = calls.upload(name, b"x")

    refused = upload(calls, name, b"x", ifGenerationNotMatch=there.generation)

    assert (412, 412) == (absent.status, refused.status)


def test_an_upload_with_wrong_checksums_is_rejected(calls: GcsCalls, name: str) -> None:
    wrong = {"crc32c": crc32c(b"other")}
    refused = calls.upload_with_metadata(name, b"data", metadata=wrong)
    header = {"x-goog-hash": f"md5={md5(b'other')}"}
    too = calls.ask("POST", f"{UPLOADS}?uploadType=media&name=x", b"data", header)

    assert (400, 400) == (refused.status, too.status)
    assert 404 == calls.about(name).status


def test_a_large_object_has_no_md5_unless_its_client_gives_one(
    calls: GcsCalls, name: str
) -> None:
    data = bytes(MiB + 1)
    claim = {"md5Hash": md5(data)}

    assert "md5Hash" not in calls.upload(name, data).document
    given = calls.upload_with_metadata(name, data, metadata=claim)
    assert claim["md5Hash"] == given.document["md5Hash"]


def test_parts_may_end_their_lines_with_line_feeds(calls: GcsCalls, name: str) -> None:
    metadata = {"metadata": {"k": "v"}}
    data = b"\r\n--data--\n"

    made = calls.upload_with_metadata(name, data, newline="\n", metadata=metadata)

    assert {"k": "v"} == made.document["metadata"]
    assert "text/plain" == made.document["contentType"]
    assert data == calls.read(name).body


def test_an_interrupted_upload_resumes(calls: GcsCalls, name: str) -> None:
    data = bytes(CHUNK) + b"end"
    place = calls.begin_upload(name)

    assert "range" not in calls.ask_progress(place).headers
    calls.send_chunk(place, data[:CHUNK])
    progress = calls.ask_progress(place)
    gap = calls.send_chunk(place, b"d", at=CHUNK + 2, total=len(data))
    # with bytes that are there
    made = calls.send_chunk(place, data[10:], at=10, total=len(data))

    assert (308, f"bytes=0-{CHUNK - 1}") == (progress.status, progress.headers["range"])
    assert (503, 200) == (gap.status, made.status)
    assert data == calls.read(name).body
    assert made.document == calls.ask_progress(place).document


def test_a_cancelled_upload_is_gone(calls: GcsCalls, name: str) -> None:
    place = calls.begin_upload(name)

    assert 499 == calls.ask("DELETE", place).status
    assert 404 == calls.send_chunk(place, b"x", total=1).status


# --- Races ----------------------------------------------------------------------------


def test_one_of_many_creates_wins(gcs: FakeGcs) -> None:
    barrier = threading.Barrier(16)

    def create(creator: int) -> list[int]:
        with GcsCalls(gcs.url) as calls:
            statuses = []
            for race in range(10):
                barrier.wait(30)
                data = str(creator).encode()
                made = calls.upload(f"race/{race}", data, ifGenerationMatch=0)
                statuses.append(made.status)
                if made.status == 200:
                    assert data == calls.read(f"race/{race}").body
            return statuses

    with ThreadPoolExecutor(16) as pool:
        races = zip(*pool.map(create, range(16)), strict=True)

    assert 10 * [{200: 1, 412: 15}] == [Counter(race) for race in races]


@pytest.mark.slow
def test_no_conditional_increment_is_lost(gcs: FakeGcs, name: str) -> None:
    def increment(times: int) -> None:
        with GcsCalls(gcs.url) as calls:
            while times:
                read = calls.read(name)
                seen = read.headers["x-goog-generation"]
                data = str(int(read.body) + 1).encode()
                times -= calls.upload(name, data, ifGenerationMatch=seen).status == 200

    with GcsCalls(gcs.url) as calls:
        calls.upload(name, b"0")
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(increment, 8 * [15]))

        assert b"120" == calls.read(name).body


# --- Reads and deletes ----------------------------------------------------------------


def test_a_read_may_be_conditional(calls: GcsCalls, name: str) -> None:
    there = calls.upload(name, b"x").generation

    assert 200 == calls.read(name, ifGenerationMatch=there).status
    assert 412 == calls.read(name, ifGenerationMatch=there + 1).status
    assert 304 == calls.read(name, ifGenerationNotMatch=there).status
    assert 304 == calls.about(name, ifMetagenerationNotMatch=1).status
    assert 200 == calls.read(name, generation=there).status
    assert 404 == calls.read(name, generation=there + 1).status
    assert 404 == calls.read("absent", ifGenerationMatch=0).status
    assert 412 == calls.read("absent", ifGenerationMatch=1).status


def test_a_delete_may_be_conditional(calls: GcsCalls, name: str) -> None:
    there = calls.upload(name, b"x").generation

    assert 412 == calls.delete(name, ifGenerationMatch=there + 1).status
    assert 204 == calls.delete(name, ifGenerationMatch=there).status
    assert 404 == calls.delete(name).status


def test_a_condition_that_is_not_a_number_is_rejected(
    calls: GcsCalls, name: str
) -> None:
    assert 400 == calls.upload(name, b"x", ifGenerationMatch="x").status


def test_media_responses_have_the_type_and_checksums(
    calls: GcsCalls, name: str
) -> None:
    generation = calls.upload(name, b"hello").generation

    headers = calls.read(name).headers

    hashes = f"crc32c={crc32c(b'hello')},md5={md5(b'hello')}"
    assert (str(generation), hashes) == (
        headers["x-goog-generation"],
        headers["x-goog-hash"],
    )


@pytest.mark.parametrize(
    ("asked", "status", "data", "shown"),
    [
        ("bytes=2-4", 206, b"llo", "bytes 2-4/11"),
        ("bytes=6-", 206, b"world", "bytes 6-10/11"),
        ("bytes=-5", 206, b"world", "bytes 6-10/11"),
        ("bytes=-50", 206, b"hello world", "bytes 0-10/11"),
        ("bytes=5-500", 206, b" world", "bytes 5-10/11"),
        ("bytes=11-", 416, b"", "bytes */11"),
        ("bytes=50-60", 416, b"", "bytes */11"),
        ("bytes=5-2", 200, b"hello world", None),
        ("bytes=0-1,3-4", 200, b"hello world", None),
    ],
)
def test_a_range_is_read(
    calls: GcsCalls, asked: str, status: int, data: bytes, shown: str | None
) -> None:
    calls.upload("ranged", b"hello world")

    got = calls.read("ranged", asked)

    assert (status, data) == (got.status, got.body)
    assert shown == got.headers.get("content-range")


def test_an_absent_object_is_not_found(calls: GcsCalls) -> None:
    assert 404 == calls.about("absent").status
    nowhere = UPLOADS.replace(BUCKET, "nowhere")
    assert 404 == calls.ask("POST", nowhere, uploadType="media", name="x").status
    assert 404 == calls.ask("GET", "/storage/v1/b/nowhere").status


# --- Listing --------------------------------------------------------------------------


def pages_of(calls: GcsCalls, **query: Any) -> Iterator[dict[str, Any]]:
    """Yields all pages of a listing."""
    page = calls.list(**query).document
    yield page
    while "nextPageToken" in page:
        page = calls.list(pageToken=page["nextPageToken"], **query).document
        yield page


def names_in(page: dict[str, Any]) -> list[str]:
    return [item["name"] for item in page.get("items", [])]


def test_names_are_listed_in_pages(calls: GcsCalls) -> None:
    names = [f"pages/{at:03d}" for at in range(25)]
    for at in names:
        calls.upload(at, b"")

    pages = list(pages_of(calls, prefix="pages/", maxResults=10))

    assert [10, 10, 5] == [len(page["items"]) for page in pages]
    assert names == [name for page in pages for name in names_in(page)]
    part = calls.list(startOffset="pages/005", endOffset="pages/008").document
    assert names[5:8] == names_in(part)
    assert [] == names_in(calls.list(prefix="none/").document)


def test_a_delimiter_lists_groups_once(calls: GcsCalls) -> None:
    for at in ("t/a/1", "t/a/2", "t/b", "t/c/", "t/c/1", "t/d"):
        calls.upload(at, b"")

    pages = list(pages_of(calls, prefix="t/", delimiter="/", maxResults=1))

    assert ["t/b", "t/d"] == [name for page in pages for name in names_in(page)]
    groups = [group for page in pages for group in page.get("prefixes", [])]
    assert ["t/a/", "t/c/"] == groups


@given(
    names=st.sets(st.text("ab/\U0010ffff", min_size=1, max_size=5)),
    where=st.builds(
        Range,
        prefix=st.text("ab/", max_size=2),
        delimiter=st.sampled_from(["", "/", "a/"]),
        first=st.text("ab/", max_size=3),
        before=st.text("ab/", max_size=3),
    ),
    most=st.integers(1, 4),
)
def test_all_pages_together_list_every_object(
    names: set[str], where: Range, most: int
) -> None:
    there = [
        name
        for name in sorted(names)
        if name.startswith(where.prefix)
        and where.first <= name
        and (not where.before or name < where.before)
    ]
    expected = list(dict.fromkeys(map(where.group, there)))

    listed: list[str] = []
    after: str | None = ""
    while after is not None:
        page = list_names(sorted(names), where, after=after, most=most)
        listed += sorted(page.names + page.groups)
        after = page.more_after

    assert expected == listed


# --- The rest of the API --------------------------------------------------------------


def test_buckets_are_created_and_listed(calls: GcsCalls) -> None:
    assert 200 == calls.post("/storage/v1/b", {"name": "another"}, project="p").status
    assert 409 == calls.post("/storage/v1/b", {"name": "another"}, project="p").status
    assert "another" == calls.ask("GET", "/storage/v1/b/another").document["name"]
    items = calls.ask("GET", "/storage/v1/b").document["items"]
    assert [BUCKET, "another"] == [bucket["name"] for bucket in items]


def test_a_batch_deletes_many(calls: GcsCalls) -> None:
    for at in ("batch/a b", "batch/c"):
        calls.upload(at, b"")

    got = calls.delete_in_a_batch("batch/a b", "absent", "batch/c")

    statuses = [
        line.split()[1] for line in got.body.split(b"\r\n") if line.startswith(b"HTTP")
    ]
    assert [b"204", b"404", b"204"] == statuses
    assert b"Content-ID: <response-2>" in got.body
    assert [] == names_in(calls.list(prefix="batch/").document)


def test_a_patch_merges_metadata(calls: GcsCalls, name: str) -> None:
    metadata = {"metadata": {"a": "1", "b": "2"}}
    made = calls.upload_with_metadata(name, b"x", metadata=metadata).document
    patch = b'{"metadata": {"a": null, "c": "3"}, "contentType": "a/b"}'

    got = calls.ask("PATCH", place_of(name), patch, ifMetagenerationMatch=1).document

    assert ({"b": "2", "c": "3"}, "a/b") == (got["metadata"], got["contentType"])
    assert (made["generation"], "2") == (got["generation"], got["metageneration"])
    stale = calls.ask("PATCH", place_of(name), patch, ifMetagenerationMatch=1)
    assert 412 == stale.status


@pytest.mark.parametrize("how", ["rewriteTo", "copyTo"])
def test_an_object_is_copied(calls: GcsCalls, name: str, how: str) -> None:
    made = calls.upload_with_metadata(name, b"x", metadata={"metadata": {"k": "v"}})
    target = f"{place_of(name)}/{how}/b/{BUCKET}/o/copy-{how}"

    stale = calls.post(target, {}, ifSourceGenerationMatch=made.generation + 1)
    copied = calls.post(target, {}, ifGenerationMatch=0)
    again = calls.post(target, {}, ifGenerationMatch=0)

    assert (412, 200, 412) == (stale.status, copied.status, again.status)
    assert {"k": "v"} == calls.about(f"copy-{how}").document["metadata"]
    assert b"x" == calls.read(f"copy-{how}").body


def test_objects_are_composed(calls: GcsCalls, name: str) -> None:
    for at in "ab":
        calls.upload(at, at.encode())
    asked = {"sourceObjects": [{"name": "a"}, {"name": "b"}]}

    made = calls.post(f"{place_of(name)}/compose", asked, ifGenerationMatch=0)
    again = calls.post(f"{place_of(name)}/compose", asked, ifGenerationMatch=0)

    assert (200, 412) == (made.status, again.status)
    assert (2, crc32c(b"ab")) == (
        made.document["componentCount"],
        made.document["crc32c"],
    )
    assert "md5Hash" not in made.document
    assert b"ab" == calls.read(name).body


def test_expect_100_continue_is_answered(gcs: FakeGcs) -> None:
    address = gcs.url.removeprefix("http://").split(":")
    head = (
        f"POST {UPLOADS}?uploadType=media&name=waited HTTP/1.1\r\n"
        "Host: x\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n"
    )
    with socket.create_connection((address[0], int(address[1])), 30) as sock:
        sock.sendall(head.encode())
        assert sock.recv(100).startswith(b"HTTP/1.1 100 ")
        sock.sendall(b"data")
        assert sock.recv(10000).startswith(b"HTTP/1.1 200 ")


def test_a_chunked_body_is_accepted(calls: GcsCalls, name: str) -> None:
    calls.ask("POST", UPLOADS, iter([b"ab", b"c"]), uploadType="media", name=name)

    assert b"abc" == calls.read(name).body


# --- TensorStore ----------------------------------------------------------------------


def test_tensorstore_round_trips(store: ts.KvStore) -> None:
    data = bytes(range(256)) * 3 * 4096
    generation = store.write("large", data).result().generation

    read = store.read("large").result()

    assert (data, generation) == (read.value, read.stamp.generation)
    part = store.read("large", byte_range=slice(100, 2000)).result()
    assert data[100:2000] == part.value
    tail = store.read("large", byte_range=slice(-7, None)).result()
    assert data[-7:] == tail.value
    assert "missing" == store.read("absent").result().state


def test_tensorstore_writes_conditionally(store: ts.KvStore) -> None:
    absent = store.read("x").result().stamp.generation
    first = store.write("x", b"1", if_equal=absent).result().generation
    refused = store.write("x", b"2", if_equal=absent).result().generation

    assert b"" == refused
    assert b"1" == store.read("x").result().value
    assert "unspecified" == store.read("x", if_not_equal=first).result().state
    store.write("x", None, if_equal=first).result()
    assert "missing" == store.read("x").result().state


def test_tensorstore_lists_and_deletes_ranges(store: ts.KvStore) -> None:
    for write in [store.write(f"{d}/{at:03d}", b"") for d in "ab" for at in range(20)]:
        write.result()

    some = ts.KvStore.KeyRange("a/005", "a/008")
    assert [b"a/005", b"a/006", b"a/007"] == sorted(store.list(some).result())
    store.delete_range(ts.KvStore.KeyRange("a/", "a0")).result()
    assert {b"b"} == {key[:1] for key in store.list().result()}


def test_tensorstore_retries_transient_errors(gcs: FakeGcs, store: ts.KvStore) -> None:
    gcs.fault("POST /upload", Status(503))
    gcs.fault("POST /upload", Reset())
    gcs.fault("alt=media", Truncate(10))

    store.write("x", bytes(MiB)).result()

    assert bytes(MiB) == store.read("x").result().value
    assert [503, None, 200, 200, 200] == [entry.status for entry in gcs.log]


def test_tensorstore_fails_in_an_outage(gcs: FakeGcs, store: ts.KvStore) -> None:
    gcs.fault(".", Status(503), times=ALWAYS)

    with pytest.raises(ValueError, match="retry attempts failed"):
        store.write("x", b"").result()


def test_ocdbt_loses_no_commit_of_several_writers(
    gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = [
        opened(gcs, monkeypatch, "database/", driver="ocdbt", cache_pool={})
        for _ in range(4)
    ]

    def commit(writer: int) -> None:
        for at in range(10):
            stores[writer].write(f"{writer}/{at}", b"x").result()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(commit, range(4)))

    database = opened(gcs, monkeypatch, "database/", driver="ocdbt")
    assert 40 == len(database.list().result())


# --- Faults ---------------------------------------------------------------------------


def test_a_status_fault_is_answered_without_executing(
    gcs: FakeGcs, calls: GcsCalls
) -> None:
    gcs.fault("POST /upload.*dir of/x", Status(503, retry_after_seconds=7), times=2)

    got = [calls.upload("dir of/x", b"") for _ in range(3)]

    assert [503, 503, 200] == [reply.status for reply in got]
    assert "7" == got[0].headers["retry-after"]


def test_a_fault_may_skip_the_first_requests(gcs: FakeGcs, calls: GcsCalls) -> None:
    gcs.fault("POST", Status(429), after=2)

    assert [200, 200, 429, 200] == [calls.upload("x", b"").status for _ in range(4)]


def test_a_reset_request_is_not_executed(
    gcs: FakeGcs, calls: GcsCalls, name: str
) -> None:
    gcs.fault("POST", Reset())

    with pytest.raises(ConnectionError):
        calls.upload(name, b"x")

    assert 404 == calls.about(name).status


def test_a_request_with_a_lost_response_is_executed(
    gcs: FakeGcs, calls: GcsCalls, name: str
) -> None:
    gcs.fault("POST", Lost())

    with pytest.raises(ConnectionError):
        calls.upload(name, b"x")

    assert b"x" == calls.read(name).body
    assert (None, 0, 1) == (
        gcs.log[0].status,
        gcs.log[0].sent_bytes,
        gcs.log[0].stored_bytes,
    )


def test_a_truncated_answer_ends_early(gcs: FakeGcs, calls: GcsCalls) -> None:
    calls.upload("truncated", bytes(MiB))
    gcs.fault("GET.*alt=media", Truncate(1000))

    with pytest.raises((IncompleteRead, ConnectionError)):
        calls.read("truncated")

    assert 1000 == gcs.log[-1].sent_bytes
    assert MiB == len(calls.read("truncated").body)


def test_a_delayed_request_is_executed_late(gcs: FakeGcs, calls: GcsCalls) -> None:
    gcs.fault("POST", Delay(0.1))
    began = time.monotonic()

    calls.upload("x", b"")

    assert time.monotonic() - began >= 0.1
    assert gcs.log[0].seconds >= 0.1


def test_a_request_with_a_late_response_is_executed_at_once(
    gcs: FakeGcs, name: str
) -> None:
    gcs.fault("POST", Late(0.3))

    with (
        GcsCalls(gcs.url, timeout_seconds=0.1) as impatient,
        pytest.raises(TimeoutError),
    ):
        impatient.upload(name, b"x")

    with GcsCalls(gcs.url) as calls:
        assert b"x" == calls.read(name).body


def test_a_stalled_request_is_never_answered(gcs: FakeGcs, name: str) -> None:
    gcs.fault("POST", Stall())

    with (
        GcsCalls(gcs.url, timeout_seconds=0.1) as impatient,
        pytest.raises(TimeoutError),
    ):
        impatient.upload(name, b"x")

    with GcsCalls(gcs.url) as calls:
        assert 404 == calls.about(name).status


def test_a_mute_request_is_executed_and_never_answered(gcs: FakeGcs, name: str) -> None:
    gcs.fault("POST", Mute())

    with (
        GcsCalls(gcs.url, timeout_seconds=0.1) as impatient,
        pytest.raises(TimeoutError),
    ):
        impatient.upload(name, b"x")

    with GcsCalls(gcs.url) as calls:
        assert b"x" == calls.read(name).body


def test_access_is_denied_until_it_is_allowed(gcs: FakeGcs, calls: GcsCalls) -> None:
    place = calls.begin_upload("denied")
    gcs.deny(BUCKET)
    denied = [calls.list(), calls.upload("x", b""), calls.send_chunk(place, b"x")]
    gcs.allow(BUCKET)

    assert [403, 403, 403] == [reply.status for reply in denied]
    assert 200 == calls.list().status


def test_every_request_needs_a_token() -> None:
    with (
        FakeGcs(buckets=[BUCKET], tokens=Tokens("secret")) as gcs,
        GcsCalls(gcs.url) as calls,
    ):
        assert 401 == calls.list().status
        calls.headers["authorization"] = "Bearer secret"
        assert 200 == calls.list().status


def test_writes_of_one_name_are_rate_limited() -> None:
    with (
        FakeGcs(buckets=[BUCKET], seconds_between_writes=0.1) as gcs,
        GcsCalls(gcs.url) as calls,
    ):
        assert 200 == calls.upload("x", b"").status
        assert 429 == calls.upload("x", b"").status
        assert 429 == calls.delete("x").status
        assert 200 == calls.upload("y", b"").status
        time.sleep(0.1)
        assert 204 == calls.delete("x").status


def test_latency_and_rate_slow_a_transfer() -> None:
    with (
        FakeGcs(buckets=[BUCKET], latency_seconds=0.05, bytes_per_second=10e6) as gcs,
        GcsCalls(gcs.url) as calls,
    ):
        began = time.monotonic()
        calls.upload("x", bytes(MiB))
        calls.read("x")

    assert time.monotonic() - began >= 2 * (0.05 + 0.1)


# --- The log, and other processes -----------------------------------------------------


def test_the_log_counts_transferred_bytes(gcs: FakeGcs, calls: GcsCalls) -> None:
    calls.upload("logged", bytes(3 * MiB))
    calls.read("logged", "bytes=0-9")

    put, got = gcs.log
    assert ("POST", 200, 3 * MiB) == (put.method, put.status, put.received_bytes)
    assert ("GET", 206, 10) == (got.method, got.status, got.sent_bytes)
    assert f"{OBJECTS}/logged?alt=media" == got.target
    assert (3 * MiB, put.sent_bytes + 10) == (gcs.stored_bytes, gcs.sent_bytes)
    gcs.clear()
    assert ([], 0, 0) == (gcs.log, gcs.stored_bytes, gcs.sent_bytes)


def test_another_process_controls_the_emulator_over_http() -> None:
    command = [sys.executable, "-m", "tests.fake_gcs", "--bucket", BUCKET]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        with GcsCalls(process.stdout.readline().strip()) as calls:
            action = {"kind": "status", "code": 503}
            calls.post("/_fake/faults", {"match": "POST", "action": action, "after": 1})
            assert [200, 503] == [calls.upload("x", b"12").status for _ in range(2)]
            log = calls.ask("GET", "/_fake/log").document
            assert [200, 503] == [entry["status"] for entry in log["requests"]]
            assert 2 == log["stored_bytes"]
            calls.post("/_fake/clear", {})
            assert [] == calls.ask("GET", "/_fake/log").document["requests"]
            calls.post("/_fake/deny", {"bucket": BUCKET})
            assert 403 == calls.list().status
            assert 400 == calls.post("/_fake/faults", {"match": "x"}).status
        process.terminate()
