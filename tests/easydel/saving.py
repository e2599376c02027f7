"""A process that trains states, saves them, and writes their digests.

    python -m tests.easydel.saving HOST:PORT FOLDER SCENARIO...

Each scenario writes a checkpoint to a run of its name and, once that is committed, a
file of digests of the same name to the folder.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import jax

import storesvc_client as store
from storesvc_client.easydel import save_state
from tests.easydel.digests import digest, digests
from tests.easydel.scenarios import SCENARIOS, STEPS, Scenario, stepper


@dataclass(frozen=True, kw_only=True)
class Original:
    """Digests of a saved state, and of the results of the next step."""

    leaves: dict[str, str]
    logits: str
    next_leaves: dict[str, str]


def run_of(client: store.Client, name: str) -> store.Run:
    """Returns the run of a scenario."""
    return client.run(f"tests/{name}")


def read(file: Path) -> Original:
    """Returns the digests in the file of a scenario."""
    return Original(**json.loads(file.read_text()))


def _train_and_save(run: store.Run, scenario: Scenario) -> Original:
    state = scenario.state(scenario.dims)
    step = stepper(state)
    for _ in range(STEPS):
        state, _ = step(state)
    leaves = digests(state)
    save = save_state(run, state)
    after, logits = step(state)
    jax.block_until_ready(after)
    save.result()
    return Original(leaves=leaves, logits=digest(logits), next_leaves=digests(after))


def _main(address: str, folder: str, *names: str) -> None:
    with store.connect(address) as client:
        for name in names:
            original = _train_and_save(run_of(client, name), SCENARIOS[name])
            file = Path(folder, name)
            unfinished = file.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(asdict(original)))
            unfinished.rename(file)


if __name__ == "__main__":
    _main(*sys.argv[1:])
