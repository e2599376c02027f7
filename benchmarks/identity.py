"""``python -m benchmarks identity``: calls and saves of a server that restricts its
callers (a token, a policy, quotas, an audit log), and of one that does not.

Both servers serve plaintext on this machine, so that the difference is the identity's
alone; rounds alternate, and the ratios are of the best rounds and of the medians.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

import storesvc_client as store
from benchmarks.server_pairs import caller, save, started, table
from tests.support.server_process import ServerProcess
from tests.support.tokens import keys_document, signed

CALLS: Final = 10_000
ROUNDS: Final = 20
SAVES: Final = 8
SAVED_BYTES: Final = 64 << 20

POLICY: Final = """
[[issuers]]
name = "bench"
issuer = "https://issuer.example"
audiences = ["storesvc"]
jwks_file = "{keys}"
principal = "user:{{sub}}"

[[bindings]]
role = "writer"
runs = ["bench/*"]
who = ["user:bench"]

[[quotas]]
namespaces = ["*"]
requests_per_second = 1000000
streams = 1000
"""


def main() -> None:
    """Measures both servers in turns, and prints a table."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        folder = Path(place)
        keys, policy = folder / "keys.json", folder / "policy.toml"
        keys.write_text(keys_document())
        policy.write_text(POLICY.format(keys=keys))
        restricted = ("--policy", str(policy), "--audit-log", str(folder / "audit"))
        servers = {"open": started(folder, "open")}
        servers["restricted"] = started(folder, "restricted", *restricted)
        try:
            _measure(servers, signed("bench"))
        finally:
            for server in servers.values():
                server.stop()


def _measure(servers: dict[str, ServerProcess], token: str) -> None:
    tokens = {"open": None, "restricted": token}
    tree = {"w": np.random.default_rng(0).integers(0, 255, SAVED_BYTES, np.uint8)}
    clients = {n: store.connect(s.address, token=tokens[n]) for n, s in servers.items()}
    for client in clients.values():
        client.run("bench/warm").save(0, tree).result()
    calls = {name: caller(servers[name].address, tokens[name]) for name in servers}
    table(
        f"ListRuns, {CALLS:,} calls",
        {name: partial(calls[name], CALLS // ROUNDS) for name in servers},
        rounds=ROUNDS,
    )
    step = iter(range(1, 10**6))
    table(
        f"save of {SAVED_BYTES >> 20} MiB",
        {name: partial(save, clients[name], step, tree["w"]) for name in servers},
        rounds=SAVES,
    )
    for client in clients.values():
        client.close()


if __name__ == "__main__":
    main()
