"""Arrays that TensorStore reads where it has no driver: in repositories of a Hub, and
in the memory of a process. Every format that is read on a disk is read there.
"""

import gc
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
import tensorstore as ts
from huggingface_hub import constants

import storesvc_client as store
from storesvc_client._foreign import loopback
from storesvc_client._foreign.locations import open_location
from tests.foreign.hub_server import Fault, Hub, serving
from tests.foreign.orbax_checkpoints import WRITERS
from tests.foreign.test_round_trips import all_bits
from tests.foreign.written_files import files_below, to_memory
from tests.foreign.written_formats import FORMATS
from tests.support.examples import sampled

ROWS = np.arange(64 * 256, dtype=np.float32).reshape(64, 256)

TREE = {"a": {"w": ROWS}, "b": ROWS + 1}

TOKEN = "hf_secret"

TENSORSTORE = [
    name for name, each in FORMATS.items() if "safetensors" not in (each.kind, name)
]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    with serving() as found:
        yield found


@pytest.fixture
def repository(hub: Hub, tmp_path: Path) -> Hub:
    """A Hub with step 3 of Orbax, arrays as files of zarr, in ``org/model``."""
    WRITERS["v0-files"](tmp_path / "run" / "3", TREE)
    hub.commit("org/model", files_below(tmp_path / "run"))
    return hub


def opened(
    hub: Hub, url: str = "orbax:hf://org/model", token: str | None = None
) -> store.ForeignRun:
    """Returns the checkpoints at a URL; a token of the developer is not sent."""
    options = {"endpoint": hub.url, "token": token or False}
    return store.open_foreign(url, storage_options=options)


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(TENSORSTORE, every=18, checked_every=6))
def test_each_format_is_read_as_on_a_disk(hub: Hub, tmp_path: Path, name: str) -> None:
    kind, folder = FORMATS[name].kind, tmp_path / "written"
    FORMATS[name].write(folder)
    files = files_below(folder)
    hub.commit("org/model", files)
    to_memory(files, f"memory://{name}")
    expected = store.open_foreign(f"{kind}:{folder}")
    trusted: Any = {"trust_uncommitted": True} if kind == "orbax" else {}

    for run in (
        opened(hub, f"{kind}:hf://org/model"),
        store.open_foreign(f"{kind}:memory://{name}", **trusted),
    ):
        assert list(expected.steps()) == list(run.steps())
        assert all_bits(expected.restore()) == all_bits(run.restore())


def test_only_the_files_of_the_leaves_that_are_selected_are_read(
    repository: Hub,
) -> None:
    checkpoint = opened(repository).open()
    repository.requests.clear()

    found = checkpoint.restore(select="b")

    assert ROWS.nbytes == found["b"].nbytes
    paths = [unquote(each.path) for each in repository.requests]
    assert any(re.search(r"file=3/.*\bb/0", path) for path in paths), paths
    assert not [path for path in paths if "a.w/" in path]


def test_all_arrays_are_of_the_commit_that_was_found_first(
    repository: Hub, tmp_path: Path
) -> None:
    WRITERS["v0-files"](tmp_path / "other" / "3", {**TREE, "b": ROWS + 2})
    other = files_below(tmp_path / "other")
    run = opened(repository)
    assert [3] == list(run.steps())
    repository.on_request = lambda path: repository.commit("org/model", other)

    assert all_bits(TREE) == all_bits(run.restore())


def test_only_the_hub_gets_the_token(repository: Hub) -> None:
    repository.repositories["org/model"].token = TOKEN

    assert all_bits(TREE) == all_bits(opened(repository, token=TOKEN).restore())

    expected = {"hub": {f"Bearer {TOKEN}"}, "storage": {None}}
    assert expected == repository.authorizations()


@pytest.mark.slow  # the library waits for a second
@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_hub_is_read_again(repository: Hub, status: int) -> None:
    fault = Fault(pattern="file=3.*b%2F0", status=status, headers={"Retry-After": "0"})
    repository.faults = [fault]
    assert all_bits(TREE) == all_bits(opened(repository).restore())
    assert [] == repository.faults


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (Fault(pattern="", status=410), store.UnavailableError, "410 Gone"),
        (Fault(pattern="", status=403), store.PreconditionError, "access denied"),
        (Fault(pattern="", is_honest=True), store.DataLossError, "got a file that en"),
    ],
)
def test_a_read_that_fails_names_the_file_of_the_location(
    repository: Hub, fault: Fault, error: type[store.StoreError], message: str
) -> None:
    run = opened(repository).open()
    repository.faults = [replace(fault, pattern="file=3.*b%2F0")]

    with pytest.raises(error, match=message) as caught:
        run.restore()

    assert str(caught.value).startswith("hf://org/model/3/")
    base = open_location("memory://").kvstore()["base_url"]
    assert base not in str(caught.value)
    assert "signature" not in str(caught.value)
    assert [] == repository.faults
    assert all_bits(TREE) == all_bits(run.restore())


def test_an_array_without_one_of_its_files_is_damaged(
    hub: Hub, repository: Hub
) -> None:
    sha = repository.repositories["org/model"].branches["main"]
    files = repository.repositories["org/model"].commits[sha]
    (lost,) = [path for path in files if re.search(r"b/0(/0|\.0)$", path)]
    hub.commit("org/lost", {k: data for k, data in files.items() if k != lost})

    with pytest.raises(
        store.DataLossError,
        match=r"leaf 'b': its stored bytes are .* hf://org/lost/3/b",
    ) as caught:
        opened(hub, "orbax:hf://org/lost").restore()
    assert "127.0.0.1" not in str(caught.value)


def test_large_metadata_is_rejected_unread(hub: Hub, repository: Hub) -> None:
    sha = repository.repositories["org/model"].branches["main"]
    files = dict(repository.repositories["org/model"].commits[sha])
    (path,) = [each for each in files if re.search(r"\bb/\.zarray$", each)]
    hub.commit("org/large", {**files, path: files[path] + b" " * 1_000_000})
    hub.requests.clear()

    with pytest.raises(store.DataLossError, match="at most 262144 stored bytes"):
        opened(hub, "orbax:hf://org/large").open()
    assert max(each.body_bytes for each in hub.requests) < 100_000


@pytest.mark.parametrize(
    "field",
    ["zarr_format", "shape", "chunks", "dtype", "compressor", "fill_value", "order"],
)
def test_metadata_without_a_field_is_rejected_as_on_a_disk(
    repository: Hub, tmp_path: Path, field: str
) -> None:
    (path,) = (tmp_path / "run/3").glob("**/b/.zarray")
    fields = json.loads(path.read_text())
    del fields[field]
    path.write_text(json.dumps(fields))
    url = f"memory://lacks-{field}"
    to_memory(files_below(tmp_path / "run"), url)

    for where in f"{tmp_path}/run", url:
        with pytest.raises(store.DataLossError, match=f"leaf 'b'.*{field}"):
            store.open_foreign(f"orbax:{where}", trust_uncommitted=True).open(3)


def test_the_manifest_of_a_database_of_a_commit_is_read_once(
    hub: Hub, tmp_path: Path
) -> None:
    WRITERS["v0-pytree"](tmp_path / "run" / "3", {f"x{n}": ROWS + n for n in range(9)})
    hub.commit("org/model", files_below(tmp_path / "run"))
    checkpoint = opened(hub).open()
    hub.requests.clear()

    for n in range(9):
        checkpoint.restore(select=f"x{n}")

    paths = [each.path for each in hub.requests]
    assert paths
    assert [] == [path for path in paths if "manifest.ocdbt" in path]


class Kept:
    """An object whose life is watched."""


@pytest.mark.slow
def test_an_error_of_a_location_keeps_no_frames(repository: Hub) -> None:
    run = opened(repository).open()
    fault = Fault(pattern="file=3.*b%2F0", status=410)

    def fail() -> "weakref.ref[Kept]":
        watched = Kept()
        with pytest.raises(store.UnavailableError):
            run.restore()
        return weakref.ref(watched)

    for _ in range(2):
        repository.faults = [fault]
        found = fail()
        gc.collect()
        assert found() is None


def test_only_texts_of_the_server_name_its_errors() -> None:
    open_location("memory://").kvstore()
    text = loopback._Server.process_server().failed(store.UnavailableError("a: b"))

    assert "a: b" == str(loopback.error_in(f"CURL: {text} [url]"))
    assert loopback.error_in(f"/tmp/storesvc error {'0' * 32}-1/.zarray") is None


def test_a_step_of_orbax_in_memory_needs_the_mark_of_a_finished_one() -> None:
    to_memory({"3/_CHECKPOINT_METADATA": b"{}"}, "memory://marks")

    with pytest.raises(store.NotFoundError, match=r"it has no commit_success\.txt"):
        store.open_foreign("orbax:memory://marks").open(3)


NAMES = ["a b", "50%", "%20", "c#d?e&f", "ü", "+;,'\"", "d/e"]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_read_as_they_are(name: str) -> None:
    to_memory({f"{name}/{name}": b"0123456789"}, "memory://names")
    location = open_location("memory://names")
    files = ts.KvStore.open(location.kvstore(name)).result()

    assert b"0123456789" == files.read(name).result().value
    assert "missing" == files.read(f"{name}x").result().state
    for asked, expected in (
        ((2, 5), b"234"),
        ((7, None), b"789"),
        ((-3, None), b"789"),
    ):
        found = files.read(name, byte_range=slice(*asked)).result()
        assert expected == found.value


@pytest.mark.parametrize(
    "path", ["", "x/a", "{folder}", "{folder}/", "{folder}/b", "{folder}/../a"]
)
def test_only_files_at_the_path_of_a_location_are_served(path: str) -> None:
    to_memory({"a": b"0", "../a": b"1"}, "memory://served")
    spec = open_location("memory://served").kvstore()
    url = f"{spec['base_url']}/{path.format(folder=spec['path'].strip('/'))}"

    with pytest.raises(urllib.error.HTTPError, match=r"404|403"):
        urllib.request.urlopen(url)


@pytest.mark.parametrize("variable", ["http_proxy", "ALL_PROXY"])
def test_a_proxy_for_loopback_is_rejected(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for other in ("http_proxy", "all_proxy", "ALL_PROXY", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    location = open_location("memory://proxied")

    added = r"add 127\.0\.0\.1 to the variable"
    with pytest.raises(store.PreconditionError, match=f"{variable}; {added} NO_PROXY$"):
        location.kvstore()
    monkeypatch.setenv("no_proxy", "localhost")
    with pytest.raises(store.PreconditionError, match=f"{variable}; {added} no_proxy$"):
        location.kvstore()

    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    assert "http" == location.kvstore()["driver"]


@pytest.mark.slow
def test_storectl_imports_arrays_of_a_repository(
    repository: Hub, tmp_path: Path
) -> None:
    root = (tmp_path / "store").as_uri()
    call = [sys.executable, "-m", "storesvc_client.cli", "--store", root, "import"]
    done = subprocess.run(
        [*call, "orbax:hf://org/model", "prod/x", "--create"],
        env={
            **os.environ,
            "HF_ENDPOINT": repository.url,
            "HF_HUB_DISABLE_TELEMETRY": "1",
        },
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert (0, "storectl: created run prod/x\n") == (done.returncode, done.stderr)
    with store.connect(root) as client:
        run = client.run("prod/x")
        assert all_bits(TREE) == all_bits(run.restore(3))
        sha = repository.repositories["org/model"].branches["main"]
        assert sha == run.checkpoint(3).labels["huggingface.revision"]
