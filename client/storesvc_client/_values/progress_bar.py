"""Draws the progress of saves and restores in a terminal or a notebook."""

import sys
from typing import TYPE_CHECKING

from storesvc_client._values.progress import Progress, ProgressCallback

if TYPE_CHECKING:
    from tqdm.std import tqdm


def progress_bar() -> ProgressCallback:
    """Returns a callback for ``progress=`` that draws a bar on stderr.

    The bar appears in terminals and notebooks only. One callback serves any number of
    saves and restores; each has its own bar.

    Example:
        >>> import storesvc_client as store
        >>> with store.connect("memory://") as client:
        ...     run = client.run("docs/bars")
        ...     save = run.save(0, {"x": 1.0}, progress=store.progress_bar())
        ...     save.result().step
        0
    """
    bars: dict[str, tqdm] = {}

    def show(progress: Progress) -> None:
        title = f"{progress.what} {progress.name}"
        if title not in bars:
            bars[title] = _bar(title, progress.total_bytes)
        bar = bars[title]
        bar.set_postfix_str(progress.slowest, refresh=False)
        bar.update(progress.done_bytes - bar.n)
        if progress.is_done:
            bars.pop(title).close()

    return show


def _bar(title: str, total_bytes: int) -> "tqdm":
    # imported late, as it takes time
    from tqdm.auto import tqdm

    is_seen = sys.stderr.isatty() or "ipykernel" in sys.modules
    return tqdm(
        desc=title,
        total=total_bytes,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        file=sys.stderr,
        disable=not is_seen,
    )
