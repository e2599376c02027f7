"""Shows a progress bar for operations of more than a second.

The bar is drawn on stderr, only in a terminal, and is erased at the end.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Final

_DELAY_SECONDS: Final = 1.0


@contextmanager
def progress(title: str, *, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """Yields a function to call with the bytes of each completed part."""
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
    timer = Timer(_DELAY_SECONDS, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda size_bytes: bar.advance(task, size_bytes)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
