"""Serving: the server as a process, or as several that share a port."""

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
"""After SIGTERM: what has not returned by then never does, as a call for a file on a
network that is gone."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What a server serves, and where."""

    root: str
    """``file:///PATH``, ``memory://``, ``gs://BUCKET/PREFIX`` or
    ``s3://BUCKET/PREFIX``."""
    host: str
    """The address to bind."""
    port: int
    """The port to bind; 0 takes a free one."""
    tls: Tls | None
    """The server's certificates; None serves plaintext."""
    gc_interval: timedelta = DEFAULT_INTERVAL
    """Between passes that collect garbage; 0: none by itself."""
    is_read_only: bool = False
    """Whether calls that change the store are rejected, and it collects nothing."""

    @property
    def address(self) -> str:
        """What to bind, as gRPC writes it."""
        is_bare = ":" in self.host and not self.host.startswith("[")
        return f"[{self.host}]:{self.port}" if is_bare else f"{self.host}:{self.port}"

    def check(self, *, insecure: bool) -> None:
        """Refuses what must not be served.

        Args:
            insecure: Whether plaintext may be served to other machines.

        Raises:
            InvalidFieldError: It would be open to other machines, or the interval
                cannot be.
        """
        if self.gc_interval < timedelta(0):
            raise InvalidFieldError(
                "gc interval: expected 0 or more, got "
                f"{self.gc_interval.total_seconds():g} s"
            )
        if not (self.tls or insecure or is_loopback(self.host)):
            raise InvalidFieldError(
                f"host {self.host}: expected a loopback address or TLS, because anyone "
                "who reaches a plaintext server can read and write its store; give a "
                "certificate and its key, or --insecure"
            )


def serve(
    serving: Serving, *, insecure: bool, ready_file: Path | None, workers: int = 1
) -> None:
    """Serves a store until SIGTERM or SIGINT, then drains.

    Args:
        serving: What, and where.
        insecure: Whether plaintext may be served to other machines.
        ready_file: Where to write ``HOST:PORT`` once calls are taken.
        workers: Processes that take calls.

    Raises:
        InvalidFieldError: A plaintext server would be open to other machines,
            the address or the root is not usable, or failpoints are armed in a
            release.
    """
    serving.check(insecure=insecure)
    if not serving.is_read_only and not is_writable(storage_at(serving.root)):
        _log.warning(
            "root %s is read-only for this process: restores are served, and all that "
            "writes is refused; mount it for writing, or serve it with --read-only",
            serving.root,
        )

    def ready(bound: Serving) -> None:
        how = " read-only" if bound.is_read_only else ""
        _log.info("serving %s%s at %s", bound.root, how, bound.address)
        if ready_file:
            # whole or not at all: who waits for the file reads it at once
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
    """Has the process log what is as severe as a level."""
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

    def abandoned() -> None:
        assert lifeline is not None
        loop.remove_reader(lifeline.fileno())
        end()

    def end() -> None:
        _end_in_any_case()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    if lifeline is not None:
        loop.add_reader(lifeline.fileno(), abandoned)
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
    """Ends the process once it has had time to drain, whatever blocks its threads."""

    def end() -> None:
        _log.error(
            "a call of the storage has not returned for %g s since the end of the "
            "drain; ending without it",
            END_SECONDS - NOTICE_SECONDS - DRAIN_SECONDS,
        )
        os._exit(1)

    timer = threading.Timer(END_SECONDS, end)
    timer.daemon = True
    timer.start()


def _work(serving: Serving, log_level: int, lifeline: Lifeline) -> None:
    """What one of several workers does."""
    log_to_stderr(log_level)
    try:
        _prepare()
        asyncio.run(_serve(serving, lambda _: lifeline.ready(), lifeline))
    except StoreError as e:
        lifeline.refuse(str(e))


@contextmanager
def _shared_port(serving: Serving) -> Iterator[Serving]:
    """Keeps a port for workers, and yields where they shall serve.

    Raises:
        InvalidFieldError: It cannot be bound.
    """
    try:
        kept = _bound(serving.host.strip("[]"), serving.port)
    except OSError as e:
        raise unusable(serving.address) from e
    with kept:
        yield replace(serving, port=kept.getsockname()[1])


def _bound(host: str, port: int) -> socket.socket:
    """A socket that has a port, and shares it with those of workers."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, where = found[0]
    # One that does not share tells whether another has the port, and which is free.
    with socket.socket(family, socket.SOCK_STREAM) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind(where)
        where = own.getsockname()
    kept = socket.socket(family, socket.SOCK_STREAM)
    try:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(where)
    except BaseException:
        kept.close()
        raise
    return kept
