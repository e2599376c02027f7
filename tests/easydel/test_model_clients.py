"""transformers and the streamer of Run:ai load a model through the hub, and from an
export.

The logits equal the saved model's, bit by bit.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import storesvc_client as store
from storesvc_client._hub.snapshots import View

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from tests.hub.served import ServedHub  # noqa: E402 - needs both

NAME = "prod/llama-8b"
LOAD = """
import sys, torch, transformers
place, out, *revision = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(
    place, **({"revision": revision[0]} if revision else {})
)
torch.save(model(torch.arange(10)[None]).logits, out)
assert 7 == model.generation_config.eos_token_id
"""
STREAM = """
import sys, torch
from pathlib import Path
from huggingface_hub import snapshot_download
from runai_model_streamer import SafetensorsStreamer
folder, found = snapshot_download(sys.argv[1], revision=sys.argv[3]), {}
with SafetensorsStreamer() as streamer:
    streamer.stream_files([str(file) for file in Path(folder).glob("*.safetensors")])
    for name, tensor in streamer.get_tensors():
        found[name] = tensor.clone()
torch.save(found, sys.argv[2])
"""


@pytest.fixture(scope="module")
def model() -> Any:
    """A small Llama with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=7,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def client(
    model: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[store.Client]:
    """A store with the model, under the names of transformers."""
    with store.connect(tmp_path_factory.mktemp("store").as_uri()) as client:
        run = client.run(NAME)
        state = {name: value.numpy() for name, value in model.state_dict().items()}
        items = {
            "config": json.loads(model.config.to_json_string(use_diff=False)),
            "generation-config": model.generation_config.to_dict(),
        }
        run.save(3, state, items=items).result()
        run.tags.set("best", 3)
        yield client


def run_client(code: str, place: str, out: Path, *revision: str, **added: str) -> Any:
    """Runs a client in a new process; returns what it wrote."""
    environment = {**os.environ, "HF_HOME": str(out.parent / "home"), **added}
    ran = subprocess.run(
        [sys.executable, "-c", code, place, str(out), *revision],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert 0 == ran.returncode, ran.stderr
    return torch.load(out)


@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000])
def test_transformers_loads_a_revision_of_the_hub(
    client: store.Client, model: Any, tmp_path: Path, shard_bytes: int
) -> None:
    with ServedHub(client, View(shard_bytes=shard_bytes)) as hub:
        settings = {"HF_ENDPOINT": hub.address, "HF_TOKEN": hub.token}
        found = run_client(LOAD, NAME, tmp_path / "logits", "best", **settings)

    assert torch.equal(model(torch.arange(10)[None]).logits, found)


def test_transformers_loads_an_export(
    client: store.Client, model: Any, tmp_path: Path
) -> None:
    client.run(NAME).export("best", f"safetensors:{tmp_path}/model")

    found = run_client(LOAD, str(tmp_path / "model"), tmp_path / "logits")

    assert torch.equal(model(torch.arange(10)[None]).logits, found)


def test_the_streamer_reads_what_was_downloaded(
    client: store.Client, model: Any, tmp_path: Path
) -> None:
    """It opens folders, S3 and GCS; no HTTP."""
    pytest.importorskip("runai_model_streamer")
    with ServedHub(client, View(shard_bytes=20_000)) as hub:
        settings = {"HF_ENDPOINT": hub.address, "HF_TOKEN": hub.token}
        found = run_client(STREAM, NAME, tmp_path / "tensors", "best", **settings)

    state = model.state_dict()
    assert state.keys() == found.keys()
    assert all(torch.equal(state[name], found[name]) for name in state)
