"""Sends the spans of a server to a collector, by OTLP over HTTP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import storesvc
from storesvc.errors import InvalidFieldError
from storesvc.telemetry.events import subscribe, unsubscribe


@asynccontextmanager
async def traced(endpoint: str) -> AsyncIterator[None]:
    """Sends spans while the context lasts.

    Args:
        endpoint: URL of the collector, without ``/v1/traces``; empty: none are sent.

    Raises:
        InvalidFieldError: The URL is invalid, or the packages are not installed.
    """
    if not endpoint:
        yield
        return
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise InvalidFieldError(
            f"OTLP endpoint {endpoint!r}: expected a URL of a collector, such as "
            "http://localhost:4318"
        )
    try:
        from storesvc.telemetry.spans import Spans
    except ModuleNotFoundError as e:
        raise InvalidFieldError(
            f"spans need {e.name}, which is not installed: pip install 'storesvc[otel]'"
        ) from e
    spans = Spans(endpoint, version=storesvc.__version__)
    subscribe(spans)
    try:
        yield
    finally:
        unsubscribe(spans)
        spans.close()
