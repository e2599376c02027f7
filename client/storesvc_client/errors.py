"""Every error this library raises.

The tree, with what a caller would do::

    StoreError
    ├── InvalidRequestError     (ValueError)       correct the call
    ├── UnsupportedLeafError    (TypeError)        correct the tree
    ├── MismatchError           (ValueError)       correct the restore target
    ├── StructureError          (ValueError)       restore with the model's code
    ├── NotFoundError           (LookupError)      name an object that exists
    ├── AlreadyExistsError                         save another step
    ├── ConflictError                              start the save again
    ├── PeerFailedError                            look at the process that it names
    ├── PreconditionError                          do the missing step first
    ├── DataLossError                              use another checkpoint
    ├── LimitError                                 free space, or send less
    ├── UnauthenticatedError    (PermissionError)  get another token or certificate
    ├── PermissionDeniedError   (PermissionError)  ask for the permission it names
    ├── UnavailableError        (ConnectionError)  retry later
    └── TokenExpiredError       (both)             get another token

``StoreError.reason`` has the precise cause: the name of an ``ErrorReason`` of the
contract (``proto/storesvc/v1/errors.proto``), or "" for causes in the client. Messages
are for people; programs use ``reason`` and ``metadata``.
"""

import logging
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final, cast

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from storesvc.storage.location import is_this_machine

_log = logging.getLogger("storesvc_client")


class StoreError(Exception):
    """Base of all errors of this library.

    >>> try:
    ...     state = run.restore()
    ... except StoreError as error:
    ...     print(error.reason, error)
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        metadata: Mapping[str, str] = MappingProxyType({}),
        retry_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        """Name of an ``ErrorReason`` without its prefix, or ""."""
        self.metadata = metadata
        """Values that the message mentions, for programs."""
        self.retry_seconds = retry_seconds
        """Seconds after which the server expects a retry to succeed; None if it gave
        none."""


class InvalidRequestError(StoreError, ValueError):
    """An argument has another type, or is out of range."""


class UnsupportedLeafError(StoreError, TypeError):
    """A tree has leaves that a checkpoint cannot store; lists them."""


class MismatchError(StoreError, ValueError):
    """A checkpoint does not match the target of a restore; lists every leaf."""


@contextmanager
def without_advice() -> Generator[None]:
    """Drops from a ``MismatchError`` the options of ``Run.restore`` that it names, in a
    call that does not have them."""
    try:
        yield
    except MismatchError as e:
        if hints := e.metadata.get("hints"):
            e.args, e.metadata = (
                (str(e).removesuffix(hints),),
                {**e.metadata, "hints": ""},
            )
        raise


class StructureError(StoreError, ValueError):
    """The saved structure of a model is damaged, names classes or functions that are
    not allowed, or lacks values that cannot be stored, such as closures."""


class NotFoundError(StoreError, LookupError):
    """There is no such run, checkpoint, tag, hold, upload or leaf."""


class AlreadyExistsError(StoreError):
    """The step is committed already; a step is written once."""


class ConflictError(StoreError):
    """Another call changed the same object, or another upload took the step."""


class PeerFailedError(StoreError):
    """Another process of the job failed its part of a save or a restore.

    The message names the process and the cause, which that process raises itself.
    """


class PreconditionError(StoreError):
    """A precondition of the call does not hold; names what to do first."""


class DataLossError(StoreError):
    """Stored bytes are missing or corrupt."""


class LimitError(StoreError):
    """A limit of the server, or of its storage, is exceeded."""


class UnauthenticatedError(StoreError, PermissionError):
    """The server requires another token or client certificate, and names which."""


class PermissionDeniedError(StoreError, PermissionError):
    """The policy of the server denies the call; names the caller and the permission."""


class UnavailableError(StoreError, ConnectionError):
    """The server cannot be reached, or does not answer before a timeout."""


class TokenExpiredError(UnauthenticatedError, UnavailableError):
    """A token expired during a call. Calls are retried with the next token; this error
    is raised if there was none for as long as a server's restart takes."""


_BY_CODE: Final[Mapping[str, type[StoreError]]] = {
    "INVALID_ARGUMENT": InvalidRequestError,
    "NOT_FOUND": NotFoundError,
    "ALREADY_EXISTS": AlreadyExistsError,
    "ABORTED": ConflictError,
    "FAILED_PRECONDITION": PreconditionError,
    "DATA_LOSS": DataLossError,
    "RESOURCE_EXHAUSTED": LimitError,
    "UNAUTHENTICATED": UnauthenticatedError,
    "PERMISSION_DENIED": PermissionDeniedError,
}

_UNAVAILABLE: Final = ("UNAVAILABLE", "DEADLINE_EXCEEDED")
"""Codes of an ``UnavailableError``, if the response has a reason: without one, gRPC
itself ended the call, and the message says where."""

_BY_REASON: Final[Mapping[str, type[StoreError]]] = {
    "TOKEN_EXPIRED": TokenExpiredError,
    "UPLOAD_NOT_FOUND": ConflictError,  # another call has ended this process's upload
}
"""Error classes of reasons whose code has another."""


def error_class(code: str, reason: str) -> type[StoreError]:
    """Returns the class of an error by its code of gRPC and its ``ErrorReason``."""
    if reason and code in _UNAVAILABLE:
        return UnavailableError
    return _BY_REASON.get(reason) or _BY_CODE.get(code, StoreError)


@contextmanager
def translate_rpc_errors(address: str) -> Generator[None]:
    """Translates each ``grpc.RpcError`` raised inside into an error of this library.

    Use it around the iteration of a stream, too: a stream fails late. The gRPC error is
    not chained, as the message has its cause and users read one traceback; it is logged
    at level DEBUG.
    """
    try:
        yield
    except grpc.RpcError as e:
        _log.debug("call of %s failed", address, exc_info=e)
        raise _error(e, address) from None
    except ValueError as e:  # raised by gRPC for a closed channel
        if "closed" not in str(e):
            raise
        raise InvalidRequestError(
            f"the client of {address} is closed; connect again"
        ) from None


def _proxy(address: str) -> str:
    """Returns which proxy gRPC uses for an address, for a message, or ""."""
    host = address.partition(",")[0].rpartition(":")[0]
    names = ("grpc_proxy", "https_proxy", "http_proxy")  # in gRPC's order
    name = next(filter(os.environ.get, names), None)
    if name is None or is_this_machine(host):
        return ""
    from urllib.request import proxy_bypass

    if proxy_bypass(host):  # what no_proxy lists
        return ""
    return (
        f", through the proxy {os.environ[name]} of {name}; no_proxy={host} avoids it"
    )


def _error(e: grpc.RpcError, address: str) -> StoreError:
    # gRPC raises them as one object.
    assert isinstance(e, grpc.Call | grpc.aio.AioRpcError)
    info, retry_seconds = _details(cast("grpc.Call", e))
    if info is not None:
        text = e.details() or ""
        if info.reason == "RUN_NOT_FOUND" and not info.metadata.get("nearest"):
            text = f"store {address}: {text}"  # it may be another than was meant
        return error_class(e.code().name, info.reason)(
            text,
            reason=info.reason,
            metadata=dict(info.metadata),
            retry_seconds=retry_seconds,
        )
    if e.code() is grpc.StatusCode.UNAVAILABLE:
        details = (e.details() or "no cause given").removesuffix(": OK")
        cause = details.rpartition(": ")[2].strip("[]")
        return UnavailableError(
            f"store {address} cannot be reached ({cause}{_proxy(address)}); start its "
            "server, or correct the address"
        )
    if e.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:  # a limit of gRPC itself
        return LimitError(
            f"store {address} takes no call of this size ({e.details()}); send less in "
            "one call, or use a token with fewer claims",
            reason="LIMIT_EXCEEDED",
        )
    if e.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return UnavailableError(
            f"store {address} did not answer in time; try again, or allow more time"
        )
    if e.code() is grpc.StatusCode.CANCELLED:  # a server that stops cancels its calls
        return UnavailableError(
            f"store {address} ended the call, as a server does that stops; try again"
        )
    kind = error_class(e.code().name, "")
    return kind(f"store {address} failed: {e.code().name}: {e.details()}")


def _details(e: grpc.Call) -> tuple[error_details_pb2.ErrorInfo | None, float | None]:
    """Returns the ``ErrorInfo`` of a storesvc server's response, and its retry delay in
    seconds; None where the response has none."""
    try:
        status = rpc_status.from_call(e)
    except ValueError:  # details that contradict the status: not sent by storesvc
        return None, None
    found, seconds = None, None
    for detail in status.details if status else ():
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == "storesvc":
            found = info
        elif detail.Unpack(retry):
            seconds = retry.retry_delay.ToTimedelta().total_seconds()
    return found, seconds
