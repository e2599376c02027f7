"""Renews the lease of an upload in the background while a save runs."""

import threading
from types import TracebackType
from typing import Final, Self

import grpc

from storesvc_proto.v1 import upload_service_pb2 as api
from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub

_RENEWALS_PER_LEASE: Final = 3
"""So that one failed renewal does not let the lease expire."""

_CALL_SECONDS: Final = 10.0
"""Timeout of one renewal."""


class LeaseRenewer:
    """Renews the lease of an upload while the context lasts.

    A failed renewal is not an error: the next one may succeed, and if the upload has
    ended, the calls that write to it report that.
    """

    def __init__(self, stub: UploadServiceStub, upload: api.Upload) -> None:
        self._stub = stub
        self._request = api.KeepUploadAliveRequest(name=upload.name, epoch=upload.epoch)
        lease = upload.lease_duration.ToTimedelta().total_seconds()
        self._interval = lease / _RENEWALS_PER_LEASE
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
        # Not joined: a renewal in flight may take its whole timeout, and one that
        # arrives after the end of the upload is rejected.
        self._ended.set()

    def _renew(self) -> None:
        while not self._ended.wait(self._interval):
            try:
                self._stub.KeepUploadAlive(self._request, timeout=_CALL_SECONDS)
            except (grpc.RpcError, ValueError):  # ValueError: the channel is closed
                continue
