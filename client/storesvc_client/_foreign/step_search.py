"""Finds the folders of steps below a location, and reads what a step states itself."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from storesvc_client._foreign.bounded_json import parse_object
from storesvc_client._foreign.location import Location
from storesvc_client._foreign.step_folders import step_folders, step_of, url_parts
from storesvc_client.errors import DataLossError, NotFoundError, PreconditionError

METADATA: Final = "metadata.json"
"""File in which levanter and eformer state the step; both write it last."""

MAX_METADATA_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetadata:
    """Contents of ``metadata.json``."""

    data: bytes
    """The bytes of the file."""
    fields: Mapping[str, Any]
    step: int | None
    """None if it states none; eformer writes -1 where its caller named none."""
    create_time: datetime | None
    """None if the time has no zone."""


def named_steps(
    location: Location,
    *,
    is_finished: Callable[[str, Sequence[str]], bool],
    expected: str,
) -> dict[int, str]:
    """Returns the folder of each step that the name of a folder states.

    The location itself may be a step, which is step 0 if its name states none.

    Args:
        location: Where to search.
        is_finished: Returns whether a folder, of which the names are given, is a step.
        expected: What a location of the format holds, for the message.

    Raises:
        NotFoundError: There is no folder of a step, finished or not.
        PreconditionError: Two folders are of one step.
    """
    names = location.names()
    if is_finished("", names):
        return {_step_of_url(location) or 0: ""}
    found = {
        step: folder
        for step, folder in step_folders(names, what=location.url).items()
        if is_finished(folder, location.names(folder))
    }
    _check_found(location, names, found, is_finished, expected)
    return found


def stated_steps(
    location: Location,
    *,
    is_finished: Callable[[str, Sequence[str]], bool],
    expected: str,
) -> dict[int, str]:
    """Returns the folder of each step that a ``metadata.json`` states.

    The name of at least one of the folders must be that of a step, else each is a
    checkpoint by itself, such as the best ones of several runs.

    Args:
        location: Where to search.
        is_finished: As for ``named_steps``.
        expected: As for ``named_steps``.

    Raises:
        DataLossError: A ``metadata.json`` is damaged.
        NotFoundError: As for ``named_steps``.
        PreconditionError: Two folders are of one step.
    """
    names = location.names()
    if is_finished("", names):
        return {_stated_step(location, "", names): ""}
    below = {
        name.removesuffix("/"): location.names(name.removesuffix("/"))
        for name in names
        if name.endswith("/")
    }
    finished = [folder for folder in below if is_finished(folder, below[folder])]
    if all(step_of(folder) is None for folder in finished):
        finished = []  # each is a checkpoint by itself, or all are of different runs
    found: dict[int, str] = {}
    for folder in finished:
        step = _stated_step(location, folder, below[folder])
        if found.setdefault(step, folder) != folder:
            raise PreconditionError(
                f"{location.url}: expected one folder of step {step}, got "
                f"{found[step]!r} and {folder!r}; give the URL of one of them"
            )
    _check_found(location, names, found, is_finished, expected)
    return found


def names_text(names: Sequence[str]) -> str:
    """Returns what a message shows of the names at a location."""
    if not names:
        return "nothing: there is no such folder, or it is empty"
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def read_metadata(location: Location, folder: str) -> StepMetadata:
    """Reads the ``metadata.json`` of a step.

    Raises:
        DataLossError: It is damaged.
    """
    path = join(folder, METADATA)
    what = place(location, path)
    data = location.read(path, limit=MAX_METADATA_BYTES)
    fields = parse_object(data, what=what)
    step = fields.get("step")
    if step is not None and (type(step) is not int or not -1 <= step < 2**63):
        raise DataLossError(f"{what}: expected a step, got {ascii(step)[:80]}")
    return StepMetadata(
        data=data,
        fields=fields,
        step=None if step == -1 else step,
        create_time=_time(fields.get("timestamp"), what),
    )


def place(location: Location, folder: str) -> str:
    """Returns the URL of a folder or file of a location."""
    return f"{location.url}/{folder}" if folder else location.url


def join(folder: str, name: str) -> str:
    """Returns the path of a name in a folder; "" is the location, or the folder,
    itself."""
    return f"{folder}/{name}" if folder and name else folder or name


def _check_found(
    location: Location,
    names: Sequence[str],
    found: Mapping[int, str],
    is_finished: Callable[[str, Sequence[str]], bool],
    expected: str,
) -> None:
    """Rejects a location without any step, finished or not: its URL is a wrong one.

    Raises:
        NotFoundError: There is none, or the folders that look like steps are of runs,
            such as ``run-1/`` with ``step-100/``.
    """
    if found:
        return
    folders = [name.removesuffix("/") for name in names if name.endswith("/")]
    begun = [folder for folder in folders if step_of(folder) is not None]
    if not begun or any(
        is_finished(folder, location.names(folder))
        for run in begun
        for name in location.names(run)
        if name.endswith("/") and step_of(name.removesuffix("/")) is not None
        for folder in [join(run, name.removesuffix("/"))]
    ):
        raise NotFoundError(
            f"{location.url}: expected {expected}, got {names_text(names)}; check the "
            "location and the format"
        )


def _stated_step(location: Location, folder: str, names: Sequence[str]) -> int:
    step = None
    if METADATA in names:
        step = read_metadata(location, folder).step
    if step is None:
        step = step_of(folder) if folder else _step_of_url(location)
    return step or 0


def _step_of_url(location: Location) -> int | None:
    (last,) = url_parts(location.url)[-1:] or [""]
    return step_of(last)


def _time(text: Any, what: str) -> datetime | None:
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
    except (TypeError, ValueError) as e:
        raise DataLossError(
            f"{what}: expected a time, got {ascii(text)[:80]} as timestamp"
        ) from e
    return time if time.tzinfo else None
