"""A server's clock jumps while it knows tokens: by seconds to a day, either way.

At each clock, a token is accepted if and only if it is valid by that clock, whether the
server has seen it before or not; a known one is not asked again when it was issued.
After the clock is back, all tokens are accepted again, without a restart.
"""

import tempfile
import time
from pathlib import Path
from typing import Final

import grpc

from soak.outcomes import Outcome
from soak.watched import compiled
from storesvc_proto.v1 import access_service_pb2 as api
from storesvc_proto.v1.access_service_pb2_grpc import AccessServiceStub
from tests.support.server_process import ServerProcess
from tests.support.tokens import keys_document, signed

JUMPS: Final = (0, 20, 60, 120, 3600, 86_400, -15, -60, -3600, -86_400)
"""Seconds; not near a limit, as a slow machine takes a moment."""

LIFE_SECONDS: Final = 60
LEEWAY_SECONDS: Final = 30
"""Default of an issuer."""

_POLICY: Final = """
[[issuers]]
name = "soak"
issuer = "https://issuer.example"
audiences = ["storesvc"]
jwks_file = "{keys}"
principal = "user:{{sub}}"

[[bindings]]
role = "reader"
runs = ["**"]
who = ["user:*"]
"""


def identity_clocks() -> Outcome:
    """Asks with known, new and lasting tokens at each clock."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="storesvc-soak-") as scratch:
        folder = Path(scratch)
        (folder / "keys").write_text(keys_document())
        policy = folder / "policy.toml"
        policy.write_text(_POLICY.format(keys=folder / "keys"))
        server = ServerProcess(folder / "store", folder, "--policy", str(policy))
        clock = folder / "clock"
        server.environment = {
            "LD_PRELOAD": str(compiled("clock.c")),
            "SOAK_CLOCK": str(clock),
        }
        server.start()
        try:
            with grpc.insecure_channel(server.address) as channel:
                stub = AccessServiceStub(channel)
                for jump in JUMPS:
                    _set(clock, 0)
                    outcome.add(f"a jump of {jump} s", _losses(stub, clock, jump))
        finally:
            server.kill()
    return outcome


def _losses(stub: AccessServiceStub, clock: Path, jump: int) -> list[str]:
    """Returns the wrong answers at one clock, and after it is back."""
    short = [
        signed(f"{kind}-{jump}", seconds=LIFE_SECONDS) for kind in ("known", "new")
    ]
    lasting = signed(f"lasting-{jump}", seconds=20 * 3600)
    lost = []
    if not (_is_accepted(stub, short[0]) and _is_accepted(stub, lasting)):
        lost.append("a valid token is rejected")
    _set(clock, jump)
    is_late = jump >= LIFE_SECONDS + LEEWAY_SECONDS
    expected = {
        "known": (short[0], not is_late),
        "new": (short[1], not is_late and jump >= -LEEWAY_SECONDS),
        "lasting": (lasting, jump < 20 * 3600),
    }
    for kind, (token, is_valid) in expected.items():
        if _is_accepted(stub, token) is not is_valid:
            lost.append(f"a {kind} token: expected accepted={is_valid}, got the other")
    _set(clock, 0)
    for kind, token in (("lasting", lasting), ("fresh", signed(f"fresh-{jump}"))):
        if not _is_accepted(stub, token):
            lost.append(f"a {kind} token is rejected after the clock was set back")
    return lost


def _set(clock: Path, seconds: int) -> None:
    partial = clock.with_suffix(".partial")
    partial.write_text(str(seconds))
    partial.rename(clock)
    time.sleep(0.05)


def _is_accepted(stub: AccessServiceStub, token: str) -> bool:
    """Returns whether the server knows the caller; raises other errors."""
    metadata = (("authorization", f"Bearer {token}"),)
    try:
        stub.GetIdentity(api.GetIdentityRequest(), metadata=metadata, timeout=30)
    except grpc.RpcError as e:
        assert isinstance(e, grpc.Call)
        if e.code() is not grpc.StatusCode.UNAUTHENTICATED:
            raise
        return False
    return True
