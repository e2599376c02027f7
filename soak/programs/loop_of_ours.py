"""A loop of storesvc: ``python loop_of_ours.py OUT`` resumes, and ends at step 6."""

import sys

import numpy as np

import storesvc_client as store

out = sys.argv[1]
with (
    store.connect(out + "/ckpts") as client,
    client.run("chaos/run").loop(every=store.Steps(2), create=True) as loop,
):
    state, start = loop.restore_or({"w": np.zeros(1000)})
    print(f"resumed from step {start}", flush=True)
    for step in loop.steps(start, 7):
        state = {"w": state["w"] * 1.5 + step}
        loop.after(step, state)
np.save(out + "/final.npy", state["w"])
