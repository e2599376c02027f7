"""A server whose callers and policy a test chooses."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from storesvc.audit.reader import AuditReader
from storesvc.auth.policy import ANONYMOUS, Authentication, Binding, Policy, Principal
from storesvc.rpc.calls import Security
from tests.support.faulty_server import serving

CALLER = "x-caller"
"""Metadata key of the name of a caller."""


class Policies:
    """The policy in force of a server of a test."""

    def __init__(self) -> None:
        self.policy: Policy | None = None

    def bind(self, *bindings: tuple[str, str, str]) -> None:
        """Replaces the policy by bindings of a role, a pattern of runs and a name."""
        self.policy = Policy(
            bindings=tuple(
                Binding(role=role, runs=(runs,), who=(who,))
                for role, runs, who in bindings
            )
        )

    async def authenticate(self, context: Any) -> Principal:
        """Returns the principal that the client names."""
        for key, value in context.invocation_metadata():
            if key == CALLER:
                return Principal(name=value, authentication=Authentication.TOKEN)
        return ANONYMOUS


@contextmanager
def restricted(
    root: Path, observers: Sequence[Any] = (), audit: AuditReader | None = None
) -> "Iterator[Restricted]":
    """Serves a root with a policy that a test changes."""
    policies = Policies()
    security = Security(
        authenticate=policies.authenticate,
        policy=lambda: policies.policy,
        observers=tuple(observers),
        audit=audit,
    )
    with serving(root, security=security) as address:
        yield Restricted(address, policies)


class Restricted(NamedTuple):
    """A server with a policy."""

    address: str
    policies: Policies

    def channel(self, caller: str) -> grpc.Channel:
        """Returns a channel whose calls are of a caller."""
        return grpc.intercept_channel(
            grpc.insecure_channel(self.address), _Naming(caller)
        )


class _Naming(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds the name of the caller to each call."""

    def __init__(self, caller: str) -> None:
        self._caller = caller

    def _call(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = [*(details.metadata or ()), (CALLER, self._caller)]
        named = _Details(
            details.method, details.timeout, metadata, details.credentials, None, None
        )
        return continuation(named, request)

    intercept_unary_unary: Any = _call
    intercept_unary_stream: Any = _call
    intercept_stream_unary: Any = _call
    intercept_stream_stream: Any = _call


class _Details(NamedTuple):
    method: Any
    timeout: Any
    metadata: Any
    credentials: Any
    wait_for_ready: Any
    compression: Any
