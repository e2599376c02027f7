"""Functions for the processes of a job: every process of it calls the same one."""

import logging
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import storesvc_client as store
from storesvc_client._pytree.jax_job import all_gather, find_job
from storesvc_client._restore import spread as peer_source
from storesvc_client._restore.open_tree import get_reader
from tests.support.restrictions import connect

RUN = "tests/job"
MIB = 1 << 20
ALL = store.Distributed()
THIS = store.Distributed(processes="this")
SPREAD = store.Distributed(spread=True)
THIS_SPREAD = store.Distributed(processes="this", spread=True)


def mesh(rows: int, columns: int) -> Mesh:
    """Returns a mesh of all devices of the job."""
    return Mesh(np.array(jax.devices()).reshape(rows, columns), ("row", "column"))


def values(shape: tuple[int, ...], seed: int, dtype: str = "float32") -> np.ndarray:
    """Returns random values of a leaf; every bit is random."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    drawn = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return drawn.view(dtype).reshape(shape)


SHAPES = {
    "both": ((1024, 512), PartitionSpec(("row", "column"))),
    "crossed": ((512, 1024), PartitionSpec("column", "row")),
    "columns": ((2048, 1024), PartitionSpec(None, "column")),
    "rows": ((4096, 1024), PartitionSpec("row")),
    "replicated": ((12, 1024, 1024), PartitionSpec()),
    "narrow": ((16,), PartitionSpec("column")),
}
"""Shapes and shardings of the leaves: sharded over all axes, over some, replicated."""


def sharded(full: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Returns an array of which this process has its shards."""
    return jax.make_array_from_callback(
        full.shape, sharding, lambda at: full[at], dtype=full.dtype
    )


def state_on(where: Mesh) -> dict[str, Any]:
    """Returns a state of some 75 MiB on a mesh."""

    def leaf(seed: int, shape: tuple[int, ...], spec: PartitionSpec) -> jax.Array:
        return sharded(values(shape, seed, "int32"), NamedSharding(where, spec))

    leaves = [
        (key, leaf(seed, *shape)) for seed, (key, shape) in enumerate(SHAPES.items())
    ]
    return {
        "params": dict(leaves),
        "key": jax.random.key(3),
        "host": np.arange(1000),
        "step": 7,
    }


def state_bytes() -> int:
    """Returns the bytes of the state."""
    shapes = (np.prod(shape) for shape, _ in SHAPES.values())
    return int(sum(shapes)) * 4 + 8000 + 8 + 8


def differing(expected: Any, found: Any) -> list[str]:
    """Returns the leaves of a state whose local shards differ."""
    wrong = []
    for path, leaf in jax.tree.leaves_with_path(expected):
        got = found
        for part in path:
            got = got[part.key]
        if not _is_same(leaf, got):
            wrong.append(jax.tree_util.keystr(path))
    return wrong


def _is_same(expected: Any, found: Any) -> bool:
    """Returns whether the local shards of a leaf are equal in every bit."""
    if not isinstance(expected, jax.Array):
        return np.array_equal(expected, found)
    if jax.numpy.issubdtype(expected.dtype, jax.dtypes.prng_key):
        expected, found = map(jax.random.key_data, (expected, found))
    shards = zip(expected.addressable_shards, found.addressable_shards, strict=True)
    return expected.sharding == found.sharding and all(
        a.device == b.device and np.array_equal(a.data, b.data) for a, b in shards
    )


def get_error(act: Callable[[], object]) -> str:
    """Returns the ``StoreError`` that a call raises as text; "" if it raises none."""
    try:
        act()
    except store.StoreError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def saves(target: str, rows: int, columns: int, **options: Any) -> dict[str, Any]:
    """Saves the same state twice; returns the reports of both saves."""
    state = state_on(mesh(rows, columns))
    with connect(target, **options) as client:
        run = client.run(RUN)
        first = run.save(1, state, metrics={"process": jax.process_index()})
        metrics = dict(first.result().metrics)
        again = run.save(2, state)
        reports = [first.report(), again.report()]
    return {
        "metrics": metrics,
        "sent": [report.sent_bytes for report in reports],
        "total": [report.total_bytes for report in reports],
        "last": [report.last_process for report in reports],
        "slowest": [report.slowest for report in reports],
    }


def restores(target: str, rows: int, columns: int, **options: Any) -> dict[str, Any]:
    """Restores the state onto another mesh; returns the differences and the report."""
    expected = state_on(mesh(rows, columns))
    with connect(target) as client:
        opened = client.run(RUN).open(1, distributed=store.Distributed(**options))
        found = opened.restore(like=expected)
        assert opened.report is not None
        return {
            "wrong": differing(expected, found),
            "read_bytes": opened.report.read_bytes,
            "received_bytes": opened.report.received_bytes,
            "slowest": asdict(cast("Any", opened.report.slowest_process)),
        }


def spreads_alone(target: str) -> list[str]:
    """Requests a spread restore by this process alone; returns the errors."""
    with connect(target) as client:
        run = client.run(RUN)
        like = {"w": np.zeros(8)}
        run.save(1, like).result()
        return [
            get_error(lambda: run.open(1, distributed=THIS_SPREAD).restore(like=like)),
            get_error(lambda: run.restore(1, like=like, distributed=THIS_SPREAD)),
            get_error(lambda: run.open(1).restore(like=like)),
        ]


def reads(target: str, rows: int, columns: int) -> dict[str, Any]:
    """Restores the state in all modes, and then in ways that must fail; returns the
    differences, the bytes read and the errors."""
    index, where = jax.process_index(), mesh(rows, columns)
    expected = state_on(where)
    outcome: dict[str, Any] = {"wrong": [], "read_bytes": []}
    with ThreadPoolExecutor(8) as pool:  # threads that restore first at the same time
        jobs = pool.map(lambda _: id(find_job()), range(8))
    outcome["jobs"] = len(set(jobs))

    def latest() -> int:
        if index == 1:
            time.sleep(0.5)  # until process 0 has opened it and saved a newer one
        opened = run.open("latest", distributed=ALL)
        if index == 0:
            run.save(2, {"x": 1}, distributed=THIS).result()
        return opened.info.step

    def otherwise() -> None:
        select = "params/rows" if index == 1 else "params/**"
        run.restore(1, mesh=where, rules=[("", PartitionSpec())], select=select)

    def not_at_all() -> None:
        if index != 1:
            run.restore(1, like=expected, deadline=timedelta(seconds=2))

    def too_late() -> None:
        apart = store.Distributed(spread=False)
        opened = run.open(1, distributed=apart)
        reader: Any = get_reader(opened)
        files, deadline = reader.open_source, timedelta(minutes=5)

        def slow() -> object:
            time.sleep(6)
            return files()

        if index == 1:
            reader.open_source, deadline = slow, timedelta(seconds=5)
        opened.restore(like=expected, deadline=deadline)

    with connect(target) as client:
        run = client.run(RUN)
        for spread in (True, False, None):
            opened = run.open(1, distributed=store.Distributed(spread=spread))
            found = opened.restore(like=expected)
            assert opened.report is not None
            outcome["wrong"] += differing(expected, found)
            outcome["read_bytes"].append(opened.report.read_bytes)
        sync_global_devices("read")
        outcome["latest"] = latest()
        absent = client.run("tests/absent")
        acts = (lambda: absent.restore("latest"), otherwise, too_late, not_at_all)
        outcome["errors"] = []
        for number, act in enumerate(acts):
            sync_global_devices(f"act {number}")
            outcome["errors"].append(get_error(act))
    return outcome


def rows_on(where: Mesh) -> dict[str, Any]:
    """Returns ten leaves of 12 MiB, sharded along the rows of a mesh."""
    shape, sharding = (12, 512, 512), NamedSharding(where, PartitionSpec("row"))

    return {
        f"{seed:02}": sharded(values(shape, seed, "int32"), sharding)
        for seed in range(10)
    }


def reads_in_stages(target: str, budgets: list[int]) -> dict[str, Any]:
    """Restores ``rows_on`` with some budgets; returns the differences, and the peaks of
    bytes in buffers."""
    expected = rows_on(mesh(jax.process_count(), jax.local_device_count()))
    outcome: dict[str, Any] = {"wrong": [], "peaks": []}
    with connect(target) as client:
        for budget in budgets:
            peer_source.STAGE_BYTES = budget  # type: ignore[misc]
            opened: Any = client.run(RUN).open(1, distributed=SPREAD)
            reader: Any = get_reader(opened)
            planned, assemblies = reader.plan_reads, list[Any]()

            def plan(
                *arguments: Any, planned: Any = planned, made: Any = assemblies
            ) -> Any:
                made.append(planned(*arguments))
                return made[-1]

            reader.plan_reads = plan
            outcome["wrong"] += differing(expected, opened.restore(like=expected))
            (assembly,) = assemblies
            outcome["peaks"].append(assembly.peak_bytes)
    return outcome


def reads_mapped(target: str) -> dict[str, Any]:
    """Restores transposed leaves; returns the differences, the bytes read and the
    errors if a process has other rules, or the restore is to be spread."""
    index, where = jax.process_index(), mesh(jax.process_count(), 1)
    rule = {
        "from": "{name}",
        "to": "x/{name}",
        "operations": [{"transpose": [2, 1, 0]}],
    }
    rules: dict[str, Any] = {"version": 1, "rules": [rule]}
    placed: list[Any] = [("", PartitionSpec(None, None, "row"))]
    outcome: dict[str, Any] = {"wrong": []}

    with connect(target) as client:
        run = client.run(RUN)
        opened = run.open(1, distributed=ALL).map(rules)
        found = opened.restore(mesh=where, rules=placed)["x"]
        back = {key: jax.jit(lambda x: x.transpose())(x) for key, x in found.items()}
        outcome["wrong"] = differing(rows_on(where), back)
        plain = run.open(1, distributed=store.Distributed(spread=False))
        plain.restore(mesh=where, rules=[("", PartitionSpec("row"))])
        assert opened.report is not None
        assert plain.report is not None
        outcome["read_bytes"] = opened.report.read_bytes, plain.report.read_bytes

        def restore(mapping: Any, distributed: store.Distributed) -> None:
            run.restore(
                1, mesh=where, rules=placed, mapping=mapping, distributed=distributed
            )

        other = {**rules, "otherwise": "keep"} if index == 1 else rules
        outcome["errors"] = []
        for number, given in enumerate(((other, ALL), (rules, SPREAD))):
            sync_global_devices(f"act {number}")
            outcome["errors"].append(get_error(partial(restore, *given)))
    return outcome


def reads_damaged(target: str) -> str:
    """Restores a damaged checkpoint; returns the error of this process."""
    where = mesh(jax.process_count(), 1)
    with connect(target) as client:
        run = client.run(RUN)
        rules = [("", PartitionSpec())]
        return get_error(
            lambda: run.restore(1, mesh=where, rules=rules, distributed=SPREAD)
        )


def warns(target: str) -> list[str]:
    """Saves with a short lease, and twice with a long one; returns the number of
    warnings about heartbeats that were logged until after each."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("storesvc_client").addHandler(handler)
    counts = []
    with connect(target) as client:
        run = client.run(RUN)
        for step, seconds in enumerate((30, 200, 200)):
            leased = store.Distributed(lease=seconds)
            run.save(step, {"w": np.zeros(8)}, distributed=leased).result()
            found = [line for line in logged if "heartbeat_timeout_seconds" in line]
            counts.append(f"{len(found)} after a lease of {seconds} s")
    return counts


def fails(target: str) -> list[str]:
    """Saves in ways that must fail, and at last in one that succeeds; returns the error
    of this process each time."""
    index, where = jax.process_index(), mesh(jax.process_count(), 1)
    leased = store.Distributed(lease=3)

    def leaf(columns: int) -> Any:
        sharding = NamedSharding(where, PartitionSpec("row"))
        return sharded(values((jax.process_count(), columns), 5, "int32"), sharding)

    def another_plan() -> None:
        tree = {"w": leaf(8), "z": np.zeros(4 if index == 2 else 3)}
        run.save(1, tree, distributed=leased).result()

    def unsupported() -> None:
        odd = {"odd": object()} if index == 1 else {}
        run.save(2, {"w": leaf(8), **odd}, distributed=leased).result()

    def refused() -> None:
        labels: Any = {"odd": object()} if index == 1 else {}
        run.save(
            7, {"w": leaf(8)}, labels=labels, distributed=store.Distributed(lease=3600)
        ).result()

    def not_refused() -> None:
        run.save(7, {"w": leaf(8)}, distributed=leased).result()

    def never_begun() -> None:
        if index != 0:
            run.save(3, {"w": leaf(8)}, distributed=leased).result()

    def never_called() -> None:
        if index != 2:
            run.save(4, {"w": leaf(8)}, distributed=leased).result()

    def other_steps() -> None:
        run.save(8 + index, {"w": leaf(8)}, distributed=leased).result()

    def exists() -> None:
        run.save(0, {"w": leaf(8)}, distributed=leased).result()

    def alone() -> None:
        run.save(100 + index, {"w": leaf(8)}, distributed=THIS)

    def well() -> None:
        run.save(5, {"w": leaf(8)}, distributed=leased).result()

    def elsewhere() -> None:
        with store.connect("memory://") as other:
            chosen = other if index == 1 else client
            chosen.run(RUN).save(6, {"w": leaf(8)}, distributed=leased).result()

    with connect(target) as client:
        run = client.run(RUN)
        run.save(0, {"w": leaf(8)}).result()
        acts = [
            *(another_plan, unsupported, refused, not_refused),
            *(never_begun, never_called, other_steps, exists, alone, elsewhere, well),
        ]
        errors = []
        for act in acts:
            sync_global_devices(act.__name__)  # so that all begin at the same time
            errors.append(get_error(act))
        return errors


def dies(target: str, seconds: float) -> list[str]:
    """Saves while process 1 is killed before its part is written; returns the errors of
    the other processes: of this save, of the next save, and of an exchange of bytes."""
    state = state_on(mesh(jax.process_count(), 1))
    leased = store.Distributed(lease=seconds)
    with connect(target) as client:
        run = client.run(RUN)
        run.save(1, state).result()
        index, own = jax.process_index(), np.zeros(8, np.uint8)
        if index < 2:  # among more processes, some would wait for the others
            all_gather(own, [0, 1])
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        first = run.save(2, state, base=None, distributed=leased)
        second = run.save(3, state, base=None, distributed=leased)
        assert not first.done(), "the next save was held up"
        errors = [get_error(first.result), get_error(second.result)]
        unjoined = get_error(lambda: all_gather(own, [0, 1])) if index == 0 else ""
        return [*errors, unjoined]


def differ(target: str) -> dict[str, Any]:
    """Saves and restores arrays of which some processes have no shard, and saves again
    after a save that failed in one process; returns the outcomes."""
    index = jax.process_index()
    full = values((5 * MIB, 2), 3, "int32")
    leased = store.Distributed(lease=20)

    def on(*processes: int) -> Any:
        devices = [d for d in jax.devices() if d.process_index in processes]
        sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
        return sharded(full, sharding)

    def is_back(distributed: store.Distributed) -> bool:
        back = run.restore(0, like={"w": some}, distributed=distributed)["w"]
        return len(back.addressable_shards) == (index != 0) and all(
            np.array_equal(shard.data, full[shard.index])
            for shard in back.addressable_shards
        )

    def fails_once() -> None:
        odd = {"odd": object()} if index == 1 else {}
        run.save(2, {"w": np.zeros(3), **odd}, distributed=leased)

    def never_called() -> None:
        like = {"w": full, "new": jax.numpy.arange(4.0), "key": jax.random.key(1)}
        options: dict[str, Any] = {"mesh": mesh(3, 1), "rules": [("", PartitionSpec())]}
        if index != 1:
            seconds = timedelta(seconds=2)
            run.restore(0, like=like, missing="keep", deadline=seconds, **options)

    def initial() -> list[bool]:
        like = {"new": jax.numpy.arange(6.0), "key": jax.random.key(1)}
        options: dict[str, Any] = {"mesh": mesh(3, 1), "rules": [("", PartitionSpec())]}
        back: Any = run.restore(
            3, like={"w": np.zeros(3), **like}, missing="keep", **options
        )
        host = {key: back[key].addressable_data(0) for key in like}
        return [
            bool(np.array_equal(like["new"], host["new"])),
            bool(like["key"] == host["key"]),
            len(back["new"].sharding.device_set) == 3,
        ]

    def elsewhere() -> None:
        with store.connect("memory://") as other:
            chosen = other if index == 1 else client
            chosen.run(RUN).restore(3)

    some = on(1, 2)
    with connect(target) as client:
        run = client.run(RUN)
        run.save(0, {"w": some}, distributed=leased, snapshot="device").result()
        ((_, saved),) = run.open(0).read(["w"])
        lone = get_error(lambda: run.save(1, {"w": on(2)}, distributed=leased).result())
        restored = [is_back(SPREAD), is_back(store.Distributed(spread=False))]
        sync_global_devices("failing")
        error = get_error(fails_once)
        sync_global_devices("failed")
        for step in (3, 4, 5):
            save = run.save(step, {"w": np.zeros(3)}, distributed=leased)
            save.exception()
        kept = initial()
        sync_global_devices("alone")
        alone = get_error(never_called)
        sync_global_devices("elsewhere")
        opened = get_error(elsewhere)
        return {
            "alone": alone,
            "opened": opened,
            "is_kept": kept,
            "is_saved": np.array_equal(full, saved),
            "lone": lone,
            "is_restored": restored,
            "error": error,
        }


def goes_on(target: str) -> int:
    """Saves a step that another job left unfinished; returns the bytes sent."""
    state = state_on(mesh(jax.process_count(), 1))
    with connect(target) as client:
        return client.run(RUN).save(2, state, base=None).report().sent_bytes


def step_state(where: Mesh, step: int) -> dict[str, Any]:
    """Returns the state of a step, some 12 MiB; most of it changes with the step."""

    def leaf(seed: int, shape: tuple[int, ...], spec: PartitionSpec) -> jax.Array:
        return sharded(values(shape, seed, "int32"), NamedSharding(where, spec))

    return {
        "sharded": leaf(step, (2048, 1024), PartitionSpec("row")),
        "replicated": leaf(step + 1000, (512, 1024), PartitionSpec()),
        "still": leaf(0, (512, 1024), PartitionSpec("row")),
        "step": step,
    }


def saves_on(target: str, steps: int, log: str) -> None:
    """Saves the remaining steps, and appends to a log the steps that begin, succeed and
    fail."""
    where = mesh(jax.process_count(), 1)
    with connect(target) as client, Path(log).open("a") as notes:
        run = client.run(RUN)
        try:
            first = run.open(distributed=ALL).info.step + 1
        except store.NotFoundError:
            first = 0
        for step in range(first, steps):
            print("begun", step, file=notes, flush=True)
            try:
                run.save(step, step_state(where, step)).result()
            except store.StoreError as e:
                print("failed", step, e, file=notes, flush=True)
                raise
            print("saved", step, file=notes, flush=True)


def disagrees(target: str) -> list[str]:
    """Saves trees of which one leaf differs between the processes, for each kind of
    leaf, and then a tree that is equal everywhere; returns the errors here."""
    index, where = jax.process_index(), mesh(jax.process_count(), 1)
    leased = store.Distributed(lease=20)

    def replicated(full: np.ndarray) -> jax.Array:
        return sharded(full, NamedSharding(where, PartitionSpec()))

    def on_process_0() -> Any:
        devices = [d for d in jax.devices() if d.process_index == 0]
        sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec())
        return sharded(np.ones(3), sharding)

    odd = int(index == 2)
    leaves: dict[str, Callable[[], Any]] = {
        "python": lambda: {"count": odd},
        "numpy": lambda: {"count": np.full((1000, 30), odd)},
        "local": lambda: {"count": jax.numpy.full(3, odd)},
        "key": lambda: {"count": jax.random.key(odd)},
        "replicated": lambda: {"count": replicated(np.full(5, odd))},
        "first": lambda: {"count": int(index == 0)},
        "same": lambda: {
            "count": np.full((3, 2), np.nan)[:, index % 2 :][:, :1],
            "key": jax.random.key(7),
            "one": on_process_0(),
            "replicated": replicated(np.arange(4)),
        },
    }
    with connect(target) as client:
        run = client.run(RUN)

        def raised(step: int, name: str) -> str:
            sync_global_devices(name)
            tree = {"rng": leaves[name](), "w": replicated(np.arange(8))}
            return get_error(lambda: run.save(step, tree, distributed=leased).result())

        return [raised(step, name) for step, name in enumerate(leaves)]


def keys_after_saves(target: str, steps: int) -> list[str]:
    """Saves some steps in all processes; returns the keys of saves that jax keeps."""
    from jax._src.distributed import global_state

    where = mesh(jax.process_count(), jax.local_device_count())
    with store.connect(target) as client:
        for step in range(steps):
            client.run(RUN).save(step, rows_on(where)).result()
    sync_global_devices("saved")
    board: Any = global_state.client
    kept = board.key_value_dir_get("storesvc/")
    return sorted(key for key, _ in kept if key.startswith("storesvc/s"))
