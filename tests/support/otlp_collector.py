"""A collector of spans: a real endpoint of OTLP over HTTP."""

import gzip
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSpan:
    """A span as it arrived."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    start: float
    end: float
    attributes: dict[str, Any]
    events: tuple[str, ...]
    is_error: bool


class Collector(ThreadingHTTPServer):
    """Receives spans on a port of this machine."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Export)
        self.spans: list[ReceivedSpan] = []
        self.delay_seconds = 0.0
        """Time for which it does not answer."""

    @property
    def url(self) -> str:
        """URL for exporters."""
        return f"http://127.0.0.1:{self.server_port}"

    def until(
        self, condition: Callable[[Sequence[ReceivedSpan]], object]
    ) -> list[ReceivedSpan]:
        """Waits for a condition on the spans, and returns them."""
        deadline = time.monotonic() + 30
        while not condition(self.spans):
            assert time.monotonic() < deadline, self.spans
            time.sleep(0.05)
        return list(self.spans)


@contextmanager
def collecting_spans() -> Iterator[Collector]:
    """Runs a collector while the context lasts."""
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join()


class _Export(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        """Receives a batch."""
        body = self.rfile.read(int(self.headers["content-length"]))
        time.sleep(self.server.delay_seconds)
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        assert self.path == "/v1/traces"
        for resource in request.resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            for scoped in resource.scope_spans:
                self.server.spans += [_received(service, one) for one in scoped.spans]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


def _received(service: str, span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        start=span.start_time_unix_nano / 1e9,
        end=span.end_time_unix_nano / 1e9,
        attributes=_values(span.attributes),
        events=tuple(event.name for event in span.events),
        is_error=span.status.code == 2,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {
        one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes
    }
