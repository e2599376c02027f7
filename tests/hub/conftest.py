"""Fixtures: a store with a model, and a hub that serves it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from tests.hub.served import ServedHub

CONFIG = {"model_type": "llama", "hidden_size": 8}


def model(seed: int = 0) -> dict[str, Any]:
    """Returns a tree of arrays of several shapes and dtypes."""
    rng = np.random.default_rng(seed)
    return {
        "params": {
            "embed": rng.normal(size=(64, 8)).astype(np.float32),
            "layers": {"qkv": rng.normal(size=(3, 8, 12)).astype(np.float32)},
            "half": rng.normal(size=(5, 7)).astype(np.float16),
            "count": np.array(7, np.int64),
            "none": np.zeros((0, 4), np.float32),
        }
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a store with two checkpoints of a run, the older one tagged."""
    folder = tmp_path_factory.mktemp("store")
    with store.connect(folder.as_uri()) as client:
        run = client.run("prod/llama-8b")
        items = {
            "config": CONFIG,
            "tokenizer-config": {"eos": "</s>"},
            "chat-template": "{{ messages }}",
            "notes": "a text",
        }
        run.save(300, model(), items=items).result()
        run.tags.set("best", 300)
        run.save(400, model(1)).result()
    return folder


@pytest.fixture(scope="module")
def opened(root: Path) -> Iterator[store.Client]:
    """A client of that store; its tests change nothing."""
    with store.connect(root.as_uri()) as client:
        yield client


@pytest.fixture(scope="module")
def hub(opened: store.Client) -> Iterator[ServedHub]:
    """The hub of that store."""
    with ServedHub(opened) as served:
        yield served
