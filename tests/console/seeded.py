"""A store with what pages show: runs, tags, holds, deletions, items, hostile names."""

import json
from typing import Any

import numpy as np

import storesvc_client as store

HOSTILE = "</td><script>alert(1)</script>'\"&\u202e"
"""A name that would run a script if a page did not escape it."""

LAYERS = 4


def state(step: int) -> dict[str, Any]:
    """The state of a small model."""
    rng = np.random.default_rng(step)

    def weight(*shape: int) -> np.ndarray[Any, Any]:
        return rng.normal(size=shape).astype(np.float32)

    layers = [
        {"attn": {"kernel": weight(16, 16)}, "mlp": {"kernel": weight(16, 64)}}
        for _ in range(LAYERS)
    ]
    frozen = np.arange(4096, dtype=np.float32).reshape(64, 64)
    return {
        "params": {"embed": frozen, "layers": layers, "bias": weight(16)},
        "step": np.int32(step),
    }


def seed(client: store.Client) -> None:
    """Saves the runs."""
    run = client.run("prod/llama-8b")
    for step in range(0, 600, 100):
        run.save(
            step,
            state(step),
            base=step - 100 if step else None,  # a small state is sent whole without
            metrics={"loss": 4 / (1 + step / 200), "lr": 3e-4},
            labels={"stage": "warmup" if step < 200 else "main"},
            items={"config": {"layers": LAYERS}, "notes": "hello"},
        ).result()
    run.tags.set("best", 400)
    run.update(300, pinned=True)
    run.delete(100)
    other = client.run("tests/hostile")
    other.save(
        7,
        {HOSTILE: np.ones(3, np.float32), "plain": np.zeros(2, np.int8)},
        metrics={f"loss{HOSTILE}": 1.0},
        labels={HOSTILE: HOSTILE},
    ).result()
    other.save(
        8, {HOSTILE: np.zeros(3, np.float32)}, metrics={f"loss{HOSTILE}": 0.5}
    ).result()
    client.run("tests/single").save(1, np.float32(2.5)).result()
    # Last: the server soon applies it.
    run.retention.set(store.KeepLatest(2) | store.KeepTagged())


def hostile_entries() -> bytes:
    """Returns the beginning of an audit log: an entry of hostile texts, and a line that
    is no entry."""
    entry = {
        "seq": 1,
        "server": HOSTILE,
        "time": "2026-11-24T07:55:00.000000000Z",
        "stage": "denied",
        "id": HOSTILE,
        "principal": HOSTILE,
        "authentication": "token",
        "peer": HOSTILE,
        "method": HOSTILE,
        "permissions": [{"permission": HOSTILE, "resource": HOSTILE}],
        "detail": {"name": HOSTILE},
        "reason": HOSTILE,
        "latency_ms": 1,
        "left_out": 7,
        "prev": "0" * 64,
    }
    return json.dumps(entry).encode() + b"\n" + HOSTILE.encode() + b"\n"
