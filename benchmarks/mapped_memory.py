"""Measures the memory of mapped operations on a model that is larger than it.

    python -m benchmarks mapped_memory [--gib 20] [--limit 1024]

Each operation runs in a process of its own; as root with cgroups of version 1, within a
cgroup whose memory is limited, page cache included. Prints the peak of anonymous
memory, sampled at intervals, and what the cgroup failed to reclaim: a process that
needs more is killed. The model is of zeros, in layers that the rules unstack, transpose
and split; its files are written to the temporary directory, several times its size.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

MIB = 1 << 20
CGROUP: Final = Path("/sys/fs/cgroup/memory/storesvc-mapped-memory")

RULES = {
    "version": 1,
    "rules": [
        {
            "from": "params/layers/qkv",
            "operations": [
                {"unstack": {"axis": 0, "by": "n"}},
                {"transpose": [1, 0]},
                {"split": {"axis": 0, "sizes": [4096] * 3}},
            ],
            "to": [f"model/layers/{{n:int}}/{p}_proj/weight" for p in "qkv"],
        },
        {
            "from": "params/layers/up",
            "operations": [{"unstack": {"axis": 0, "by": "n"}}],
            "to": "model/layers/{n:int}/up/weight",
        },
        {"from": "params/embed", "to": "model/embed/weight"},
    ],
}

START = """
import json, sys, numpy as np, storesvc_client as store
folder, layers, rules = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
client = store.connect(f"{folder}/store", staging_bytes=256 << 20)
run = client.run("bench/mapped")
"""
WORKS: Final = {
    "save": """
def zeros(*shape): return np.zeros(shape, np.float32)
layer = {"qkv": zeros(layers, 4096, 12288), "up": zeros(layers, 4096, 16384)}
run.save(1, {"params": {"layers": layer, "embed": zeros(65536, 2048)}}).result()
""",
    "restore, leaf by leaf": """
opened = run.open(1).map(rules)
for key in opened.leaves:
    for _, array in opened.read([key]):
        assert not array[-1].any()
    del array
""",
    "export --map": """
run.export(1, f"safetensors:{folder}/export", mapping=rules)
""",
    "import --map": """
back = {"version": 1, "rules": [{
    "from": "model/layers/{n:int}/{p}_proj/weight",
    "operations": [{"transpose": [1, 0]}],
    "to": "layers/{n:int}/{p}"}], "otherwise": "keep"}
client.run("bench/imported").import_from(
    f"safetensors:{folder}/export", mapping=back)
""",
    "a served file": """
import threading, http.client
from storesvc_client._http import bound_socket, serve_in_thread
from storesvc_client._hub.app import create_app
from storesvc_client._hub.callers import TokenHolders
from storesvc_client._hub.snapshots import View
from storesvc_client._restore.mapped import load_rules
view = View(rules=load_rules(rules), shard_bytes=1 << 60)
listening, size = bound_socket(0), 0
with serve_in_thread(create_app(TokenHolders(client, view, token="x")), listening):
    connection = http.client.HTTPConnection("127.0.0.1", listening.getsockname()[1])
    headers = {"Authorization": "Bearer x"}
    file = "/bench/mapped/resolve/main/model.safetensors"
    connection.request("GET", file, headers=headers)
    answer = connection.getresponse()
    while part := answer.read(1 << 20):
        size += len(part)
    assert size == int(answer.headers["Content-Length"]) > 0
""",
}


def measure(arguments: list[str], limit: int | None) -> tuple[int, int, float]:
    """Runs a process; returns its exit code, peak of anonymous MiB, and seconds."""

    def enter() -> None:
        (CGROUP / "cgroup.procs").write_text(str(os.getpid()))

    began, peak = time.monotonic(), 0
    process = subprocess.Popen(arguments, preexec_fn=enter if limit else None)  # noqa: PLW1509 - no thread here
    while process.poll() is None:
        try:
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    peak = max(peak, int(line.split()[1]) // 1024)
        except OSError:
            break
        time.sleep(0.02)
    return process.wait(), peak, time.monotonic() - began


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--gib", type=float, default=20)
    parser.add_argument("--limit", type=int, default=1024, help="MiB")
    options = parser.parse_args()
    layers = max(1, round(options.gib * 1024 / 448))
    limit: int | None = options.limit
    try:
        CGROUP.mkdir()
        (CGROUP / "memory.limit_in_bytes").write_text(str(options.limit * MIB))
    except OSError:
        limit = None
    print(f"{layers} layers, {(layers * 448 + 512) / 1024:.1f} GiB; limit: {limit} MiB")
    print(
        "| operation | peak of anonymous memory, MiB | seconds | |\n|---|---|---|---|"
    )
    failed = False
    try:
        with tempfile.TemporaryDirectory() as folder:
            given = [folder, str(layers), json.dumps(RULES)]
            for name, code in WORKS.items():
                command = [sys.executable, "-c", START + code, *given]
                # what is measured reads and writes what exists; the save may take more
                code_, peak, seconds = measure(command, limit if name != "save" else 0)
                is_ok = code_ == 0 and (name == "save" or peak <= options.limit)
                failed |= not is_ok
                result = "" if is_ok else f"failed ({code_})"
                print(f"| {name} | {peak} | {seconds:.0f} | {result} |", flush=True)
    finally:
        if limit:
            CGROUP.rmdir()
    sys.exit(failed)


if __name__ == "__main__":
    main()
