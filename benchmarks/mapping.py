"""Measures mapped restores against plain ones.

    python -m benchmarks mapping [--rounds 12] [--only stack transpose ...]
        [--dtype bfloat16]

One embedded store on tmpfs, restores of NumPy arrays on one device, in turns. A ratio
is that of two restores of one turn, so that it holds on a machine that other programs
use, too; prints the median over the rounds. "stored" is the speed by that of a plain
restore of the same stored bytes; "made" by that of one of a checkpoint which has what
the mapping makes. Equal bytes in other pages of the machine make up to a fifth of a
difference, which "made" has, and "stored" has not; more arrays take longer to return,
which "stored" has not. So a bar is met by the larger one. CPU is by that of "stored".
"none" is without a mapping. "sharded" restores to 8 devices.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from benchmarks.speed.rounds import PLACES, SETTINGS

LAYER_BYTES: Final = 768 << 20
"""Bytes of all layers."""

SIDE: Final = 4096
"""Rows and columns of a matrix, as of a model of 7 B parameters."""

BARS: Final = {"views": 0.9, "transposes": 0.7}
"""Least speed of a mapped restore, of that of a plain one."""

_EACH: Final = "l/{n}/{name*}"
_RULES: Final[Mapping[str, tuple[str, Mapping[str, Any] | None]]] = {
    "none": ("views", None),
    "rename": ("views", {"from": _EACH, "to": "m/{n}/{name}"}),
    "stack": (
        "views",
        {
            "from": "l/{n:int}/{name*}",
            "to": "m/{name}",
            "operations": [{"stack": {"axis": 0, "by": "n"}}],
        },
    ),
    "stack inner": (
        "views",
        {
            "from": "l/{n:int}/{name*}",
            "to": "m/{name}",
            "operations": [{"stack": {"axis": 1, "by": "n"}}],
        },
    ),
    "unstack": (
        "views",
        {
            "from": "l/{n}/{name*}",
            "to": "m/{n}/{name}/{h}",
            "operations": [
                {"reshape": [32, 128, SIDE]},
                {"unstack": {"axis": 0, "by": "h"}},
            ],
        },
    ),
    "join": (
        "views",
        {
            "from": ["l/{n}/q", "l/{n}/k", "l/{n}/v"],
            "to": "m/{n}",
            "operations": [{"concatenate": {"axis": 0}}],
        },
    ),
    "join inner": (
        "views",
        {
            "from": ["l/{n}/q", "l/{n}/k", "l/{n}/v"],
            "to": "m/{n}",
            "operations": [{"concatenate": {"axis": 1}}],
        },
    ),
    "split inner": (
        "views",
        {
            "from": _EACH,
            "to": ["m/{n}/{name}/a", "m/{n}/{name}/b"],
            "operations": [{"split": {"axis": 1, "sizes": [SIDE * 3 // 4, SIDE // 4]}}],
        },
    ),
    "deinterleave": (
        "views",
        {
            "from": _EACH,
            "to": ["m/{n}/{name}/a", "m/{n}/{name}/b"],
            "operations": [{"deinterleave": {"axis": 1, "parts": 2}}],
        },
    ),
    "pad": (
        "views",
        {
            "from": _EACH,
            "to": "m/{n}/{name}",
            "operations": [{"pad": {"axis": 0, "size": SIDE + 8, "value": 0}}],
        },
    ),
    "cast": (
        "views",
        {"from": _EACH, "to": "m/{n}/{name}", "operations": [{"cast": "DTYPE"}]},
    ),
    "heads": (
        "transposes",
        {
            "from": _EACH,
            "to": "m/{n}/{name}",
            "operations": [
                {"permute_heads": {"axis": 0, "heads": 32, "from": "halves"}}
            ],
        },
    ),
    "heads inner": (
        "transposes",
        {
            "from": _EACH,
            "to": "m/{n}/{name}",
            "operations": [
                {"permute_heads": {"axis": 1, "heads": 32, "from": "halves"}}
            ],
        },
    ),
    "transpose": (
        "transposes",
        {"from": _EACH, "to": "m/{n}/{name}", "operations": [{"transpose": [1, 0]}]},
    ),
}


_CASTS: Final = {"float32": "bfloat16", "bfloat16": "float32"}
"""Dtypes of the leaves, and what the mapping "cast" makes of them."""


def main() -> None:
    """Prints a line for each operation, and the bars."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", nargs="+", choices=_RULES, default=[*_RULES])
    parser.add_argument("--dtype", choices=_CASTS, default="float32")
    parser.add_argument("--sharded", action="store_true", help="restore to 8 devices")
    arguments = parser.parse_args()
    os.environ |= SETTINGS  # before jax starts
    if arguments.sharded:
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    print(
        f"{'a mapped restore / a plain one':32}{'stored':>8}{'made':>8}{'CPU':>8}"
        f"{'ms':>8}{'bar':>8}"
    )
    for name, turns in _measure(arguments).items():
        kind, _ = _RULES[name]
        speeds = [
            median(turn[plain].seconds / turn["mapped"].seconds for turn in turns)
            for plain in ("stored", "made")
        ]
        cpu = median(turn["mapped"].cpu / turn["stored"].cpu for turn in turns)
        milliseconds = 1e3 * median(turn["mapped"].seconds for turn in turns)
        says = "met" if max(speeds) >= BARS[kind] else f"{BARS[kind]}"
        print(
            f"{name:32}{speeds[0]:8.2f}{speeds[1]:8.2f}{cpu:8.2f}{milliseconds:8.1f}"
            f"{says:>8}",
            flush=True,
        )


class _Spent(NamedTuple):
    seconds: float
    cpu: float


def _measure(
    arguments: argparse.Namespace,
) -> Mapping[str, Sequence[Mapping[str, _Spent]]]:
    """Returns what the restores of each turn took."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh

    import storesvc_client as store

    mesh = Mesh(jax.devices(), ("x",)) if arguments.sharded else None
    drawn = jnp.arange(SIDE**2, dtype=jnp.float32).reshape(SIDE, SIDE)
    layer = dict.fromkeys("qkv", drawn.astype(arguments.dtype))
    layers = LAYER_BYTES // sum(leaf.nbytes for leaf in layer.values())
    found: dict[str, list[dict[str, _Spent]]] = {name: [] for name in arguments.only}
    with (
        tempfile.TemporaryDirectory(
            prefix="storesvc-bench-", dir=PLACES["tmpfs"]
        ) as where,
        store.connect(Path(where).as_uri()) as client,
    ):
        run = client.run("bench/mapping")
        run.save(
            1,
            {
                "l": {
                    str(n): {k: v + n for k, v in layer.items()} for n in range(layers)
                }
            },
        ).result()

        restored = list[Any]()

        def restore(step: int, mapping: Any = None) -> _Spent:
            restored.clear()
            rules = [("", jax.sharding.PartitionSpec("x"))] if mesh else None
            began, cpu = time.perf_counter(), time.process_time()
            restored.append(run.restore(step, mapping=mapping, mesh=mesh, rules=rules))
            jax.block_until_ready(restored)
            return _Spent(time.perf_counter() - began, time.process_time() - cpu)

        for step, name in enumerate(arguments.only, start=2):
            rule, mapping = _RULES[name][1], None
            if name == "cast":
                rule = {
                    **(rule or {}),
                    "operations": [{"cast": _CASTS[arguments.dtype]}],
                }
            if rule is not None:
                mapping = {"version": 1, "otherwise": "drop", "rules": [rule]}
            restore(1, mapping)
            run.save(step, *restored).result()
            kinds = [("stored", 1, None), ("made", step, None), ("mapped", 1, mapping)]
            orders = [*permutations(kinds)]  # what was restored before has an effect
            for turn in range(arguments.rounds + 1):
                order = orders[turn % len(orders)]
                spent = {kind: restore(which, rules) for kind, which, rules in order}
                if turn:  # the first touches memory
                    found[name].append(spent)
            run.delete(step)
    return found


if __name__ == "__main__":
    main()
