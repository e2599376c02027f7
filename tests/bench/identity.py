"""``python -m tests.bench identity``: calls and saves of a server that restricts its
callers (a token, a policy, quotas, an audit log), and of one that does not.

Both servers serve plaintext on this machine, so that the difference is the identity's
alone; rounds alternate, and the ratios are of the best rounds and of the medians.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

import grpc
import numpy as np
from joserfc import jwt
from joserfc.jwk import KeySet
from numpy.typing import NDArray

import storesvc_client as store
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from tests.support.server_process import ServerProcess
from tests.support.tokens import KEYS

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
        keys.write_text(json.dumps(KeySet([*KEYS.values()]).as_dict(private=False)))
        policy.write_text(POLICY.format(keys=keys))
        restricted = ("--policy", str(policy), "--audit-log", str(folder / "audit"))
        servers = {"open": _server(folder, "open")}
        servers["restricted"] = _server(folder, "restricted", *restricted)
        try:
            _measure(servers, token_of("bench"))
        finally:
            for server in servers.values():
                server.stop()


def _server(folder: Path, name: str, *arguments: str) -> ServerProcess:
    where = folder / name
    where.mkdir()
    server = ServerProcess(where / "store", where, *arguments)
    server.start()
    return server


def token_of(name: str) -> str:
    """Returns a token that the servers of a benchmark accept."""
    now = int(time.time())
    claims = {"iss": "https://issuer.example", "aud": "storesvc", "sub": name}
    return jwt.encode(
        {"alg": "ES256", "kid": KEYS["ES256"].kid},
        {**claims, "iat": now, "exp": now + 3600},
        KEYS["ES256"],
        algorithms=["ES256"],
    )


def _measure(servers: dict[str, ServerProcess], token: str) -> None:
    tokens = {"open": None, "restricted": token}
    tree = {"w": np.random.default_rng(0).integers(0, 255, SAVED_BYTES, np.uint8)}
    clients = {n: store.connect(s.address, token=tokens[n]) for n, s in servers.items()}
    for client in clients.values():
        client.run("bench/warm").save(0, tree).result()
    calls = {name: _caller(servers[name].address, tokens[name]) for name in servers}
    _table(
        f"ListRuns, {CALLS:,} calls",
        {name: partial(calls[name], CALLS // ROUNDS) for name in servers},
        rounds=ROUNDS,
    )
    step = iter(range(1, 10**6))
    _table(
        f"save of {SAVED_BYTES >> 20} MiB",
        {name: partial(_save, clients[name], step, tree["w"]) for name in servers},
        rounds=SAVES,
    )
    for client in clients.values():
        client.close()


def _save(client: store.Client, step: Iterator[int], array: NDArray[np.uint8]) -> None:
    """Saves another array."""
    number = next(step)
    client.run("bench/saves").save(number, {"w": np.roll(array, number)}).result()


def _caller(address: str, token: str | None) -> Callable[[int], None]:
    """Returns a function that lists the runs again and again."""
    stub = CheckpointServiceStub(grpc.insecure_channel(address))
    request = api.ListRunsRequest(parent="namespaces/bench")
    metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def call(count: int) -> None:
        for _ in range(count):
            stub.ListRuns(request, metadata=metadata, timeout=60)

    return call


def _table(
    title: str, works: "dict[str, Callable[[], object]]", *, rounds: int
) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds):
        names = sorted(works, reverse=bool(number % 2))
        for name in names:
            began = time.perf_counter()
            works[name]()
            seconds[name].append(time.perf_counter() - began)
    best = {name: min(found) for name, found in seconds.items()}
    middle = {name: median(found) for name, found in seconds.items()}
    print(f"{title}: seconds a round of {rounds}, best and median")
    for name in works:
        print(f"  {name:10}  {best[name]:.3f}  {middle[name]:.3f}")
    print(
        f"  restricted / open: best {best['restricted'] / best['open']:.3f}, median "
        f"{middle['restricted'] / middle['open']:.3f}"
    )


if __name__ == "__main__":
    main()
