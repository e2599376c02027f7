"""Keeping an upload alive while a save goes on, whatever it waits for."""

import threading
from types import TracebackType
from typing import Final, Self

import grpc

from storesvc_proto.v1 import upload_service_pb2 as api
from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub

_SIGNS_A_LEASE: Final = 3
_CALL_SECONDS: Final = 10.0


class KeptAlive:
    """Renews the lease of an upload while the context lasts.

    A sign that fails is no error: the next one may get through, and what ends the
    upload is told by the calls that write it.
    """

    def __init__(self, stub: UploadServiceStub, upload: api.Upload) -> None:
        self._stub = stub
        self._request = api.KeepUploadAliveRequest(name=upload.name, epoch=upload.epoch)
        lease = upload.lease_duration.ToTimedelta().total_seconds()
        self._interval = lease / _SIGNS_A_LEASE
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._renew, name="storesvc-lease", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()

    def _renew(self) -> None:
        while not self._ended.wait(self._interval):
            try:
                self._stub.KeepUploadAlive(self._request, timeout=_CALL_SECONDS)
            except (grpc.RpcError, ValueError):  # ValueError: the channel is closed
                continue
