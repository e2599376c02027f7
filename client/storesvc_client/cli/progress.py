"""A progress bar for what takes more than a second.

It is drawn on stderr, only on a terminal, and is wiped away at the end.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Final

_PATIENCE_SECONDS: Final = 1.0


@contextmanager
def progress(title: str, *, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """Yields what is to be called with the size of each thing that is done."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich import progress as bars
    from rich.console import Console

    bar = bars.Progress(
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.DownloadColumn(binary_units=True),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(title, total=total_bytes)
    timer = Timer(_PATIENCE_SECONDS, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda size_bytes: bar.advance(task, size_bytes)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
