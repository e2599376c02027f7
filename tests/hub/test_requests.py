"""Responses of a hub, byte by byte: ranges, denials, hostile requests."""

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import storesvc_client as store
from storesvc.auth.policy import Policy
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc_client._hub import served_files
from storesvc_client._hub.ranges import parse_range
from storesvc_client._restore.open_tree import get_reader
from tests.conftest import gcs_root
from tests.fake_gcs import FakeGcs
from tests.hub.conftest import model
from tests.hub.served import ServedHub
from tests.support.policies import restricted
from tests.support.saved_checkpoint import flip

NAME = "prod/llama-8b"
FILE = f"/{NAME}/resolve/best/model.safetensors"


@pytest.fixture(scope="module")
def whole(hub: ServedHub) -> bytes:
    """The bytes of the file."""
    return hub.http.get(FILE).content


def test_head_tells_what_get_returns(hub: ServedHub, whole: bytes) -> None:
    head, get = hub.http.head(FILE), hub.http.get(FILE)

    assert (200, b"") == (head.status_code, head.content)
    assert str(len(whole)) == head.headers["content-length"]
    for name in ("etag", "x-repo-commit", "accept-ranges", "content-length"):
        assert head.headers[name] == get.headers[name]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_range_is_a_slice_of_the_file(
    hub: ServedHub, whole: bytes, data: st.DataObject
) -> None:
    size = len(whole)
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size + 9))
    text, sliced = data.draw(
        st.sampled_from(
            [
                (f"bytes={start}-{stop - 1}", whole[start:stop]),
                (f"bytes={start}-", whole[start:]),
                (f"bytes=-{size - start}", whole[start:]),
            ]
        )
    )

    answer = hub.http.get(FILE, headers={"Range": text})

    assert answer.content == sliced
    if len(sliced) < size:
        end = start + len(sliced) - 1
        assert 206 == answer.status_code
        assert f"bytes {start}-{end}/{size}" == answer.headers["content-range"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_windows_of_any_size_give_the_same_bytes(
    hub: ServedHub, whole: bytes, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = data.draw(st.integers(start + 1, len(whole)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served_files, "WINDOW_BYTES", data.draw(st.integers(1, 500)))
        answer = hub.http.get(FILE, headers={"Range": f"bytes={start}-{stop - 1}"})

    assert answer.content == whole[start:stop]


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("bytes=99999999-", 416),
        ("bytes=-0", 416),
        ("bytes=5-4", 200),
        ("bytes=0-1,4-5", 200),
        ("bytes=-", 200),
        ("lines=1-2", 200),
        (f"bytes={'9' * 5000}-", 200),
        ("bytes=\xb2-3", 200),
    ],
)
def test_ranges_that_name_no_bytes(
    hub: ServedHub, whole: bytes, header: str, status: int
) -> None:
    answer = hub.http.get(FILE, headers={b"range": header.encode("latin-1")})

    assert status == answer.status_code
    if status == 416:
        assert f"bytes */{len(whole)}" == answer.headers["content-range"]
        wanted = f"{NAME}@300 model.safetensors: expected a range of its {len(whole)} b"
        message = answer.headers["x-error-message"]
        assert message.startswith(wanted)
        assert f"got '{header}'" in message
    else:
        assert whole == answer.content


def test_an_empty_file_has_no_range() -> None:
    assert (0, 0) == parse_range("", 0)
    assert parse_range("bytes=0-", 0) is None


def test_conditions(hub: ServedHub, whole: bytes) -> None:
    tag = hub.http.head(FILE).headers["etag"]
    get = hub.http.get

    assert 304 == get(FILE, headers={"If-None-Match": f'"x", {tag}'}).status_code
    assert 200 == get(FILE, headers={"If-None-Match": '"x"'}).status_code
    part = {"Range": "bytes=0-9"}
    assert whole[:10] == get(FILE, headers=part | {"If-Range": tag}).content
    assert whole == get(FILE, headers=part | {"If-Range": '"x"'}).content
    other = hub.http.head(f"/{NAME}/resolve/main/model.safetensors")
    assert tag != other.headers["etag"]


@pytest.mark.parametrize(
    "path",
    [
        f"/{NAME}/resolve/best/../../../etc/passwd",
        f"/{NAME}/resolve/best/..%2f..%2fetc%2fpasswd",
        f"/{NAME}/resolve/best/%2e%2e/%2e%2e/etc/passwd",
        f"/{NAME}/resolve/best/a%00b",
        f"/{NAME}/resolve/best/" + "a" * 30_000,
        f"/{NAME}/resolve/" + "a" * 30_000 + "/config.json",
        f"/{NAME}/resolve/refs%2Fpr%2F1/config.json",
        f"/{NAME}/resolve/%00/config.json",
        "/..%2f..%2f/x/resolve/main/config.json",
        "/%00/x/resolve/main/config.json",
        f"/api/models/{NAME}/tree/best/..%2f..",
        f"/api/models/{'n' * 30_000}/x",
        "/api/models/prod/llama-8b@best",
        "/api/models/%F0%9F%98%80/x",
        "/api/models",
        "/static/x",
    ],
)
def test_hostile_paths_are_not_found(hub: ServedHub, path: str) -> None:
    with socket.create_connection(("127.0.0.1", hub.port), timeout=30) as connection:
        headers = f"Host: localhost\r\nAuthorization: Bearer {hub.token}\r\n"
        request = f"GET {path} HTTP/1.1\r\n{headers}Connection: close\r\n\r\n"
        connection.sendall(request.encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))

    assert answer.split(b" ")[1] in (b"404", b"400")
    assert b"root:" not in answer


def test_a_head_that_never_ends_is_rejected(hub: ServedHub) -> None:
    with socket.create_connection(("127.0.0.1", hub.port), timeout=30) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(b"GET /" + b"a" * (1 << 20))
        answer = b""
        with contextlib.suppress(OSError):
            answer = connection.recv(1 << 16)

    assert answer == b"" or answer.split(b" ")[1] == b"400"


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "POST", "OPTIONS"])
def test_nothing_is_changed(hub: ServedHub, method: str) -> None:
    for path in (FILE, f"/api/models/{NAME}"):
        answer = hub.http.request(method, path)
        assert 405 == answer.status_code
        assert "error" in answer.json()


def test_a_large_form_is_rejected(hub: ServedHub) -> None:
    path = f"/api/models/{NAME}/paths-info/best"

    large = hub.http.post(path, content=b"paths=" + b"a" * (2 << 20))
    many = hub.http.post(path, content=b"paths=a&" * 5000)
    other = hub.http.post(path, content=b"\xff\xfe")

    assert [413, 400, 400] == [a.status_code for a in (large, many, other)]


def test_another_host_is_denied(hub: ServedHub) -> None:
    answer = hub.http.get(f"/api/models/{NAME}", headers={"Host": "evil.example"})

    assert 403 == answer.status_code


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[Path, store.Client]]:
    """A store of this test, and its client."""
    with store.connect(tmp_path.as_uri()) as client:
        client.run(NAME).save(300, model()).result()
        client.run(NAME).tags.set("best", 300)
        yield tmp_path, client


def damage(root: Path, client: store.Client, key: str) -> None:
    """Flips a bit of the last chunk of a leaf."""
    reader = get_reader(client.run(NAME).open(300))
    chunk = reader.tree.first_chunk[reader.by_key[key] + 1] - 1
    places = reader.manifest.places
    file = root / RunPaths(RunName.parse(NAME)).pool / places.files[places.file[chunk]]
    flip(file, int(places.offset[chunk] + places.length[chunk]) - 1)


def test_damage_never_gives_a_whole_file(
    own: tuple[Path, store.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, client = own
    damage(root, client, "params/half")
    monkeypatch.setattr(served_files, "WINDOW_BYTES", 500)

    with ServedHub(client) as hub:
        with hub.http.stream("GET", FILE) as answer:
            assert 200 == answer.status_code
            with pytest.raises(httpx.RemoteProtocolError):
                answer.read()
        failed = hub.http.get(FILE, headers={"Range": "bytes=-10"})
        assert 206 == hub.http.get(FILE, headers={"Range": "bytes=0-700"}).status_code

    assert 500 == failed.status_code
    assert "params/half" in failed.json()["error"]


def test_a_deleted_checkpoint_is_not_found(own: tuple[Path, store.Client]) -> None:
    _, client = own
    with ServedHub(client) as hub:
        commit = hub.http.get(f"/api/models/{NAME}").json()["sha"]
        client.run(NAME).tags.delete("best")
        client.run(NAME).delete(300)
        answers = [
            hub.http.head(f"/{NAME}/resolve/{revision}/model.safetensors")
            for revision in ("300", "best", commit, "main")
        ]

    assert [404] * 4 == [answer.status_code for answer in answers]
    assert {"RevisionNotFound"} == {a.headers["x-error-code"] for a in answers}


def test_a_caller_without_a_role_is_denied(tmp_path: Path) -> None:
    with restricted(tmp_path) as (address, policies):
        policies.policy = Policy(anonymous="admin")
        with store.connect(address) as client, ServedHub(client) as hub:
            client.run(NAME).save(300, model()).result()
            file = f"/{NAME}/resolve/main/model.safetensors"
            assert 200 == hub.http.get(file).status_code

            policies.policy = Policy()
            denied = hub.http.get(file)

    assert denied.status_code in (401, 403, 404)
    assert b"params" not in denied.content


def test_the_first_bytes_come_soon(hub: ServedHub) -> None:
    hub.http.head(FILE)
    since = time.perf_counter()

    with hub.http.stream("GET", FILE) as answer:
        next(answer.iter_raw(1))
        seconds = time.perf_counter() - since

    assert seconds < 1  # CI is slow; 0.1 is what the notes of the stage ask for


def test_a_client_that_goes_away_frees_its_slot(tmp_path: Path) -> None:
    with store.connect(tmp_path.as_uri()) as client:
        client.run(NAME).save(1, {"w": np.zeros(24 << 20, np.uint8)}).result()
        with ServedHub(client) as hub:
            file = f"/{NAME}/resolve/main/model.safetensors"
            for _ in range(10):
                with hub.http.stream("GET", file) as answer:
                    next(answer.iter_raw())
            assert (24 << 20) < len(hub.http.get(file).content)


def test_the_checkpoint_is_held_while_its_bytes_are_read(tmp_path: Path) -> None:
    with store.connect(tmp_path.as_uri()) as client:
        run = client.run(NAME)
        run.save(1, {"w": np.zeros(96 << 20, np.uint8)}).result()
        with ServedHub(client) as hub:
            file = f"/{NAME}/resolve/main/model.safetensors"
            with hub.http.stream("GET", file) as answer:
                pieces = answer.iter_raw(1 << 20)
                next(pieces)
                next(pieces)
                held = [*run.holds.list()]
                for _ in pieces:
                    pass

            assert 1 == len(held)
            assert [] == [*run.holds.list()]


@pytest.mark.emulated
def test_the_header_is_sent_without_a_hold(gcs: FakeGcs) -> None:
    with store.connect(gcs_root()) as client:
        client.run(NAME).save(1, {"w": np.ones(9, np.float32)}).result()
        file = f"/{NAME}/resolve/main/model.safetensors"
        with ServedHub(client) as hub:
            length = int(hub.http.head(file).headers["content-length"]) - 36
            gcs.clear()
            text = f"bytes=0-{length - 1}"
            answer = hub.http.get(file, headers={"Range": text})

    assert length == len(answer.content)
    assert [] == [entry.target for entry in gcs.log if "hold" in entry.target]


@pytest.mark.emulated
def test_a_range_reads_the_bytes_that_it_needs(gcs: FakeGcs) -> None:
    chunk = 64 << 10
    array = np.random.default_rng(0).integers(0, 255, (64, chunk), np.uint8)
    with store.connect(gcs_root()) as client:
        client.run(NAME).save(1, {"a": array, "b": array[::-1].copy()}).result()
        chunks = client.run(NAME).open(1).leaves["a"].chunk_shape
        with ServedHub(client) as hub:
            file = f"/{NAME}/resolve/main/model.safetensors"
            whole = hub.http.get(file).content
            gcs.clear()
            start, size = len(whole) // 3, len(whole) // 2
            text = f"bytes={start}-{start + size - 1}"
            found = hub.http.get(file, headers={"Range": text}).content

            assert whole[start : start + size] == found
            most = 1.05 * size + 2 * chunks[0] * chunks[1] + 64 * 1024
            assert gcs.sent_bytes <= most


@pytest.mark.emulated
def test_head_and_the_api_read_no_chunk(gcs: FakeGcs) -> None:
    state = {"w": np.random.default_rng(0).integers(0, 255, 4 << 20, np.uint8)}
    with store.connect(gcs_root()) as client:
        client.run(NAME).save(1, state).result()
        file = f"/{NAME}/resolve/main/model.safetensors"
        with ServedHub(client) as hub:
            gcs.clear()
            assert 200 == hub.http.head(file).status_code
            assert 200 == hub.http.get(f"/api/models/{NAME}").status_code
            assert hub.http.get(file, headers={"Range": "bytes=0-7"}).content
            before = gcs.sent_bytes
            assert hub.http.get(file).content.endswith(state["w"].tobytes())

            assert before < 256 << 10
            assert gcs.sent_bytes > 4 << 20


@pytest.mark.emulated
def test_a_chunk_of_an_array_sharded_by_columns_is_read_once(
    gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_files, "WINDOW_BYTES", 256 << 10)
    devices = np.array(jax.devices()[:4])
    sharding = NamedSharding(Mesh(devices, ("x",)), PartitionSpec(None, "x"))
    array = np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32)
    with store.connect(gcs_root()) as client:
        client.run(NAME).save(1, {"w": jax.device_put(array, sharding)}).result()
        with ServedHub(client) as hub:
            file = f"/{NAME}/resolve/main/model.safetensors"
            hub.http.head(file)
            gcs.clear()
            found = hub.http.get(file).content

            assert found.endswith(array.tobytes())
            assert gcs.sent_bytes <= 1.05 * len(found)


@pytest.mark.parametrize(
    "sent", [None, "", "Bearer", "Bearer wrong", "Basic eDp5", "Bearer {token}x", "é"]
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_a_request_without_the_token_learns_nothing(
    hub: ServedHub, sent: str | None, method: str
) -> None:
    """Other users of the machine do not learn which runs exist, either."""
    headers = {}
    if sent is not None:
        headers = {b"Authorization": sent.format(token=hub.token).encode("latin-1")}
    with httpx.Client(base_url=hub.address, headers=headers, verify=False) as other:
        answers = [
            other.request(method, path)
            for path in (
                *(FILE, f"/api/models/{NAME}"),
                *("/prod/absent/resolve/main/x", "/x"),
            )
        ]

    assert {401} == {each.status_code for each in answers}
    assert 1 == len({each.content for each in answers})
    assert {"Bearer"} == {each.headers["www-authenticate"] for each in answers}
