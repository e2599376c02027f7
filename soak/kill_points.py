"""R1, R17: SIGKILL of a server before each call that changes a file, during a save, and
during a deletion, a purge and a collection."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path

import storesvc_client as store
from soak import promises
from soak.outcomes import Outcome
from soak.watched import WatchedServer, compiled, watched
from tests.support.server_process import EndedError

WAIT_SECONDS = 120
AT_ONCE = 2
"""Points that are tried at a time: each waits for servers most of the time."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A piece of work on a store with the steps 0 and 1."""

    name: str
    do: Callable[[store.Client], None]
    """Function that may be called repeatedly, and succeeds each time."""
    kept: frozenset[int]
    """Steps that it does not change."""
    changes: frozenset[int]
    """Steps that may exist or not once it has begun."""
    after: frozenset[int]
    """Steps that exist once it is done."""


def save(client: store.Client) -> None:
    """Saves step 2, which shares chunks with step 1."""
    with suppress(store.AlreadyExistsError):
        promises.save(client, 2)


def save_small(client: store.Client) -> None:
    """Saves step 3, in one call."""
    with suppress(store.AlreadyExistsError):
        promises.save(client, 3)


def collect(client: store.Client) -> None:
    """Deletes step 0, purges it, and collects its garbage."""
    run = client.run(promises.RUN)
    with suppress(store.NotFoundError):
        run.delete(0, purge_delay=timedelta())
    with suppress(store.NotFoundError):
        run.purge(0)
    for _ in client.collect(promises.RUN, grace=timedelta()):
        pass


WORKS = (
    Work(
        name="save",
        do=save,
        kept=frozenset({0, 1}),
        changes=frozenset({2}),
        after=frozenset({0, 1, 2}),
    ),
    Work(
        name="small save",
        do=save_small,
        kept=frozenset({0, 1}),
        changes=frozenset({3}),
        after=frozenset({0, 1, 3}),
    ),
    Work(
        name="collection",
        do=collect,
        kept=frozenset({1}),
        changes=frozenset({0}),
        after=frozenset({1}),
    ),
)


def kill_points() -> Outcome:
    """Kills a server at every point of its start and of its work."""
    outcome = Outcome()
    compiled("syscalls.c")  # once, before there are threads
    with promises.prepared(0, 1) as root, ThreadPoolExecutor(AT_ONCE) as pool:
        for work in WORKS:
            for first in count(1, AT_ONCE):
                numbers = range(first, first + AT_ONCE)
                found = list(pool.map(partial(_kill_copy, root, work), numbers))
                for number, lost in zip(numbers, found, strict=True):
                    if lost is not None:
                        outcome.add(f"{work.name} killed before call {number}", lost)
                if None in found:
                    outcome.note += (
                        f"{work.name}: {numbers[found.index(None)] - 1} calls; "
                    )
                    break
    return outcome


def _kill_copy(root: Path, work: Work, number: int) -> list[str] | None:
    with promises.copied(root) as copy:
        return kill_at(number, copy, work)


def kill_at(number: int, root: Path, work: Work) -> list[str] | None:
    """Returns the losses after a kill before a call; None if there is no such call."""
    with watched(root) as server, ThreadPoolExecutor() as pool:
        server.kill_at(number)
        with suppress(EndedError):
            server.start()
        if server.is_running:
            with server.connect() as client:
                done = pool.submit(work.do, client)
                if _is_done_before_the_end(done, server):
                    done.result()
                    return None
                lost = promises.losses_at(root, kept=work.kept, maybe=work.changes)
                # the client goes on at a new server; what it does not repeat by
                # itself fails there, and is asked for again below
                server.mend()
                server.start()
                with suppress(store.UnavailableError):
                    done.result(WAIT_SECONDS)
        else:
            lost = promises.losses_at(root, kept={0, 1})
            server.mend()
            server.start()
        with server.connect() as client:
            work.do(client)
        server.stop()
    return lost + promises.losses_at(root, kept=work.after)


def _is_done_before_the_end(done: "Future[None]", server: WatchedServer) -> bool:
    """Waits until a server or its work has ended."""
    while server.is_running:
        if done.done():
            return True
        wait([done], timeout=0.02)
    return False
