"""The same loop with Orbax's manager: ``python loop_of_orbax.py OUT``."""

import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

out = sys.argv[1]
Path(out).mkdir(parents=True, exist_ok=True)
options = ocp.CheckpointManagerOptions(max_to_keep=3)
with ocp.CheckpointManager(out + "/ckpts", options=options) as manager:
    state, start = {"w": np.zeros(1000)}, 0
    if (latest := manager.latest_step()) is not None:
        state = manager.restore(latest, args=ocp.args.StandardRestore(state))
        start = latest + 1
    print(f"resumed from step {start}", flush=True)
    for step in range(start, 7):
        state = {"w": state["w"] * 1.5 + step}
        if step % 2 == 0:
            manager.save(step, args=ocp.args.StandardSave(state))
    manager.wait_until_finished()
np.save(out + "/final.npy", state["w"])
