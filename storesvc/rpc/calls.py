"""Measures each call, and gives each rpc of the contract its caller.

`Security` has the parts of a server that decide about its callers.

`MeasuringInterceptor` publishes the beginning and the end of each call, and counts its
bytes. Methods and statuses have the names of gRPC's own metrics (gRFC A66), and the
same is counted: messages without their five bytes of framing. Calls of methods that the
server does not have are counted as "other".

`CallInterceptor` authenticates the caller, and sets the call for whatever runs in its
task (`storesvc.auth.call`). It fails a call that ended well without a check of its
permissions, so that a handler that forgets one is a bug, not a hole.
"""

import asyncio
import inspect
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, cast

import grpc
import grpc.aio

from storesvc.audit.reader import AuditReader
from storesvc.auth.authenticator import is_local
from storesvc.auth.call import Call, CallObserver, current
from storesvc.auth.policy import ANONYMOUS, LOCAL, Policy, Principal
from storesvc.auth.policy_file import QuotaRule
from storesvc.errors import IdentityRequiredError, TokenExpiredError
from storesvc.lending.lender import Lender
from storesvc.rpc.methods import RULES, Open, Public
from storesvc.rpc.status import (
    KINDS,
    Context,
    Continuation,
    Handler,
    handler_method,
    is_contract_method,
    replace_method,
    request_id_trailer,
    wrap_method,
)
from storesvc.telemetry.events import (
    CallEnded,
    CallScope,
    CallStarted,
    Span,
    publish,
    scope,
)
from storesvc_proto.v1 import access_service_pb2 as access_api


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Authentication, authorization, and the parts that depend on the caller."""

    authenticate: Callable[[Context], Awaitable[Principal]]
    """Returns the caller of a call, or raises why its credentials are rejected."""
    policy: Callable[[], Policy | None]
    """Returns the policy in force; None permits everything."""
    observers: tuple[CallObserver, ...] = ()
    """Take part in each call, in this order."""
    check_format: Callable[[], Awaitable[None]] | None = None
    """Checks each change first: see ``StoreFormat.check``."""
    login_options: Callable[[], Sequence[access_api.LoginOption]] = list
    """Returns the issuers that people can log in with."""
    lender: Lender | None = None
    """Lends credentials; None: none are lent."""
    audit: AuditReader | None = None
    """Reads the audit log; None: there is none."""
    quota_rules: Callable[[], tuple[Sequence[QuotaRule], QuotaRule | None]] = lambda: (
        (),
        None,
    )
    """Returns the quotas of namespaces, and the one of each principal."""


async def _by_machine(context: Context) -> Principal:
    return LOCAL if is_local(context.peer()) else ANONYMOUS


OPEN: Final = Security(authenticate=_by_machine, policy=lambda: None)
"""Permits everything to every caller that can connect."""

OTHER: Final = "other"
"""Method of all calls of methods that the server does not have."""

TRACEPARENT: Final = "traceparent"
"""Metadata with the span of the caller (W3C Trace Context)."""


class MeasuringInterceptor(grpc.aio.ServerInterceptor):
    """Measures all calls; it must precede all other interceptors."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        sent = handler_call_details.invocation_metadata or ()
        parents = (v for k, v in sent if k == TRACEPARENT and isinstance(v, str))
        found = CallScope(
            method=handler_call_details.method.removeprefix("/"),
            request_id=uuid.uuid4().hex,
            parent=next(parents, ""),
        )
        scope.set(found)
        handler = await continuation(handler_call_details)
        if handler is not None:
            return _measure_handler(handler, found)
        publish(CallStarted(method=OTHER))
        publish(_make_call_ended(found, Span(), method=OTHER, status="UNIMPLEMENTED"))
        return None


def _measure_handler(handler: Any, found: CallScope) -> Handler:
    """Returns a handler that counts its messages and publishes its end."""
    method: Callable[[Any, Context], Any] = handler_method(handler)
    parse, serialize = handler.request_deserializer, handler.response_serializer

    async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
        with _publish_call(found, context):
            async with aclosing(method(request, context)) as responses:
                async for response in responses:
                    yield response

    def count_received(data: bytes) -> Any:
        found.received_bytes += len(data)
        return data if parse is None else parse(data)

    def sent(message: Any) -> bytes:
        data: bytes = message if serialize is None else serialize(message)
        found.sent_bytes += len(data)
        return data

    async def call(request: Any, context: Context) -> Any:
        with _publish_call(found, context):
            response = await method(request, context)
            # Here, because gRPC serializes a single response after the end of the call.
            return response if handler.response_streaming else sent(response)

    return KINDS[handler.request_streaming, handler.response_streaming](
        generate if inspect.isasyncgenfunction(method) else call,
        request_deserializer=count_received,
        response_serializer=sent if handler.response_streaming else None,
    )


@contextmanager
def _publish_call(found: CallScope, context: Context) -> Iterator[None]:
    span = Span()
    publish(CallStarted(method=found.method))
    status = ""
    try:
        yield
        # 0 unless a handler of gRPC's own services has set it, in spite of its type
        code = cast("object", context.code())
        status = code.name if isinstance(code, grpc.StatusCode) else "OK"
    except (asyncio.CancelledError, GeneratorExit):
        status = "CANCELLED"
        raise
    except BaseException:
        status = "UNKNOWN"  # gRPC's status for an exception of a handler
        raise
    finally:
        publish(
            _make_call_ended(
                found, span, method=found.method, status=found.status or status
            )
        )


def _make_call_ended(
    found: CallScope, span: Span, *, method: str, status: str
) -> CallEnded:
    call = current.get()
    return CallEnded(
        method=method,
        status=status,
        reason=found.reason,
        start=span.start,
        seconds=span.seconds,
        received_bytes=found.received_bytes,
        sent_bytes=found.sent_bytes,
        request_id=found.request_id,
        principal=call.principal.name if call is not None else "",
        subject=dict(call.subject) if call is not None else {},
        parent=found.parent,
    )


LEEWAY_SECONDS: Final = 30.0
"""Time after which a call ends whose credential has expired: clocks differ."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Sets the caller of all rpcs; `ErrorInterceptor` must precede it."""

    def __init__(self, security: Security) -> None:
        self._security = security

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        name = handler_call_details.method
        if handler is None or not is_contract_method(name):
            return handler
        run = partial(self._call, name.rpartition("/")[2])
        return replace_method(handler, wrap_method(run, handler_method(handler)))

    @asynccontextmanager
    async def _call(self, rpc: str, context: Context) -> AsyncIterator[None]:
        """Runs the context as a call of an rpc."""
        security = self._security
        measured = scope.get()
        call = Call(
            principal=ANONYMOUS,
            policy=security.policy(),
            method=rpc,
            # that of its measurement, so that logs, spans and the audit log have it too
            request_id=measured.request_id if measured else uuid.uuid4().hex,
            peer=context.peer(),
            observers=security.observers,
            check_format=security.check_format,
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


@asynccontextmanager
async def _until_expired(principal: Principal, context: Context) -> AsyncIterator[None]:
    """Ends a call soon after the credential of its caller has expired."""
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
