"""Runs the whole demo, shows it, and returns whether every claim holds.

The claims of the demo are checked on values. Losses are compared by their bits where
the arithmetic is the same, and with a tolerance only where the shape of the mesh
changes the order of sums. States are never compared with a tolerance: a restored state
must equal the saved one bit for bit, on any mesh. The training process checks that
itself, leaf by leaf, before it continues.
"""

import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from storesvc_client.demo.processes import (
    Committed,
    DemoError,
    Event,
    Restored,
    SaveBegun,
    Server,
    Step,
    Trainer,
    is_kill_point,
    storectl,
)

TOLERANCE: Final = 1e-5
"""Relative difference allowed between losses on meshes of different shapes.

Measured over 60 steps on four shapes: at most 6e-7, a few units in the last place of a
float32. Errors are larger: with dropout counts that restart, losses differ by 1e-4 to
8e-3; with an optimizer that restarts, by up to 3e-2.
"""

HOW_JUDGED: Final = (
    "losses must have the same bits where the arithmetic is the same: one mesh, one "
    "program; on a mesh of another shape sums over devices run in another order, and "
    f"losses must agree within {TOLERANCE:.0e}; a restored state must be bitwise the "
    "saved one on any mesh"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim, whether it holds, and the evidence."""

    text: str
    held: bool
    seen: str


class History:
    """The events of one training process, by kind."""

    def __init__(self, events: Iterable[Event], *, exit_code: int) -> None:
        listed = list(events)
        self.exit_code = exit_code
        self.losses = {e.step: e.loss for e in listed if isinstance(e, Step)}
        self.begun = [e.step for e in listed if isinstance(e, SaveBegun)]
        self.committed = [e.step for e in listed if isinstance(e, Committed)]
        self.restored = next((e for e in listed if isinstance(e, Restored)), None)

    @property
    def last(self) -> int:
        return max(self.losses)


def make_claims(
    reference: History, killed: History, moved: History, stayed: History
) -> list[Claim]:
    """Returns the claims about four runs: never interrupted; killed between two saves;
    resumed from there on a mesh of another shape, and on the same one."""
    return [
        _learns(reference),
        _died_between_saves(killed),
        _same_bits("Before the kill, every loss is the reference's", reference, killed),
        _restored_last(killed, moved, stayed),
        _same_state(moved, stayed),
        _same_bits(
            "Resumed on the same mesh, every loss is the reference's", reference, stayed
        ),
        _same_but_for_rounding(reference, moved),
    ]


def _learns(reference: History) -> Claim:
    first, last = reference.losses[1], reference.losses[reference.last]
    return Claim(
        text="The model learns",
        held=last < 0.6 * first,
        seen=f"{first:.2f} nats a byte at step 1, {last:.2f} at step {reference.last}",
    )


def _died_between_saves(killed: History) -> Claim:
    begun, committed = killed.begun[-1:], killed.committed[-1:]
    return Claim(
        text="The job died of SIGKILL between two saves",
        held=killed.exit_code == -signal.SIGKILL
        and begun == committed
        and all(killed.last >= step + 2 for step in committed),
        seen=f"save begun at {begun}, acknowledged {committed}, "
        f"last step {killed.last}, exit code {killed.exit_code}",
    )


def _restored_last(killed: History, *resumed: History) -> Claim:
    restored = [r.restored.step for r in resumed if r.restored is not None]
    return Claim(
        text="Both resumed from the last checkpoint that was acknowledged",
        held=restored == killed.committed[-1:] * len(resumed),
        seen=f"acknowledged {killed.committed}, resumed from {restored}",
    )


def _same_state(*resumed: History) -> Claim:
    restored = [r.restored for r in resumed if r.restored is not None]
    digests = {r.digest for r in restored}
    leaf_count = restored[0].leaf_count if restored else 0
    meshes = " and ".join(r.mesh for r in restored)
    return Claim(
        text="The restored state is bitwise the saved one, on either mesh",
        held=len(restored) == len(resumed) and len(digests) == 1,
        seen=f"digest {' '.join(digests)} of {leaf_count} leaves on {meshes}",
    )


def _same_bits(text: str, reference: History, run: History) -> Claim:
    same = [run.losses[s].hex() == reference.losses[s].hex() for s in run.losses]
    return Claim(
        text=f"{text}, bit by bit",
        held=all(same) and bool(same),
        seen=f"{sum(same)} of {len(same)} losses, "
        f"steps {min(run.losses)} to {run.last}",
    )


def _same_but_for_rounding(reference: History, run: History) -> Claim:
    worst = max(relative_difference(reference, run, step) for step in run.losses)
    return Claim(
        text="Resumed on another mesh, every loss is the reference's but for rounding",
        held=worst <= TOLERANCE and run.last == reference.last,
        seen=f"largest relative difference {worst:.1e}, allowed {TOLERANCE:.0e}, "
        f"steps {min(run.losses)} to {run.last}",
    )


def relative_difference(reference: History, run: History, step: int) -> float:
    """Returns the difference of the losses of a step, relative to the reference."""
    return abs(run.losses[step] / reference.losses[step] - 1)


_BLOCKS = "▁▂▃▄▅▆▇█"
_LOW, _HIGH = 2.4, 4.4
"""Losses of the lowest and the highest block; values beyond are clipped."""


def loss_table(
    reference: History, killed: History, moved: History, *, every: int
) -> Table:
    """Returns a table of the losses of the uninterrupted run and of the killed and
    resumed job."""
    table = Table("step", "uninterrupted", "killed", "resumed elsewhere", "difference")
    for column in table.columns:
        column.justify = "right"
    shown = {1, killed.last, min(moved.losses), reference.last}
    for step in sorted(shown | set(range(every, reference.last + 1, every))):
        table.add_row(
            str(step),
            *(
                f"{run.losses[step]:.6f}" if step in run.losses else ""
                for run in (reference, killed, moved)
            ),
            _difference(reference, killed, moved, step),
        )
    return table


def _difference(reference: History, killed: History, moved: History, step: int) -> str:
    run = moved if step in moved.losses else killed
    if run.losses[step].hex() == reference.losses[step].hex():
        return "same bits"
    return f"{relative_difference(reference, run, step):.0e}"


def sparkline(losses: Mapping[int, float], steps: Iterable[int]) -> str:
    """Returns a block for each step, higher for larger values; a blank for no value."""
    return "".join(_block(losses[step]) if step in losses else " " for step in steps)


def _block(loss: float) -> str:
    share = (loss - _LOW) / (_HIGH - _LOW)
    return _BLOCKS[min(max(round(share * len(_BLOCKS)), 0), len(_BLOCKS) - 1)]


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
        with (
            _stopped_by_sigterm(),
            nullcontext(served) if served else _serving(directory, console) as store,
        ):
            _say(console, f"The run is {store.run} at {store.address}.")
            runs = _train_runs(store, directory, console)
            _show_curves(*runs[:3], console)
            claims = make_claims(*runs)
            _show_claims(claims, console)
            storectl_worked = _show_storectl(store, console)
        held = storectl_worked and all(claim.held for claim in claims)
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


def _train_runs(
    store: Served, directory: Path, console: Console
) -> tuple[History, History, History, History]:
    """Returns the four runs, as ``make_claims`` takes them."""
    steps = ("--steps", str(_STEPS))
    here, elsewhere = ("--mesh", _HERE, *steps), ("--mesh", _ELSEWHERE, *steps)
    stored = ("--store", store.address, "--run", store.run, *store.reaching)
    saves = (*stored, "--save-every", str(_SAVE_EVERY))
    with Progress(
        TextColumn("{task.description:<17}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]} {task.fields[saved]}"),
        console=console,
    ) as bars:

        def run(name: str, *arguments: str) -> Trainer:
            return Trainer(name, list(arguments), directory)

        with run("uninterrupted", *here) as trainer:
            reference = _watch_trainer(trainer, bars)
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
            watching = [pool.submit(_watch_trainer, t, bars) for t in (away, control)]
            moved, stayed = (future.result() for future in watching)
    return reference, killed, moved, stayed


def _watch_trainer(trainer: Trainer, bars: Progress) -> History:
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
                _say(
                    bars.console,
                    f"{trainer.name}: restored step {step} onto {event.mesh}: "
                    f"{event.leaf_count} leaves, {event.size_bytes / 2**20:.1f} MiB, "
                    f"in {event.seconds:.2f} s; bitwise equal to the saved state",
                )
        yield event


# --- Output ---------------------------------------------------------------------


def _show_curves(
    reference: History, killed: History, moved: History, console: Console
) -> None:
    console.print(
        f"\n[bold]Loss[/], nats a byte. Uninterrupted and killed on {_HERE}, "
        f"resumed elsewhere on {_ELSEWHERE}:"
    )
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
