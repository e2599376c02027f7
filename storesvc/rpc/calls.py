"""Makes each rpc of the contract a call with a caller.

`CallInterceptor` authenticates the caller, and sets the call for whatever runs in its
task (`storesvc.access.call`). It fails a call that ended well without a check of its
permissions, so that a handler that forgets one is a bug, not a hole.
"""

import asyncio
import inspect
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Final, cast

import grpc
import grpc.aio

from storesvc.access.call import Call, current
from storesvc.access.policy import ANONYMOUS, Principal
from storesvc.errors import IdentityRequiredError, TokenExpiredError
from storesvc.rpc.boundary import (
    Context,
    Continuation,
    is_of_contract,
    method_of,
    replaced,
)
from storesvc.rpc.permissions import RULES, Open, Public
from storesvc.rpc.security import Security
from storesvc.rpc.status import request_id_trailer
from storesvc.telemetry.scope import scope

LEEWAY_SECONDS: Final = 30.0
"""Time after which a call ends whose credential has expired: clocks differ."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Sets the caller of all rpcs; `ErrorInterceptor` must precede it."""

    def __init__(self, security: Security) -> None:
        self._security = security

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Returns the handler of a call, wrapped in its authentication."""
        handler = await continuation(handler_call_details)
        name = handler_call_details.method
        if handler is None or not is_of_contract(name):
            return handler
        rpc = name.rpartition("/")[2]
        return replaced(handler, self._called(rpc, method_of(handler)))

    def _called(
        self, rpc: str, method: Callable[[Any, Context], Any]
    ) -> Callable[[Any, Context], Any]:
        """Returns a method that runs as a call."""

        async def call(request: Any, context: Context) -> Any:
            async with self._call(rpc, context):
                return await method(request, context)

        async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
            async with (
                self._call(rpc, context),
                aclosing(method(request, context)) as responses,
            ):
                async for response in responses:
                    yield response

        return generate if inspect.isasyncgenfunction(method) else call

    @asynccontextmanager
    async def _call(self, rpc: str, context: Context) -> AsyncIterator[None]:
        security = self._security
        call = Call(
            principal=ANONYMOUS,
            policy=security.policy(),
            method=rpc,
            request_id=_request_id(),
            peer=context.peer(),
            observers=security.observers,
        )
        current.set(call)
        context.set_trailing_metadata(request_id_trailer())
        error: BaseException | None = None
        try:
            rule = RULES.get(rpc)
            if not isinstance(rule, Public):
                with suppress(*[IdentityRequiredError] * isinstance(rule, Open)):
                    call.principal = await security.authenticate(context)
                for observer in call.observers:
                    await observer.began(call)
            async with _until_expired(call.principal, context):
                yield
            assert call.is_checked, f"{rpc}: its permissions were not checked"
        except BaseException as e:
            error = e
            raise
        finally:
            for observer in call.observers:
                await observer.ended(call, error)


def _request_id() -> str:
    """Returns the id of the call: the one of its measurement, so that logs, spans and
    the audit log have the same."""
    measured = scope.get()
    return uuid.uuid4().hex if measured is None else measured.request_id


@asynccontextmanager
async def _until_expired(principal: Principal, context: Context) -> AsyncIterator[None]:
    """Ends a call soon after the credential of its caller has expired.

    Raises:
        TokenExpiredError: It has.
    """
    if principal.expire_time is None:
        yield
        return
    left = (principal.expire_time - datetime.now(UTC)).total_seconds() + LEEWAY_SECONDS
    # None without a deadline, in spite of its type
    deadline = cast("float | None", context.time_remaining())
    if deadline is not None and deadline <= left:  # most calls: it ends them first
        yield
        return
    try:
        async with asyncio.timeout(left) as limit:
            yield
    except TimeoutError as e:
        if not limit.expired():
            raise
        raise TokenExpiredError(
            f"the credential of {principal} expired at "
            f"{principal.expire_time:%Y-%m-%dT%H:%M:%SZ}, during the call; get another "
            "one and continue",
            principal=principal.name,
        ) from e
