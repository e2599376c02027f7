"""Runs the whole demo, shows it, and returns whether every claim holds."""

import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from storesvc_client.demo.claims import HOW_JUDGED, Claim, History, claims_of
from storesvc_client.demo.curves import loss_table, sparkline
from storesvc_client.demo.job_log import Committed, Event, Restored, SaveBegun, Step
from storesvc_client.demo.kill_point import is_kill_point
from storesvc_client.demo.processes import DemoError, Server, Trainer, storectl

__all__ = ["Served", "run_demo"]

_RUN = "demo/pydoc-lm"
"""Name of the run in its own store; in another store, the time is appended."""

_HERE = "dp=2,fsdp=2,tp=2"
_ELSEWHERE = "dp=1,fsdp=4,tp=2"
_STEPS = 60
_SAVE_EVERY = 10
_KILL_AFTER = 30
"""Step of the checkpoint after which the job is killed, or a later one."""

_SHOWN_LINES = 14
"""Maximum lines shown of the output of one storectl command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The server of a store."""

    address: str
    reaching: tuple[str, ...] = ()
    """Options that a client needs to connect."""
    run: str = field(
        default_factory=lambda: f"{_RUN}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    )
    """Name of the demo's run there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    reference: History
    killed: History
    moved: History
    stayed: History


def run_demo(directory: Path, served: Served | None) -> int:
    """Runs the demo and returns its exit code: 0 if every claim holds.

    Args:
        directory: Directory for the store, the stderr of the processes and compiled
            programs. Absent or empty.
        served: The server of the store; None starts one.
    """
    console = Console()
    began = time.monotonic()
    try:
        _make_empty(directory)
        with _stopped_by_sigterm():
            held = _demo(directory, served, console)
    except DemoError as e:
        console.print("[bold red]The demo failed.[/]", escape(str(e)), soft_wrap=True)
        held = False
    seconds = time.monotonic() - began
    verdict = "[green]Every claim held[/]" if held else "[red]Not every claim held[/]"
    console.print(f"\n[bold]{verdict}[/] ({seconds:.0f} s)")
    return 0 if held else 1


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM leave the blocks that own processes, like Ctrl-C."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _make_empty(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        is_empty = not any(directory.iterdir())
    except OSError as e:
        raise DemoError(f"{directory}: {e.strerror or e}") from e
    if not is_empty:
        raise DemoError(f"{directory}: expected an empty directory, got files in it")


def _demo(directory: Path, served: Served | None, console: Console) -> bool:
    with nullcontext(served) if served else _serving(directory, console) as store:
        _say(console, f"The run is {store.run} at {store.address}.")
        runs = _trained(store, directory, console)
        _show_curves(runs, console)
        claims = claims_of(runs.reference, runs.killed, runs.moved, runs.stayed)
        _show_claims(claims, console)
        storectl_worked = _show_storectl(store, console)
    return storectl_worked and all(claim.held for claim in claims)


@contextmanager
def _serving(directory: Path, console: Console) -> Iterator[Served]:
    """Serves a store in the directory."""
    root = directory / "store"
    root.mkdir()
    with Server(root, directory) as server:
        address = server.address()
        _say(console, f"A store server serves {escape(str(root))} at {address}.")
        yield Served(address=address, run=_RUN)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


# --- The four runs ------------------------------------------------------------


def _trained(store: Served, directory: Path, console: Console) -> _Runs:
    steps = ("--steps", str(_STEPS))
    here, elsewhere = ("--mesh", _HERE, *steps), ("--mesh", _ELSEWHERE, *steps)
    stored = ("--store", store.address, "--run", store.run, *store.reaching)
    saves = (*stored, "--save-every", str(_SAVE_EVERY))
    with _progress(console) as bars:

        def run(name: str, *arguments: str) -> Trainer:
            return Trainer(name, list(arguments), directory)

        with run("uninterrupted", *here) as trainer:
            reference = _watched(trainer, bars)
        held = ("--hold-after", str(_KILL_AFTER))
        with run("killed", *here, *saves, *held) as trainer:
            killed = _watched_until_killed(trainer, bars)
        # The run elsewhere moves `latest`, so the control names the checkpoint.
        last = str(killed.committed[-1])
        # The processes end before the pool joins the threads that watch them.
        with (
            ThreadPoolExecutor(2) as pool,
            run("resumed elsewhere", *elsewhere, *saves, "--resume", "latest") as away,
            run("resumed here", *here, *stored, "--resume", last) as control,
        ):
            watching = [pool.submit(_watched, t, bars) for t in (away, control)]
            moved, stayed = (future.result() for future in watching)
    return _Runs(reference=reference, killed=killed, moved=moved, stayed=stayed)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<17}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]} {task.fields[saved]}"),
        console=console,
    )


def _watched(trainer: Trainer, bars: Progress) -> History:
    """Returns the history of a process that ends by itself."""
    events = list(_shown(trainer, bars))
    trainer.check()
    return History(events, exit_code=0)


def _watched_until_killed(trainer: Trainer, bars: Progress) -> History:
    """Returns the history of a process that waits to be killed, and kills it."""
    events: list[Event] = []
    for event in _shown(trainer, bars):
        events.append(event)
        if is_kill_point(events, checkpoint=_KILL_AFTER):
            trainer.kill()
    killed = History(events, exit_code=trainer.exit_code())
    if killed.exit_code > 0:
        trainer.check()
    if not killed.committed:
        raise DemoError(f"{trainer.name} ended before a checkpoint was acknowledged")
    _say(
        bars.console,
        f"{trainer.name}: SIGKILL after step {killed.last}; the last checkpoint "
        f"acknowledged is that of step {killed.committed[-1]}",
    )
    return killed


def _shown(trainer: Trainer, bars: Progress) -> Iterator[Event]:
    """Yields the events of a process and updates its progress bar."""
    bar = bars.add_task(trainer.name, total=_STEPS, status="starts", saved="")
    for event in trainer.events():
        match event:
            case Step(step=step, loss=loss):
                bars.update(bar, completed=step, status=f"loss {loss:.3f}")
            case SaveBegun(step=step):
                bars.update(bar, saved=f"saves {step}")
            case Committed(step=step):
                bars.update(bar, saved=f"saved {step}")
            case Restored(step=step):
                bars.update(bar, completed=step, status="compiles")
                _say(bars.console, f"{trainer.name}: {_restored_text(event)}")
        yield event


def _restored_text(event: Restored) -> str:
    return (
        f"restored step {event.step} onto {event.mesh}: {event.leaf_count} leaves, "
        f"{event.size_bytes / 2**20:.1f} MiB, in {event.seconds:.2f} s; "
        "bitwise equal to the saved state"
    )


# --- Output ---------------------------------------------------------------------


def _show_curves(runs: _Runs, console: Console) -> None:
    console.print(
        f"\n[bold]Loss[/], nats a byte. Uninterrupted and killed on {_HERE}, "
        f"resumed elsewhere on {_ELSEWHERE}:"
    )
    reference, killed, moved = runs.reference, runs.killed, runs.moved
    console.print(loss_table(reference, killed, moved, every=_SAVE_EVERY))
    for name, run in (
        ("uninterrupted", reference),
        ("killed", killed),
        ("resumed elsewhere", moved),
    ):
        curve = sparkline(run.losses, range(1, _STEPS + 1))
        console.print(f"{name:>17} {curve}", highlight=False)


def _show_claims(claims: list[Claim], console: Console) -> None:
    console.print(f"\n[bold]Claims[/] ({HOW_JUDGED})\n", highlight=False)
    for claim in claims:
        mark = "[green]holds[/]" if claim.held else "[bold red]FAILS[/]"
        _say(console, f"  {mark}  {claim.text}")
        _say(console, f"         [dim]{escape(claim.seen)}[/]")


def _show_storectl(store: Served, console: Console) -> bool:
    """Shows the output of storectl for the run; returns whether all commands worked."""
    newest = f"{store.run}@latest"
    options = ("--store", store.address, *store.reaching)
    worked = True
    for arguments in (
        ("ls",),
        ("ls", store.run),
        ("tree", newest),
        ("stat", newest),
        ("get", f"{newest}:graphstate/**/embedding/value"),
    ):
        console.print(f"\n[bold]$ storectl {escape(' '.join(arguments))}[/]")
        done = storectl(*options, *arguments, width=console.width)
        lines = (done.stdout + done.stderr).splitlines()
        for text in lines[:_SHOWN_LINES]:
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        if len(lines) > _SHOWN_LINES:
            console.print(f"[dim]... and {len(lines) - _SHOWN_LINES} lines more[/]")
        worked = worked and done.returncode == 0
    return worked
