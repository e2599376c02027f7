"""A collector of spans, a server that sends it its own, and clients that do too."""

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.support.otlp_collector import Collector, collecting_spans
from tests.support.server_process import ServerProcess

EXPORTS = """
import json, sys
import numpy as np
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
import storesvc_client as store

provider = TracerProvider()
exporter = OTLPSpanExporter(endpoint=sys.argv[2] + "/v1/traces")
provider.add_span_processor(BatchSpanProcessor(exporter))
trace.set_tracer_provider(provider)
"""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting_spans() as found:
        yield found


@pytest.fixture(scope="module")
def traced_server(
    collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server that sends its spans to the collector."""
    folder = tmp_path_factory.mktemp("traced")
    process = ServerProcess(
        *(folder / "store", folder, "--otlp-endpoint", collector.url),
        *("--log-format", "json", "--gc-interval", "1s"),
    )
    process.environment["OTEL_BSP_SCHEDULE_DELAY"] = "100"
    process.start()
    yield process
    process.kill()


@pytest.fixture(scope="module")
def run_client(collector: Collector) -> Callable[..., str]:
    """Returns a function that runs a script in a process which sends its spans to the
    collector, and returns its output. Its arguments are a server and what follows."""

    def run(script: str, address: str, *arguments: str) -> str:
        given = [address, collector.url, *arguments]
        done = subprocess.run(
            [sys.executable, "-c", EXPORTS + script, *given],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
