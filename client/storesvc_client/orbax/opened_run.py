"""Resolves what a manager is created with to a run: a ``Run``, or text of a config.

The text, or a path that has it, is the target of ``connect``, "#", and the name of the
run, such as ``/ckpts#prod/llama-8b``; or the target alone, with ``run=``. Programs join
more parts to their directory, which become parts of the name: ``llama-8b/checkpoints/``
is ``llama-8b.checkpoints``.
"""

import re
from collections.abc import Callable
from typing import Any, Final

from storesvc_client._api.client import connect
from storesvc_client._api.run import Run
from storesvc_client._values.telemetry import StepLogger
from storesvc_client.errors import InvalidRequestError

_EXAMPLE: Final = "file:///ckpts#prod/llama-8b"


def open_run(
    place: Any, run: str | None, logger: StepLogger | None = None
) -> tuple[Run, Callable[[], object] | None]:
    """Returns a run, and what closes its connection; None if the caller owns it.

    Args:
        place: A run, or the target of a store.
        run: Name of the run, if ``place`` is a target without one.
        logger: Receives the statistics of each save and restore; None: none does.

    Raises:
        InvalidRequestError: There is no name of a run, or two, or a logger for a run.
        StoreError: The store cannot be reached.
    """
    if isinstance(place, Run):
        if run is not None:
            raise InvalidRequestError(
                f"run=: expected none with {place!r}, got {run!r}"
            )
        if logger is not None:
            raise InvalidRequestError(
                f"logger=: expected none with {place!r}, whose client has one, got "
                f"{type(logger).__name__}; pass it as connect(step_logger=)"
            )
        return place, None
    target, name = split_target(str(place), run)
    client = connect(target, step_logger=logger)
    try:
        return client.run(name), client.close
    except BaseException:
        client.close()
        raise


def split_target(place: str, run: str | None) -> tuple[str, str]:
    """Returns the target of a store and the name of a run.

    >>> split_target("file:///ckpts#prod/llama-8b/checkpoints/", None)
    ('file:///ckpts', 'prod/llama-8b.checkpoints')

    Raises:
        InvalidRequestError: There is no name, or two.
    """
    place = re.sub(r"\Afile:/(?!/)", "file:///", place)  # pathlib removes slashes
    place = re.sub(r"\A(gs|s3|memory):/(?!/)", r"\1://", place)
    target, mark, name = place.rpartition("#")
    if run is not None and not mark:
        return place, run
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if run is not None or not mark or len(parts) < 2 or ".." in parts:
        above, *given = place.rstrip("/").rsplit("/", 2)
        like = f"{above}#{'/'.join(given)}" if above and len(given) == 2 else _EXAMPLE
        raise InvalidRequestError(
            f"directory: expected a Run, or a store and a run such as {like!r}, got "
            f"{place!r} and run={run!r}; a directory of Orbax is imported with "
            "storectl import"
        )
    return target, "/".join((parts[0], ".".join(parts[1:])))
