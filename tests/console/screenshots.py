"""Takes pictures of pages of a console, light and dark, to look at.

``python -m tests.console.screenshots FOLDER`` seeds a store, serves it, and writes
``NAME-light.png`` and ``NAME-dark.png``; `docs/images/` has two of them.
"""

import math
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import numpy as np
from playwright.sync_api import Page, sync_playwright

import storesvc_client as store
from tests.console.served import ServedConsole
from tests.support.contract import Writer, frame, sums
from tests.support.in_process_server import InProcessServer

CHROMIUM = "/usr/bin/chromium"

MOST = int(os.environ.get("SCREENSHOT_HEIGHT", "1500"))
"""Maximum height of a picture."""

LLAMA = "/r/prod/llama-8b"

PAGES = {
    "runs": "/",
    "run": f"{LLAMA}?policy=latest(3) | every(10000 steps) | tagged",
    "checkpoint": f"{LLAMA}@40000?at=params/layers/0",
    "leaf": f"{LLAMA}@40000?key=params/layers/3/mlp/gate/kernel&values=1",
    "diff": "/diff?a=prod/llama-8b@39000&b=prod/llama-8b@40000",
    "trace": "/trace/prod/llama-8b@40000",
    "uploads": "/uploads",
    "storage": "/storage",
    "events": "/events?of=prod",
    "help": "/help",
    "me": "/me",
    "change": "/change/tag?run=prod/llama-8b&step=40000&tag=best",
    "error": f"{LLAMA}@123",
}


def _state(step: int, layers: int) -> dict[str, Any]:
    """Returns the state of a model on a mesh of eight devices."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"))
    rng = np.random.default_rng(step)
    frozen = layers // 2 if step > 20_000 else 0  # the first layers do not change

    def sharded(*shape: int, seed: int | None = None) -> Any:
        source = rng if seed is None else np.random.default_rng(seed)
        values = source.normal(0, 0.02, size=shape).astype(np.float32)
        spec = PartitionSpec("fsdp", "tp") if len(shape) == 2 else PartitionSpec()
        array = jax.numpy.asarray(values, jax.numpy.bfloat16)
        return jax.device_put(array, NamedSharding(mesh, spec))

    def fixed(layer: int) -> int | None:
        return layer + 2 if layer < frozen else None

    def model(scale: int) -> dict[str, Any]:
        return {
            "embed": {"embedding": sharded(1024, 128 * scale, seed=1)},
            "layers": [
                {
                    "attn": {
                        name: {"kernel": sharded(128, 128 * scale, seed=fixed(layer))}
                        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
                    },
                    "mlp": {
                        "gate": {"kernel": sharded(128, 448, seed=fixed(layer))},
                        "up": {"kernel": sharded(128, 448, seed=fixed(layer))},
                        "down": {"kernel": sharded(448, 128)},
                    },
                    "norm": {"scale": sharded(128)},
                }
                for layer in range(layers)
            ],
            "lm_head": {"kernel": sharded(128, 1024)},
        }

    return {
        "params": model(1),
        "opt_state": {"mu": model(1), "nu": model(1), "count": np.int32(step)},
    }


def seed(client: store.Client) -> None:
    """Saves runs as a laboratory has them."""
    rng = np.random.default_rng(7)
    run = client.run("prod/llama-8b")
    for step in range(1000, 41_000, 1000):
        loss = 2.1 + 3.2 * math.exp(-step / 9000) + rng.normal(0, 0.03)
        run.save(
            step,
            _state(step, 8),
            metrics={"loss": loss, "grad_norm": 1 + rng.random(), "lr": 3e-4},
            labels={"git": "5c0d91a", "stage": "main"},
            items={"config": {"layers": 8}, "tokenizer": bytes(4096)},
        ).result()
    for step in (*range(1000, 5000, 1000), 23_000):
        run.delete(step)
    run.tags.set("best", 38_000)
    run.tags.set("prod", 30_000)
    run.update(20_000, pinned=True)
    run.holds.create(40_000, owner="eval-3", ttl=600)
    for name, steps in (("prod/llama-8b-sft", 6), ("vision/vit-l", 9), ("ana/lora", 3)):
        other = client.run(name)
        for step in range(500, 500 * (steps + 1), 500):
            metrics = {"loss": 3 / math.sqrt(step / 100) + rng.normal(0, 0.02)}
            other.save(step, _state(step, 2), metrics=metrics).result()
    client.run("vision/vit-l").tags.set("best", 4500)


def begin_uploads(address: str) -> None:
    """Begins an upload that waits for one of eight writers, and one that has begun."""
    late = Writer(address, "prod/llama-8b", 41_000, writers=8, chunks=8)
    late.begin(owner="trainer-0.train.svc, job llama-8b")
    for writer in (*range(5), 6, 7):
        late.write(frame(writer), writer=writer)
        late.finish(sums(writer), writer=writer)
    Writer(address, "vision/vit-l", 5000, writers=4, chunks=4).begin(owner="host-12")


def take(page: Page, address: str, folder: Path, *names: str) -> None:
    """Takes the pictures."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for name in names or PAGES:
            page.set_viewport_size({"width": 1280, "height": 400})
            page.goto(f"{address}{PAGES[name]}")
            page.wait_for_timeout(400)
            height = page.evaluate("document.documentElement.scrollHeight")
            page.set_viewport_size({"width": 1280, "height": min(height, MOST)})
            page.screenshot(path=folder / f"{name}-{scheme}.png")


def main() -> None:
    """Serves a seeded store, and takes the pictures."""
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True, parents=True)
    root = folder / "store"
    is_new = not root.exists()
    server = InProcessServer(root)
    with store.connect(server.address) as client, sync_playwright() as driver:
        if is_new:
            seed(client)
        begin_uploads(server.address)
        with ServedConsole(client, name="ckpt.lab.example:7070") as served:
            browser = driver.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox"]
            )
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(served.entrance)
            take(page, served.address, folder, *sys.argv[2:])
            browser.close()
    server.close()


if __name__ == "__main__":
    main()
