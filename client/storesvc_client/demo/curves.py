"""Draws loss curves as text: a table of some steps and a line of blocks a run."""

from collections.abc import Iterable, Mapping

from rich.table import Table

from storesvc_client.demo.claims import History, relative_difference

__all__ = ["loss_table", "sparkline"]

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
            *(_cell(run, step) for run in (reference, killed, moved)),
            _difference(reference, killed, moved, step),
        )
    return table


def _cell(run: History, step: int) -> str:
    return f"{run.losses[step]:.6f}" if step in run.losses else ""


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
