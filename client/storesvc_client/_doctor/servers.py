"""Checks a server: its version, encryption, the caller's identity and permissions, its
clock, and what direct access would gain."""

from datetime import UTC, datetime
from importlib.metadata import version
from typing import Final

from storesvc_client import Client
from storesvc_client._doctor.directory import judge_clock
from storesvc_client._doctor.findings import Finding, passed, problem

NEEDED: Final = (
    "uploads.begin",
    "uploads.commit",
    "checkpoints.list",
    "checkpoints.read",
)


def check_server(
    client: Client, *, is_encrypted: bool, is_remote: bool
) -> list[Finding]:
    """Asks a server about itself and the caller; writes nothing.

    Raises:
        StoreError: The server does not answer.
    """
    return [
        _check_version(client.info().version),
        _check_encryption(is_encrypted=is_encrypted, is_remote=is_remote),
        *_check_identity(client, is_remote=is_remote),
    ]


def _check_version(server: str) -> Finding:
    ours = version("storesvc")
    shown = f"server {server}, client {ours}"
    if server.split(".")[:2] == ours.split(".")[:2]:
        return passed("version", shown)
    return problem("version.differs", shown)


def _check_encryption(*, is_encrypted: bool, is_remote: bool) -> Finding:
    if is_encrypted:
        return passed("encryption", "TLS")
    if not is_remote:
        return passed("encryption", "plaintext within this machine")
    return problem("encryption.none", "plaintext to another machine")


def _check_identity(client: Client, *, is_remote: bool) -> list[Finding]:
    who = client.identity()
    name = who.principal or "anonymous"
    if not who.is_restricted:
        shown = f"{name}: there is no policy, and every caller may do everything"
        return [problem("policy.none", shown) if is_remote else passed("policy", shown)]
    allowed = client.test_permissions(None, NEEDED)
    lacking = [permission for permission in NEEDED if permission not in allowed]
    if not lacking:
        return [passed("permissions", f"{name}: {', '.join(NEEDED)}")]
    shown = f"{name} lacks {', '.join(lacking)} on all runs"
    return [problem("permissions.role", shown)]


def check_server_clock(client: Client, run: str) -> list[Finding]:
    """Compares the time of a checkpoint that was just saved with this machine's."""
    newest = client.run(run).latest()
    skew = (newest.create_time - datetime.now(UTC)).total_seconds()
    return judge_clock(min(skew, 0.0) if skew > -60 else skew, "the server")
