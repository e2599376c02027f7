"""Checkpoints in repositories of a Hugging Face Hub are read in place, at one commit.

The Hub is a real HTTP server on loopback; huggingface_hub calls it as it calls the real
one. ``storectl`` finds it by HF_ENDPOINT, as users configure it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from numpy.typing import NDArray
from safetensors.numpy import save

import storesvc_client as store
from storesvc_client._foreign.locations import open_location
from tests.foreign.hub_server import Fault, Hub, serving
from tests.foreign.written_files import files_below

GOLDEN = Path(__file__).parents[1] / "golden" / "foreign"

TOKEN = "hf_secret"

TENSOR_BYTES = 16 << 10

NOW = {"Retry-After": "0"}


def weights(offset: int = 0) -> dict[str, NDArray[Any]]:
    """Returns four tensors of ``TENSOR_BYTES``, which differ."""
    numbers = np.arange(TENSOR_BYTES // 4, dtype=np.float32).reshape(64, -1)
    return {f"layers.{layer}.w": numbers + layer + offset for layer in range(4)}


def sharded(offset: int = 0) -> dict[str, bytes]:
    """Returns the files of a model: two shards, their index, and its config."""
    tensors = weights(offset)
    names = sorted(tensors)
    shards = {"model-1-of-2.safetensors": names[:2]}
    shards["model-2-of-2.safetensors"] = names[2:]
    weight_map = {name: file for file, some in shards.items() for name in some}
    index = {"metadata": {"total_size": 4 * TENSOR_BYTES}, "weight_map": weight_map}
    return {
        **{file: save({n: tensors[n] for n in some}) for file, some in shards.items()},
        "model.safetensors.index.json": json.dumps(index).encode(),
        "config.json": b'{"hidden_size": 64}',
        "README.md": b"# A model",
    }


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with ``org/model``."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    with serving() as found:
        found.commit("org/model", sharded())
        yield found


@pytest.fixture
def storectl(hub: Hub, tmp_path: Path) -> Callable[..., Any]:
    """Runs storectl in a process, over a store of its own; returns the process."""

    def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        root = (tmp_path / "store").as_uri()
        home = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        command = [sys.executable, "-m", "storesvc_client.cli", "--store", root]
        return subprocess.run(
            [*command, *arguments],
            env={**os.environ, **home, "HF_ENDPOINT": hub.url, **variables},
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return call


def opened(
    hub: Hub, url: str = "safetensors:hf://org/model", token: str | None = None
) -> store.ForeignRun:
    """Returns the checkpoints at a URL; a token of the developer is not sent."""
    return store.open_foreign(
        url,
        storage_options={"endpoint": hub.url, "token": token or False},
        keep_names=url.startswith("safetensors:"),
    )


def tensors_of(found: store.ForeignCheckpoint) -> dict[str, NDArray[Any]]:
    """Returns the tensors of a checkpoint by their names."""
    return {leaf.key: array for leaf, array in found.read(found.leaves)}


def read_in_place(
    hub: Hub, url: str = "hf://org/model", token: str | None = None
) -> dict[str, NDArray[Any]]:
    """Returns the tensors of a location by their names."""
    return tensors_of(opened(hub, f"safetensors:{url}", token).open())


def assert_equal(
    expected: Mapping[str, NDArray[Any]], found: Mapping[str, NDArray[Any]]
) -> None:
    """Compares tensors as bytes."""
    assert {k: v.tobytes() for k, v in expected.items()} == {
        k: v.tobytes() for k, v in found.items()
    }


@pytest.mark.slow
def test_storectl_lists_and_imports_the_shards_of_a_repository(
    hub: Hub, storectl: Callable[..., Any], tmp_path: Path
) -> None:
    sha = hub.repositories["org/model"].branches["main"]
    listed = storectl("ls", "safetensors:hf://org/model")
    assert (0, "") == (listed.returncode, listed.stderr)
    assert f"huggingface.revision={sha}" in listed.stdout
    place = "safetensors:hf://org/model"
    done = storectl("import", place, "prod/x", "--create", "--keep-names")
    assert (0, "storectl: created run prod/x\n") == (done.returncode, done.stderr)
    with store.connect((tmp_path / "store").as_uri()) as client:
        run = client.run("prod/x")
        copy = run.open(0)
        found = {leaf.key: array for leaf, array in copy.read(copy.leaves)}
        assert_equal(weights(), found)
        assert "org/model" == copy.info.labels["huggingface.repository"]
        assert sha == copy.info.labels["huggingface.revision"]
        assert {"hidden_size": 64} == json.loads(run.items(0)["config"])
        assert run.verify(0).ok


@pytest.mark.slow
def test_a_revision_follows_the_name_of_the_repository(hub: Hub) -> None:
    sha = hub.commit("org/model", sharded(10), branch="tuned")
    for revision in ("tuned", sha):
        assert_equal(weights(10), read_in_place(hub, f"hf://org/model@{revision}"))
    assert_equal(weights(), read_in_place(hub, "hf://org/model@main"))


@pytest.mark.parametrize("repository", ["datasets/org/data", "org/other"])
def test_a_folder_of_a_repository_is_a_location(hub: Hub, repository: str) -> None:
    files = {f"runs/checkpoint-7/{name}": data for name, data in sharded().items()}
    hub.commit(repository, files)
    run = opened(hub, f"safetensors:hf://{repository}/runs")
    assert [7] == list(run.steps())
    assert_equal(weights(), read_in_place(hub, f"hf://{repository}/runs/checkpoint-7"))


def test_a_restore_reads_the_ranges_that_it_needs_and_nothing_ahead(hub: Hub) -> None:
    checkpoint = opened(hub).open()
    before = hub.read_bytes("safetensors$")
    found = checkpoint.restore(select="layers.2.w")
    assert weights()["layers.2.w"].tobytes() == np.asarray(*found.values()).tobytes()
    assert TENSOR_BYTES == hub.read_bytes("safetensors$") - before


def test_all_that_is_read_is_of_the_commit_that_was_found_first(hub: Hub) -> None:
    old = opened(hub)
    first = hub.repositories["org/model"].branches["main"]
    assert [0] == list(old.steps())
    hub.commit("org/model", sharded(10))
    found = old.open()
    assert first == found.info.labels["huggingface.revision"]
    assert_equal(weights(), tensors_of(found))
    assert_equal(weights(10), read_in_place(hub))


def test_a_branch_that_moves_at_every_request_does_not_mix_commits(hub: Hub) -> None:
    moved = iter(range(1, 100))
    hub.on_request = lambda path: hub.commit("org/model", sharded(next(moved)))
    found = read_in_place(hub)
    assert next(moved) > 5
    offset = int(found["layers.0.w"][0, 0])
    assert_equal(weights(offset), found)


@pytest.mark.slow
def test_a_private_repository_is_read_with_a_token_that_only_the_endpoint_gets(
    hub: Hub, storectl: Callable[..., Any]
) -> None:
    hub.repositories["org/model"].token = TOKEN
    place = "safetensors:hf://org/model"
    denied = storectl("ls", place)
    assert (1, 1) == (denied.returncode, denied.stderr.count("\n"))
    assert (
        f"hf://org/model: expected a public repository at {hub.url}, or a token that "
        "may read it, got no token (status 401); check its name, and set HF_TOKEN"
    ) in denied.stderr
    other = storectl("ls", place, HF_TOKEN="hf_other")
    assert (1, 1) == (other.returncode, other.stderr.count("\n"))
    assert (
        f"expected a repository at {hub.url} that the token may read, found none"
    ) in other.stderr

    hub.requests.clear()
    done = storectl("import", place, "prod/x", "--create", HF_TOKEN=TOKEN)
    assert (0, "storectl: created run prod/x\n") == (done.returncode, done.stderr)
    expected = {"hub": {f"Bearer {TOKEN}"}, "storage": {None}}
    assert expected == hub.authorizations()


def test_a_token_that_the_hub_rejects_is_an_error(hub: Hub) -> None:
    hub.faults = [Fault(pattern="/api/models", status=401)]
    with pytest.raises(
        store.PreconditionError, match=r"got a token that may not \(status 401\)"
    ):
        read_in_place(hub, token=TOKEN)


def test_a_gated_repository_is_access_denied(hub: Hub) -> None:
    hub.repositories["org/model"].is_gated = True
    with pytest.raises(store.PreconditionError, match=r"index\.json: access denied"):
        read_in_place(hub)


def test_an_error_does_not_quote_the_signature_of_a_redirect(hub: Hub) -> None:
    hub.faults = [Fault(pattern="file=model-2", status=410)]
    with pytest.raises(store.UnavailableError, match="410 Gone") as caught:
        read_in_place(hub)
    assert "signature" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("hf://org/absent", store.PreconditionError, "got no token .status 401.; "),
        ("hf://org/model@v9", store.NotFoundError, "found none of this name; check wh"),
        # earlier releases ask the server, since some old names have no ORG
        ("hf://model", store.StoreError, "expected (hf://ORG/NAME|a repository at)"),
        ("hf://buckets/org/b", store.InvalidRequestError, "got a bucket, which has no"),
        ("hf://org/model/absent", store.NotFoundError, "expected a file .*.safetenso"),
    ],
)
def test_what_is_not_there_is_named(
    hub: Hub, url: str, error: type[store.StoreError], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_in_place(hub, url)


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_hub_is_asked_for_the_commit_again(hub: Hub, status: int) -> None:
    fault = Fault(pattern="/api/models", status=status, headers=NOW)
    hub.faults = [fault, fault]
    assert_equal(weights(), read_in_place(hub))
    assert [] == hub.faults


def test_a_hub_that_stays_busy_is_unavailable(hub: Hub) -> None:
    hub.faults = [Fault(pattern="/api/models", status=429, headers=NOW)] * 6
    with pytest.raises(
        store.UnavailableError, match=r"hf://org/model: cannot be read \(429 .*Too Many"
    ):
        read_in_place(hub)
    assert [] == hub.faults


@pytest.mark.slow  # the library waits for a second
@pytest.mark.parametrize("pattern", ["/tree/", "/resolve/", "file=model-2"])
@pytest.mark.parametrize(
    "fault", [Fault(pattern="", status=503), Fault(pattern="", status=429, headers=NOW)]
)
def test_a_busy_hub_is_read_again(hub: Hub, pattern: str, fault: Fault) -> None:
    hub.faults = [Fault(pattern=pattern, status=fault.status, headers=fault.headers)]
    assert_equal(weights(), read_in_place(hub))
    assert [] == hub.faults


@pytest.mark.slow  # the library waits for a second
def test_a_body_that_ends_early_is_read_again(hub: Hub) -> None:
    hub.faults = [Fault(pattern="file=model-2")]
    assert_equal(weights(), read_in_place(hub))
    assert [] == hub.faults


def test_fewer_bytes_than_were_requested_are_damage(hub: Hub) -> None:
    hub.faults = [Fault(pattern="file=model-2", is_honest=True)]
    with pytest.raises(
        store.DataLossError,
        match=r"model-2-of-2.safetensors: expected the bytes 0 to 8, got a file that e",
    ):
        read_in_place(hub)


def test_a_hub_that_is_not_there_is_unavailable(hub: Hub) -> None:
    hub.url = "http://127.0.0.1:9"
    with pytest.raises(store.UnavailableError, match="hf://org/model: cannot be read"):
        read_in_place(hub)


def test_safetensors_of_eformer_are_read(hub: Hub) -> None:
    hub.commit("org/easydel", files_below(GOLDEN / "eformer"))
    expected = store.open_foreign(f"eformer:{GOLDEN / 'eformer'}").open(30)
    found = opened(hub, "eformer:hf://org/easydel").open(30)
    assert_equal(tensors_of(expected), tensors_of(found))


def test_a_list_of_several_pages_is_whole(hub: Hub) -> None:
    hub.commit("org/many", {f"folder/{k:02}": b"x" for k in range(10)})
    options = {"endpoint": hub.url, "token": False}
    location = open_location("hf://org/many", storage_options=options)
    assert ["folder/"] == list(location.names())
    assert [f"{k:02}" for k in range(10)] == list(location.names("folder"))
    assert {1} == {location.size(f"folder/{k:02}") for k in range(10)}
