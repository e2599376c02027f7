"""Saves and reads of items, for the processes of a job; see ``jax_job``."""

import logging
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import sync_global_devices

import storesvc_client as store
from tests.support.job_parts import ALL, RUN, THIS, get_error, mesh, rows_on

Outcome = dict[str, Any]


def own_value(index: int) -> dict[str, Any]:
    """Returns the value that a process saves for itself; each of another size."""
    return {"process": index, "seen": list(range(10**index))}


def items_of(index: int) -> dict[str, Any]:
    """Returns the items that a process passes."""
    return {
        "config": {"from": index, "padding": "x" * index},
        "data": store.PerProcess(own_value(index)),
        "raw": store.PerProcess(bytes([index]) * index * 1000),
    }


def saves(target: str) -> Outcome:
    """Saves a sharded state with items, and again; reads them in all ways."""
    index, count = jax.process_index(), jax.process_count()
    where = mesh(count, jax.local_device_count())
    tree = {**rows_on(where), "name": "a text", "large": 2**90, "host": np.ones(3)}
    with store.connect(target) as client:
        run = client.run(RUN)
        first = run.save(1, tree, items=items_of(index))
        first.result()  # so that it is the base of the next one
        again = run.save(2, tree, items=items_of(index))
        sent = [first.report().sent_bytes, again.report().sent_bytes]
        back = run.restore(1, like=tree)
        items = run.items("latest")
        opened = run.open(1, distributed=ALL)
        alone = run.items(1, distributed=THIS)
        return {
            "sent": sent[1],
            "name": back["name"],
            "large": back["large"] == 2**90,
            "config": items["config"],
            "own": [items["data"], list(items["raw"]).count(index)],
            "opened": opened.items["data"],
            "all": [each["process"] for each in items.per_process("data")],
            "count": items.info("raw").process_count,
            "size": items.info("raw").size_bytes,
            "alone": get_error(lambda: alone["data"]),
            "alone config": alone["config"],
        }


def reads(target: str) -> Outcome:
    """Reads items that a job of another size saved."""
    with store.connect(target) as client:
        items = client.run(RUN).items(1)
        return {
            "error": get_error(lambda: items["data"]),
            "config": items["config"],
            "all": [each["process"] for each in items.per_process("data")],
        }


def fails(target: str) -> list[str]:
    """Saves items that do not go together, and at last some that do; returns the error
    of this process each time."""
    index = jax.process_index()
    leased = store.Distributed(lease=10)
    tree = {"x": np.ones(3)}
    own = store.PerProcess(index)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("storesvc_client").addHandler(handler)

    def saving(step: int, items: Any) -> Callable[[], object]:
        return lambda: run.save(step, tree, items=items, distributed=leased).result()

    def never() -> None:
        if index:
            saving(9, {"a": own})()
        else:
            time.sleep(1)

    with store.connect(target) as client:
        run = client.run(RUN)
        acts = [
            saving(1, {"a": own, "b": 1} if index else {"a": own}),
            saving(2, None if index else {"a": own}),
            saving(3, {"a": own} if index else None),
            saving(4, {"a": own if index else 1}),
            saving(5, {"a": store.PerProcess(b"x" if index else "x")}),
            saving(6, {"a": (1,) if index else 1}),
            saving(7, None if index else {"a": 1}),
            saving(8, {"a": 1} if index else {"a": (1,)}),
        ]
        found = []
        for number, act in enumerate(acts):
            sync_global_devices(f"act {number}")
            found.append(get_error(act))
        # the handle has the failure of another process, not the call
        sync_global_devices("handle")
        save = None
        items: Any = {"a": store.PerProcess((1,) if index else 1)}
        handed = get_error(lambda: run.save(10, tree, items=items, distributed=leased))
        sync_global_devices("good")
        save = run.save(11, tree, items={"a": own}, distributed=leased)
        assert save.result().item_count == 1
        found += [handed, str(run.items(11)["a"])]
    return found
