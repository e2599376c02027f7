"""The libraries of Hugging Face read checkpoints over a real socket."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import HfApi, HfFileSystem, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import safe_open

import storesvc_client as store
from storesvc_client._hub.snapshots import View
from storesvc_client._restore.mapped import load_rules
from tests.export.test_mapped_exports import STATE, UNSTACKED, expected
from tests.hub.conftest import CONFIG, model
from tests.hub.served import ServedHub

NAME = "prod/llama-8b"


def read_all(file: Path) -> dict[str, Any]:
    """Returns the tensors of a file, read by safetensors."""
    with safe_open(file, framework="np") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def is_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Returns whether two files have the same tensors, bit by bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and one[name].tobytes() == other[name].tobytes()
        for name in one
    )


def flat(seed: int = 0) -> dict[str, Any]:
    """Returns the tensors of ``model`` by name."""
    params = model(seed)["params"]
    layers = params.pop("layers")
    named = {f"params.{name}": value for name, value in params.items()}
    return named | {"params.layers.qkv": layers["qkv"]}


@pytest.fixture
def api(hub: ServedHub) -> HfApi:
    """The client of the Hub."""
    return HfApi(endpoint=hub.address, token=hub.token)


def test_a_snapshot_has_the_bytes_of_the_export(
    hub: ServedHub, opened: store.Client, tmp_path: Path
) -> None:
    exported = tmp_path / "exported"
    opened.run(NAME).export("best", f"safetensors:{exported}")

    folder = snapshot_download(
        NAME, revision="best", endpoint=hub.address, cache_dir=tmp_path, token=hub.token
    )

    found = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    assert {
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "notes",
        "tokenizer_config.json",
    } == found.keys()
    assert found == {path.name: path.read_bytes() for path in exported.iterdir()}
    assert json.loads(found["config.json"]) == CONFIG
    assert b"a text" == found["notes"]
    assert is_equal(flat(), read_all(Path(folder) / "model.safetensors"))


@pytest.mark.parametrize(
    ("revision", "seed"),
    [("main", 1), ("latest", 1), ("best", 0), ("300", 0), ("400", 1)],
)
def test_a_revision_is_a_tag_or_a_step(
    hub: ServedHub, tmp_path: Path, revision: str, seed: int
) -> None:
    file = hf_hub_download(
        NAME,
        "model.safetensors",
        revision=revision,
        endpoint=hub.address,
        cache_dir=tmp_path,
        token=hub.token,
    )

    assert is_equal(flat(seed), read_all(Path(file)))


def test_a_second_download_is_answered_by_the_cache(
    hub: ServedHub, tmp_path: Path
) -> None:
    def download() -> str:
        return hf_hub_download(
            NAME,
            "model.safetensors",
            endpoint=hub.address,
            cache_dir=tmp_path,
            token=hub.token,
        )

    first = download()
    changed = Path(first).stat().st_mtime_ns

    assert first == download()
    assert changed == Path(first).stat().st_mtime_ns


def test_the_api_tells_commit_and_files(api: HfApi) -> None:
    main, best = api.model_info(NAME), api.model_info(NAME, revision="best")

    assert main.sha is not None
    assert best.sha is not None
    assert 40 == len(best.sha)
    assert main.sha != best.sha
    assert ["model.safetensors"] == api.list_repo_files(NAME)
    assert [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "notes",
        "tokenizer_config.json",
    ] == sorted(api.list_repo_files(NAME, revision=best.sha))
    sizes = api.model_info(NAME, revision="best", files_metadata=True).siblings
    assert sizes is not None
    assert all(each.size for each in sizes)
    paths = api.get_paths_info(NAME, ["config.json", "absent"], revision="best")
    assert ["config.json"] == [path.path for path in paths]


def test_a_commit_that_was_given_out_by_another_hub_is_found(
    opened: store.Client, api: HfApi
) -> None:
    commit = api.model_info(NAME, revision="best").sha
    with ServedHub(opened) as another:
        found = HfApi(endpoint=another.address, token=another.token).model_info(
            NAME, revision=commit
        )

    assert commit == found.sha


def test_its_errors_are_those_of_the_hub(api: HfApi, tmp_path: Path) -> None:
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("prod/absent")
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("llama-8b")
    for revision in ("absent", "7", "0" * 40, "f" * 40):
        with pytest.raises(RevisionNotFoundError):
            api.model_info(NAME, revision=revision)
    with pytest.raises(EntryNotFoundError):
        api.hf_hub_download(NAME, "absent.json", cache_dir=tmp_path)


def test_a_file_system_reads_ranges(
    hub: ServedHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = hub.http.get(f"/{NAME}/resolve/best/model.safetensors").content
    files = HfFileSystem(
        endpoint=hub.address, token=hub.token, skip_instance_cache=True
    )

    with files.open(f"{NAME}@best/model.safetensors", block_size=1000) as file:
        file.seek(500)
        part = file.read(1500)
        file.seek(-10, 2)
        end = file.read()

    assert whole[500:2000] == part
    assert whole[-10:] == end


def test_shards_have_an_index(opened: store.Client, tmp_path: Path) -> None:
    exported = tmp_path / "exported"
    opened.run(NAME).export(400, f"safetensors:{exported}", max_shard_bytes=1200)

    with ServedHub(opened, View(shard_bytes=1200)) as hub:
        folder = snapshot_download(
            NAME, endpoint=hub.address, cache_dir=tmp_path, token=hub.token
        )

    found = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    assert found == {path.name: path.read_bytes() for path in exported.iterdir()}
    assert "model.safetensors.index.json" in found
    assert len(found) > 2


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[store.Client]:
    """A client of a store with a model whose layers are stacked."""
    with store.connect((tmp_path / "mapped").as_uri()) as client:
        client.run(NAME).save(1, STATE, items={"config": CONFIG}).result()
        yield client


def test_a_mapping_makes_the_files(mapped: store.Client, tmp_path: Path) -> None:
    with (
        ServedHub(mapped) as plain,
        ServedHub(mapped, View(rules=load_rules(UNSTACKED))) as hub,
    ):
        folder = snapshot_download(
            NAME, endpoint=hub.address, cache_dir=tmp_path, token=hub.token
        )
        commits = {
            HfApi(endpoint=each.address, token=each.token).model_info(NAME).sha
            for each in (plain, hub)
        }
        file = "/prod/llama-8b/resolve/main/model.safetensors"
        tags = {each.http.head(file).headers["etag"] for each in (plain, hub)}

    assert is_equal(
        {name: np.ascontiguousarray(each) for name, each in expected(".").items()},
        read_all(Path(folder) / "model.safetensors"),
    )
    assert (Path(folder) / "config.json").exists()
    assert 2 == len(commits) == len(tags)


def test_selected_leaves_are_served(mapped: store.Client, tmp_path: Path) -> None:
    with ServedHub(mapped, View(select=("params/**",))) as hub:
        file = hf_hub_download(
            NAME,
            "model.safetensors",
            endpoint=hub.address,
            cache_dir=tmp_path,
            token=hub.token,
        )

    assert {"params.layers.qkv", "params.embed"} == read_all(Path(file)).keys()


def test_a_leaf_that_safetensors_cannot_hold_is_named(tmp_path: Path) -> None:
    with store.connect(tmp_path.as_uri()) as client:
        client.run(NAME).save(1, {"w": np.ones(2), "step": 3, "text": "a"}).result()
        with ServedHub(client) as hub:
            answer = hub.http.get(f"/api/models/{NAME}")

    assert 409 == answer.status_code
    assert "step" in answer.json()["error"]
    assert "text" in answer.json()["error"]
    assert "--select" in answer.json()["error"]
