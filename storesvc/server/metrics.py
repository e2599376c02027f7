"""Serves the metrics of a server over HTTP, for Prometheus.

The port has no authentication and serves no data of the store: names of runs appear
only if the operator lists them.
"""

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from storesvc.errors import InvalidFieldError
from storesvc.format.names import InvalidNameError, RunName
from storesvc.storage.config_files import read_file
from storesvc.telemetry.events import subscribe, unsubscribe

REQUEST_SECONDS: Final = 10.0
"""Maximum time between two parts of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsPort:
    """Address of the metrics."""

    port: int
    """Port to bind; 0 picks a free one."""
    host: str = "127.0.0.1"
    """Address to bind."""
    runs: tuple[str, ...] = ()
    """Runs (``namespace/run``) whose newest commit is a metric."""

    def check(self) -> None:
        """Rejects invalid names of runs.

        Raises:
            InvalidFieldError: A name is no ``namespace/run``.
        """
        for run in self.runs:
            try:
                RunName.parse(run)
            except InvalidNameError as e:
                raise InvalidFieldError(f"metrics run: {e}") from e


@asynccontextmanager
async def serve_metrics(
    port: MetricsPort | None, *, certificate: Path | None
) -> AsyncIterator[int | None]:
    """Serves metrics while the context lasts; yields the bound port.

    Args:
        port: The address; None: nothing is served or counted.
        certificate: TLS certificate whose expiry is a metric; None: there is none.

    Raises:
        InvalidFieldError: The address cannot be bound.
    """
    if port is None:
        yield None
        return
    from prometheus_client import disable_created_metrics, start_http_server

    from storesvc.telemetry.prometheus import Metrics

    # Without a time of creation for each counter: that doubles the series.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    metrics = Metrics(runs=port.runs)
    if certificate is not None and (expiry := _read_expiry(certificate)) is not None:
        metrics.track_certificate(expiry)
    try:
        server, thread = start_http_server(port.port, port.host, metrics.registry)
    except OSError as e:
        raise InvalidFieldError(
            f"metrics port {port.host}:{port.port}: cannot be bound: {e.strerror}; use "
            "another one"
        ) from e
    # or the thread and the descriptor of a silent connection would stay
    server.RequestHandlerClass.timeout = REQUEST_SECONDS  # type: ignore[attr-defined]
    subscribe(metrics)
    try:
        yield server.server_port
    finally:
        unsubscribe(metrics)
        server.shutdown()
        server.server_close()
        thread.join()


def _read_expiry(certificate: Path) -> Callable[[], float] | None:
    """Returns a function that reads when a certificate expires, in seconds since the
    epoch; None without the package that parses certificates."""
    try:
        from cryptography.x509 import load_pem_x509_certificate
    except ImportError:
        return None

    def expiry() -> float:
        try:
            found = load_pem_x509_certificate(read_file(certificate))
        except (OSError, ValueError):
            return math.nan
        return found.not_valid_after_utc.timestamp()

    return expiry
