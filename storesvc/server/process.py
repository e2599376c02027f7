"""Runs the server as a process: its configuration, signals, and order of shutdown.

Its log has lines of text, or one JSON object for each record. Records of a call have
its id, as have the audit log, spans, trailers and errors. Its metrics are served over
HTTP, for Prometheus, next to the probes of Kubernetes: ``/healthz`` fails if the loop
of the server is blocked, ``/readyz`` also before it serves and once it drains. Neither
asks the storage, which no new server would repair. That port has no authentication and
serves no data of the store: names of runs appear only if the operator lists them.
"""

import asyncio
import json
import logging
import math
import os
import signal
import socket
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit

import storesvc
from storesvc import failpoints
from storesvc.auth.call import current
from storesvc.errors import InvalidFieldError
from storesvc.format.names import (
    InvalidNameError,
    RunName,
    parse_traceparent,
    upload_trace,
)
from storesvc.server.app import (
    DRAIN_SECONDS,
    NOTICE_SECONDS,
    keep_freed_memory,
    open_store,
    running,
    take_descriptors,
    unusable,
)
from storesvc.server.gc_scheduler import (
    DEFAULT_INTERVAL,
    apply_pending_retention,
    collecting,
)
from storesvc.server.security import Audit, Tls, make_security, record_audit
from storesvc.storage.bucket_settings import warn_about_settings
from storesvc.storage.config_files import read_file
from storesvc.storage.location import is_this_machine, is_writable, storage_at
from storesvc.storage.requests import background_task
from storesvc.telemetry.events import parse_subject, scope, subscribe, unsubscribe

LogFormat: TypeAlias = Literal["text", "json"]


def log_to_stderr(level: int | str, *, form: LogFormat = "text") -> None:
    text = "%(asctime)s %(levelname)s %(name)s:%(call)s %(message)s"
    logging.basicConfig(level=level, format=text)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_CallFilter())
        if form == "json":
            handler.setFormatter(JsonFormatter())


class _CallFilter(logging.Filter):
    """Adds the id of the call that logs to each record."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Adds the id; keeps the record."""
        call = current.get()
        record.call = f" [{call.request_id}]" if call is not None else ""
        return True


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON.

    The fields are ``time``, ``level``, ``logger`` and ``message``; in a call also
    ``request_id``, ``method``, ``principal`` and, as far as they are known, ``run``,
    ``step``, ``upload`` and ``trace_id``; after an exception its ``traceback``.
    """

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        fields = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_call_fields(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _call_fields() -> dict[str, str]:
    """Returns the fields of the call that logs."""
    call, measured = current.get(), scope.get()
    if call is None:
        return {}
    subject = parse_subject(call.subject.get("name", ""))
    fields = {
        "request_id": call.request_id,
        "method": call.method,
        "principal": call.principal.name,
        **subject,
    }
    ids = upload_trace(subject.get("upload", ""))
    if ids is None and measured is not None:
        ids = parse_traceparent(measured.parent)
    if ids is not None:
        fields["trace_id"] = f"{ids.trace:032x}"
    return fields


REQUEST_SECONDS: Final = 10.0
"""Maximum time between two parts of a request."""

LOOP_SECONDS: Final = 5.0
"""Time within which the loop of a healthy server runs a callback."""

_UNREADY: Final = "503 Service Unavailable"
_WsgiApp: TypeAlias = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


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
        """Rejects invalid names of runs."""
        for run in self.runs:
            try:
                RunName.parse(run)
            except InvalidNameError as e:
                raise InvalidFieldError(f"metrics run: {e}") from e


@asynccontextmanager
async def serve_metrics(
    port: MetricsPort | None,
    *,
    certificate: Path | None,
    is_ready: Callable[[], bool],
) -> AsyncIterator[int | None]:
    """Serves metrics and probes while the context lasts; yields the bound port.

    Args:
        port: The address; None: nothing is served or counted.
        certificate: TLS certificate whose expiry is a metric; None: there is none.
        is_ready: Returns whether the server accepts calls; called in its loop.

    Raises:
        InvalidFieldError: The address cannot be bound.
    """
    if port is None:
        yield None
        return
    from prometheus_client import (
        disable_created_metrics,
        make_wsgi_app,
        start_http_server,
    )

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
    loop, app = asyncio.get_running_loop(), make_wsgi_app(metrics.registry)
    server.set_app(_add_probes(app, loop, is_ready))
    subscribe(metrics)
    try:
        yield server.server_port
    finally:
        unsubscribe(metrics)
        server.shutdown()
        server.server_close()
        thread.join()


def _add_probes(
    metrics: _WsgiApp, loop: asyncio.AbstractEventLoop, is_ready: Callable[[], bool]
) -> _WsgiApp:
    """Returns an application of the metrics and, under their paths, the probes."""

    async def look() -> bool:
        return is_ready()

    def answer(
        environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path not in ("/healthz", "/readyz"):
            return metrics(environ, start_response)
        try:
            ready = asyncio.run_coroutine_threadsafe(look(), loop).result(LOOP_SECONDS)
            is_well = ready or path == "/healthz"
            status, text = ("200 OK", "ok") if is_well else (_UNREADY, "does not serve")
        except TimeoutError:
            status, text = _UNREADY, f"the loop is blocked for {LOOP_SECONDS:g} s"
        start_response(status, [("Content-Type", "text/plain")])
        return [f"{text}\n".encode()]

    return answer


def _read_expiry(certificate: Path) -> Callable[[], float] | None:
    """Returns a reader of the expiry; None without the package for certificates."""
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


@asynccontextmanager
async def send_spans(endpoint: str) -> AsyncIterator[None]:
    """Sends spans to a collector, by OTLP over HTTP, while the context lasts.

    Args:
        endpoint: URL of the collector, without ``/v1/traces``; empty: none are sent.
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


DISCARD_SECONDS: Final = 2.0
"""Maximum time for deletions in the background, and for retention, after the drain; the
next collection continues them."""

END_SECONDS: Final = NOTICE_SECONDS + DRAIN_SECONDS + 5.0
"""Maximum time from SIGTERM to the end of the process. A storage call that has not
returned by then never returns, such as one for a file on a lost network mount."""

_log = logging.getLogger(__name__)


ExtraServer: TypeAlias = Callable[[str], AbstractContextManager[str]]
"""Returns a context that serves, as a client of the server at an address, and yields
what the log says. It is entered and left in threads, because it calls the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Configuration of a server."""

    root: str
    """URI of the store: ``file:///PATH``, ``memory://``, ``gs://BUCKET/PREFIX`` or
    ``s3://BUCKET/PREFIX``."""
    host: str
    """Address to bind."""
    port: int
    """Port to bind; 0 picks a free one."""
    unix: Path | None = None
    """Unix socket to bind instead of both, in a directory of this user alone."""
    tls: Tls | None
    """Certificates of the server; None serves plaintext."""
    gc_interval: timedelta = DEFAULT_INTERVAL
    """Interval between garbage collections; 0: none in the background."""
    collects_only: bool = False
    """True to accept no calls."""
    is_read_only: bool = False
    """True to reject calls that change the store, and to collect nothing."""
    policy: Path | None = None
    """File with the policy; None: there is none."""
    anonymous: str = ""
    """Role of every caller, in addition to the policy; empty: none."""
    audit: Audit | None = None
    """The audit log; None: there is none."""
    metrics: MetricsPort | None = None
    """Address of the metrics; None: none are served."""
    otlp_endpoint: str = ""
    """URL of the collector that receives spans; empty: none are sent."""
    extra_server: "ExtraServer | None" = None
    """Serves the store in another protocol; None: there is none."""

    @property
    def address(self) -> str:
        """Address and port to bind, in gRPC's notation."""
        if self.unix is not None:
            return f"unix:{self.unix.absolute()}"
        is_bare = ":" in self.host and not self.host.startswith("[")
        return f"[{self.host}]:{self.port}" if is_bare else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach it."""
        return self.unix is not None or is_this_machine(self.host)

    def check(self, *, insecure: bool) -> None:
        """Rejects an unsafe or invalid configuration.

        Args:
            insecure: True to permit plaintext for other machines.
        """
        if self.gc_interval < timedelta(0):
            raise InvalidFieldError(
                "gc interval: expected 0 or more, got "
                f"{self.gc_interval.total_seconds():g} s"
            )
        if self.metrics is not None:
            self.metrics.check()
        if self.unix is not None:
            check_socket(self.unix)
        if insecure or self.is_local:
            return
        if not self.tls:
            raise InvalidFieldError(
                f"host {self.host}: expected a loopback address or TLS, because "
                "plaintext lets any peer read and write the store; pass --tls-cert and "
                "--tls-key, or --insecure"
            )
        if not (self.policy or self.anonymous):
            raise InvalidFieldError(
                f"host {self.host}: expected a loopback address or a policy, because "
                "without one any client may read and write the store; pass --policy, "
                "or --anonymous with the role of every client"
            )


def check_socket(path: Path) -> None:
    """Rejects a Unix socket that other users could connect to, or that is in use;
    creates its directory."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    found = path.parent.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise InvalidFieldError(
            f"socket {path}: expected a directory that only this user may enter, got "
            f"the mode {stat.S_IMODE(found.st_mode):04o}, owner {found.st_uid}; create "
            "one with mkdir -m 700"
        )
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        probe.connect(str(path))
        raise unusable(f"unix:{path}")


def serve(serving: Serving, *, insecure: bool, ready_file: Path | None) -> None:
    """Serves a store until SIGTERM or SIGINT, then drains.

    Args:
        insecure: True to permit plaintext for other machines.
        ready_file: File to write ``HOST:PORT`` to once calls are accepted.

    Raises:
        InvalidFieldError: Plaintext would be open to other machines, the address or the
            root is unusable, or failpoints are armed in a released version.
    """
    serving.check(insecure=insecure)
    if not serving.is_read_only and not is_writable(storage_at(serving.root)):
        _log.warning(
            "root %s is read-only for this process: restores are served, calls that "
            "write are rejected; mount it for writing, or serve it with --read-only",
            serving.root,
        )

    def ready(bound: Serving, notes: Sequence[str]) -> None:
        how = " read-only" if bound.is_read_only else ""
        if bound.collects_only:
            _log.info("collecting %s every %s", bound.root, bound.gc_interval)
        else:
            _log.info("serving %s%s at %s", bound.root, how, bound.address)
            if not (bound.unix or bound.policy or bound.anonymous or insecure):
                _log.info(
                    "every user of this machine may call it; --unix PATH serves this "
                    "user alone, --policy says who may do what"
                )
        for note in notes:
            _log.info("%s", note)
        if ready_file and not bound.collects_only:
            # Written atomically: scripts read the file as soon as it exists.
            partial = ready_file.with_name(ready_file.name + ".partial")
            partial.write_text(f"{bound.address}\n")
            partial.rename(ready_file)

    failpoints.arm_from(os.environ, version=storesvc.__version__)
    keep_freed_memory()
    asyncio.run(_serve(serving, ready))


async def _serve(
    serving: Serving, ready: Callable[[Serving, Sequence[str]], None]
) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    serves = asyncio.Event()

    def is_ready() -> bool:
        return serves.is_set() and not stop.is_set()

    def end() -> None:
        _end_in_any_case()
        stop.set()

    # 1. Signals first: a process that opens a store on a storage that does not answer
    #    must stop, too.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    security = make_security(
        serving.policy,
        anonymous=serving.anonymous,
        root=serving.root,
        has_local=serving.is_local,
    )
    store = await open_store(serving.root, is_read_only=serving.is_read_only)
    if not store.bucket.has_files:  # files are deleted faster than a reply is sent
        store.commits.discards.defer()
    interval = timedelta(0) if serving.is_read_only else serving.gc_interval
    certificate = serving.tls.certificate if serving.tls else None
    async with AsyncExitStack() as stack:
        metrics_port = await stack.enter_async_context(
            serve_metrics(serving.metrics, certificate=certificate, is_ready=is_ready)
        )
        await stack.enter_async_context(send_spans(serving.otlp_endpoint))
        security = await stack.enter_async_context(
            record_audit(security, serving.audit)
        )
        port, notes, inner = serving.port, list[str](), ""
        if serving.extra_server:
            folder = stack.enter_context(TemporaryDirectory(prefix="storesvc-"))
            inner = f"unix:{folder}/socket"
        if not serving.collects_only:
            served = running(
                store,
                serving.address,
                tls=serving.tls,
                notice_seconds=NOTICE_SECONDS,
                read_only=serving.root if serving.is_read_only else "",
                security=security,
                max_connections=take_descriptors(),
                inner_address=inner,
            )
            port = (await stack.enter_async_context(served)).port
        if serving.extra_server:
            extra = serving.extra_server(inner)
            notes.append(await asyncio.to_thread(extra.__enter__))
            leave = partial(extra.__exit__, None, None, None)
            stack.push_async_callback(asyncio.to_thread, leave)
        # 2. Report the address only now: calls are accepted.
        serves.set()
        if serving.metrics and metrics_port:
            notes.append(f"metrics at http://{serving.metrics.host}:{metrics_port}")
        ready(replace(serving, port=port), notes)
        # 3. The collection ends before the drain, and gives its lease back.
        storage = store.bucket.opened.storage
        async with (
            background_task(warn_about_settings(storage)),
            collecting(store, interval),
        ):
            await stop.wait()
        _log.info("draining")
    # 4. Commits that were answered may still be deleting what they left, and exceed the
    #    policies of their runs.
    await asyncio.gather(
        store.commits.discards.drain(DISCARD_SECONDS),
        apply_pending_retention(store, DISCARD_SECONDS, is_collected=bool(interval)),
    )
    _log.info("stopped")


def _end_in_any_case() -> None:
    """Ends the process after the time to drain, even if a thread is blocked."""

    def end() -> None:
        _log.error(
            "a storage call has not returned within %g s after the end of the drain; "
            "exiting without it",
            END_SECONDS - NOTICE_SECONDS - DRAIN_SECONDS,
        )
        os._exit(1)

    timer = threading.Timer(END_SECONDS, end)
    timer.daemon = True
    timer.start()
