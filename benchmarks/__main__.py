"""``python -m benchmarks NAME [OPTION ...]``: runs one benchmark; without a name,
lists all."""

import sys
from importlib import import_module
from typing import Final

from benchmarks.speed import __main__ as speed
from benchmarks.speed.works import WORKS

OTHERS: Final = {
    "catalogue": "lists of many checkpoints and runs",
    "device": "saves from an accelerator and restores to it, by its link",
    "flips": "one flipped bit, and who notices",
    "hub": "the first byte of files of a repository",
    "identity": "calls and saves with a token, a policy, an audit log, and without",
    "imports": "imports, and plain reads of the same files by TensorStore",
    "inspections": "how long looking at a checkpoint takes",
    "lent": "the clients of buckets with and without lent credentials",
    "loop": "the time that a training loop adds to a step that is not saved",
    "mapped_floors": "reads whose bytes are not one range of memory, with nothing else",
    "mapped_memory": "the memory of mapped restores, exports, imports and files",
    "memory": "the server's memory while a tree is saved and restored",
    "mounts": "restores from a checkpoint of Orbax, by this store and by Orbax",
    "requests": "the requests to a bucket, and how many of them wait for others",
    "mapping": "mapped and plain restores of the same bytes",
    "reuse": "the search for equal chunks in a save that has none",
    "scale": "the laws by which requests, bytes and CPU grow, and costs of a fleet",
    "shapes": "this store and Orbax on states of any shape, drawn by a seed",
    "startup": "how long storectl and connect take to start",
    "telemetry": "a server with metrics and traces, and one without; scrapes",
    "tenants": "the saves of a namespace while another one floods the server",
    "trees": "trees of 100,000 leaves, planned and rebuilt",
}


def main() -> None:
    """Runs the named benchmark, or lists all."""
    match sys.argv[1:]:
        case [name, *_] if name in WORKS:
            speed.main()
        case [name, *options] if name in OTHERS:
            sys.argv = [f"python -m benchmarks {name}", *options]
            import_module(f"benchmarks.{name}").main()
        case []:
            print("usage: python -m benchmarks NAME [OPTION ...]\n")
            for name, says in ({n: w.says for n, w in WORKS.items()} | OTHERS).items():
                print(f"  {name:15}{says}")
        case [name, *_]:
            sys.exit(f"no benchmark {name!r}: python -m benchmarks lists them")


if __name__ == "__main__":
    main()
