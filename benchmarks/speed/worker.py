"""Runs one contender at one work in one round, in a separate process.

    python -m benchmarks.speed.worker CONTENDER WORK STATE DIRECTORY

Prints the measurements as JSON, or that the contender's library is not installed.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.speed.buckets import FAR, lists
from benchmarks.speed.contenders import Contender, Maker, NotInstalledError
from benchmarks.speed.fanning import fanout
from benchmarks.speed.floors import FLOORS
from benchmarks.speed.growing import growth
from benchmarks.speed.ours import OURS
from benchmarks.speed.peers import PEERS
from benchmarks.speed.saving_again import lora
from benchmarks.speed.selecting import params
from benchmarks.speed.side_by_side import save_and_restore
from benchmarks.speed.states import STATES, States, one_device, tensor_parallel

MAKERS: Final[Mapping[str, Maker]] = {**FLOORS, **OURS, **PEERS, **FAR}

Trial = Callable[[Any, States, Path], dict[str, Any]]

TRIALS: Final[Mapping[str, Trial]] = {
    "lora": lora,
    "params": params,
    "growth": growth,
    "fanout": fanout,
    "lists": lists,
}
"""Works that are not just one save and one restore."""

LAYOUTS: Final = {"reshard": tensor_parallel, "whole": one_device}
"""Shardings of the restored state, by work; other works keep the saved ones."""


def main() -> None:
    """Runs the contender, and prints its results."""
    name, work, state, place = sys.argv[1:5]
    directory, states = Path(place), STATES[state]
    try:
        contender: Contender = MAKERS[name](directory)
    except NotInstalledError as e:
        print(json.dumps({"absent": f"{e} is not installed"}))
        return
    try:
        if work in TRIALS:
            found = TRIALS[work](contender, states, directory)
        else:
            layout = LAYOUTS.get(work)
            found = save_and_restore(
                contender, states, directory, layout=layout, checks=name not in FLOORS
            )
    finally:
        contender.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
