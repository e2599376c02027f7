"""Runs the server as one process, or as several that share a port."""

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

import storesvc
from storesvc import failpoints
from storesvc.errors import InvalidFieldError, StoreError
from storesvc.server.app import (
    DRAIN_SECONDS,
    NOTICE_SECONDS,
    is_loopback,
    keep_freed_memory,
    open_store,
    running,
    unusable,
)
from storesvc.server.gc_scheduler import DEFAULT_INTERVAL, collecting
from storesvc.server.tls import Tls
from storesvc.server.workers import Lifeline, supervise
from storesvc.storage.location import is_writable, storage_at

END_SECONDS: Final = NOTICE_SECONDS + DRAIN_SECONDS + 5.0
"""Maximum time from SIGTERM to the end of the process. A storage call that has not
returned by then never returns, such as one for a file on a lost network mount."""

_log = logging.getLogger(__name__)


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
    tls: Tls | None
    """Certificates of the server; None serves plaintext."""
    gc_interval: timedelta = DEFAULT_INTERVAL
    """Interval between garbage collections; 0: none in the background."""
    is_read_only: bool = False
    """True to reject calls that change the store, and to collect nothing."""

    @property
    def address(self) -> str:
        """Address and port to bind, in gRPC's notation."""
        is_bare = ":" in self.host and not self.host.startswith("[")
        return f"[{self.host}]:{self.port}" if is_bare else f"{self.host}:{self.port}"

    def check(self, *, insecure: bool) -> None:
        """Rejects an unsafe or invalid configuration.

        Args:
            insecure: True to permit plaintext for other machines.

        Raises:
            InvalidFieldError: Other machines could connect in plaintext, or the
                interval is negative.
        """
        if self.gc_interval < timedelta(0):
            raise InvalidFieldError(
                "gc interval: expected 0 or more, got "
                f"{self.gc_interval.total_seconds():g} s"
            )
        if not (self.tls or insecure or is_loopback(self.host)):
            raise InvalidFieldError(
                f"host {self.host}: expected a loopback address or TLS, because "
                "plaintext lets any peer read and write the store; pass --tls-cert and "
                "--tls-key, or --insecure"
            )


def serve(
    serving: Serving, *, insecure: bool, ready_file: Path | None, workers: int = 1
) -> None:
    """Serves a store until SIGTERM or SIGINT, then drains.

    Args:
        serving: The configuration.
        insecure: True to permit plaintext for other machines.
        ready_file: File to write ``HOST:PORT`` to once calls are accepted.
        workers: Number of processes that accept calls.

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

    def ready(bound: Serving) -> None:
        how = " read-only" if bound.is_read_only else ""
        _log.info("serving %s%s at %s", bound.root, how, bound.address)
        if ready_file:
            # Written atomically: scripts read the file as soon as it exists.
            partial = ready_file.with_name(ready_file.name + ".partial")
            partial.write_text(f"{bound.address}\n")
            partial.rename(ready_file)

    if workers == 1:
        _prepare()
        asyncio.run(_serve(serving, ready))
    else:
        with _shared_port(serving) as bound:
            level = logging.getLogger().level
            work = partial(_work, bound, level)
            supervise(workers, work, ready=lambda: ready(bound))


def log_to_stderr(level: int | str) -> None:
    """Configures logging to stderr at a level."""
    logging.basicConfig(
        level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def _prepare() -> None:
    failpoints.arm_from(os.environ, version=storesvc.__version__)
    keep_freed_memory()


async def _serve(
    serving: Serving,
    ready: Callable[[Serving], None],
    lifeline: Lifeline | None = None,
) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def supervisor_gone() -> None:
        assert lifeline is not None
        loop.remove_reader(lifeline.fileno())
        end()

    def end() -> None:
        _end_in_any_case()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    if lifeline is not None:
        loop.add_reader(lifeline.fileno(), supervisor_gone)
    store = await open_store(serving.root, is_read_only=serving.is_read_only)
    interval = timedelta(0) if serving.is_read_only else serving.gc_interval
    async with running(
        store,
        serving.address,
        tls=serving.tls,
        shares_port=lifeline is not None,
        notice_seconds=NOTICE_SECONDS,
        read_only=serving.root if serving.is_read_only else "",
    ) as port:
        ready(replace(serving, port=port))
        async with collecting(store, interval):
            await stop.wait()
        _log.info("draining")
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


def _work(serving: Serving, log_level: int, lifeline: Lifeline) -> None:
    """Runs one of several workers."""
    log_to_stderr(log_level)
    try:
        _prepare()
        asyncio.run(_serve(serving, lambda _: lifeline.ready(), lifeline))
    except StoreError as e:
        lifeline.refuse(str(e))


@contextmanager
def _shared_port(serving: Serving) -> Iterator[Serving]:
    """Reserves a port for the workers; yields the configuration with that port.

    Raises:
        InvalidFieldError: The address cannot be bound.
    """
    try:
        kept = _bound(serving.host.strip("[]"), serving.port)
    except OSError as e:
        raise unusable(serving.address) from e
    with kept:
        yield replace(serving, port=kept.getsockname()[1])


def _bound(host: str, port: int) -> socket.socket:
    """Returns a bound socket that reserves a port and shares it with the workers."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, where = found[0]
    # 1. Bind without SO_REUSEPORT: fails if another process has the port, and finds a
    #    free one for port 0.
    with socket.socket(family, socket.SOCK_STREAM) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind(where)
        where = own.getsockname()
    # 2. Bind with it, so that the workers can bind the same port.
    kept = socket.socket(family, socket.SOCK_STREAM)
    try:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(where)
    except BaseException:
        kept.close()
        raise
    return kept
