"""Restricts the servers of tests, and connects clients with what these servers require.

``STORESVC_TEST_RESTRICTED`` gives each server a policy, quotas and an audit log; with
the value "tokens" also TLS, and it rejects callers without a token. Child processes
find the same credentials through another variable.
"""

import os
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc

import storesvc_client as store

RESTRICTED: Final = "STORESVC_TEST_RESTRICTED"

_CREDENTIALS: Final = "STORESVC_TEST_CREDENTIALS"
"""Environment variable: directory of the credentials of all restricted servers."""

_ISSUER: Final = """
[[issuers]]
name = "tests"
issuer = "https://issuer.example"
audiences = ["storesvc"]
jwks_file = "{keys}"
principal = "user:{{sub}}"
"""

_POLICY: Final = """
[[bindings]]
role = "admin"
runs = ["**"]
who = ["{who}"]

[[quotas]]
namespaces = ["*"]
streams = 100000
requests_per_second = 1000000

[quotas_per_principal]
streams = 100000
requests_per_second = 1000000
"""


class _Credentials(NamedTuple):
    """Directory of files that servers and clients share."""

    directory: Path

    @property
    def authority(self) -> Path:
        """Certificate of the authority."""
        return self.directory / "authority.pem"

    @property
    def key(self) -> Path:
        """Private key of all servers."""
        return self.directory / "server.key"

    @property
    def token(self) -> str:
        """Token of the administrator."""
        return (self.directory / "token").read_text()

    def require_for(self, address: str) -> None:
        """Notes that the server of an address requires them."""
        (self.directory / address).touch()

    def are_required(self, address: str) -> bool:
        """Returns whether the server of an address requires them."""
        return (self.directory / address).exists()


def server_options(arguments: Sequence[str], directory: Path) -> list[str]:
    """Returns the additional options of a server; none unless it is restricted.

    Args:
        arguments: Its other options.
        directory: Directory of its own files.
    """
    if RESTRICTED not in os.environ or "--policy" in arguments:
        return []
    policy = directory / "policy-of-all.toml"
    options = ["--policy", str(policy)]
    if "--audit-log" not in arguments:
        options += ["--audit-log", f"{directory}/audit"]
    if os.environ[RESTRICTED] != "tokens":
        policy.write_text(_POLICY.format(who="local"))
        return options
    found, who = _credentials(), _POLICY.format(who="user:tests")
    policy.write_text(_ISSUER.format(keys=found.directory / "keys.json") + who)
    options += ["--tls-cert", str(found.key.with_suffix(".pem"))]
    return [*options, "--tls-key", str(found.key)]


def note_server(address: str, options: Sequence[str]) -> None:
    """Notes the address and the options of a server."""
    if os.environ.get(RESTRICTED) == "tokens" and str(_credentials().key) in options:
        _credentials().require_for(address)


def note_proxy(address: str, target: str) -> None:
    """Notes the address of a proxy, and that of its server."""
    if (found := _required(target)) is not None:
        found.require_for(address)


def connect(target: str, **options: Any) -> store.Client:
    """Returns a client of servers, with the credentials that they require."""
    if (found := _required(target)) is not None:
        options |= {"ca": found.authority, "token": found.token}
    return store.connect(target, **options)


def channel(address: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
    """Returns a channel to a server, with the credentials that it requires."""
    found = _required(address)
    if found is None:
        return grpc.insecure_channel(address, options)
    tls = grpc.ssl_channel_credentials(found.authority.read_bytes())
    token = grpc.access_token_call_credentials(found.token)
    both = grpc.composite_channel_credentials(tls, token)
    return grpc.secure_channel(address, both, options)


def _required(target: str) -> _Credentials | None:
    if os.environ.get(RESTRICTED) != "tokens":
        return None
    found = _credentials()
    return found if found.are_required(target.partition(",")[0]) else None


@cache
def _credentials() -> _Credentials:
    """Returns the credentials of this process and its children; creates them once."""
    if _CREDENTIALS in os.environ:
        return _Credentials(Path(os.environ[_CREDENTIALS]))
    from tests.support.certificates import Authority
    from tests.support.tokens import keys_document, signed

    directory = Path(tempfile.mkdtemp(prefix="storesvc-credentials-"))
    Authority(directory).issue("server", "localhost", "127.0.0.1")
    (directory / "keys.json").write_text(keys_document())
    (directory / "token").write_text(signed("tests", seconds=24 * 3600))
    os.environ[_CREDENTIALS] = str(directory)
    return _Credentials(directory)
