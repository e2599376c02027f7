"""Names of folders and files below a location, without I/O.

>>> step_of("run-200"), step_of("step_0100"), step_of("100"), step_of("model-7")
(200, 100, 100, None)
"""

import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import unquote, urlsplit

from storesvc_client.errors import DataLossError, PreconditionError

_STEP: Final = re.compile(
    r"(?:(?:checkpoint|ckpt|global_step|run|step)[-_]?)?([0-9]{1,18})"
)


def step_of(name: str) -> int | None:
    """Returns the step that the name of a folder states; None if it states none."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def step_folders(names: Iterable[str], *, what: str) -> dict[int, str]:
    """Returns the folder of each step among the names in a folder.

    Args:
        names: Files and folders; folders end in "/".
        what: The location, for messages.

    Raises:
        PreconditionError: Two folders are of one step.
    """
    found: dict[int, str] = {}
    for name in names:
        step = step_of(name.removesuffix("/")) if name.endswith("/") else None
        if step is None:
            continue
        folder = name.removesuffix("/")
        if found.setdefault(step, folder) != folder:
            raise PreconditionError(
                f"{what}: expected one folder of step {step}, got {found[step]!r} and "
                f"{folder!r}; give the URL of one of them"
            )
    return found


def url_parts(url: str) -> list[str]:
    """Returns the names of the folders in a URL."""
    return [part for part in unquote(urlsplit(url).path).split("/") if part]


def relative_path(path: object, *, what: str) -> str:
    """Returns a path below a step that a file of the step names.

    Raises:
        DataLossError: It is no relative path, or leads out of the step.
    """
    parts = path.split("/") if isinstance(path, str) else [".."]
    if any(part in ("", ".", "..") or _UNSAFE.search(part) for part in parts):
        raise DataLossError(
            f"{what}: expected a path below the folder of the step, got "
            f"{ascii(path)[:200]}"
        )
    return "/".join(parts)


def file_name(name: object, *, what: str) -> str:
    """Returns the name of a file in a folder, which a file there names.

    Raises:
        DataLossError: It is a path, or no name of a file.
    """
    found = relative_path(name, what=what)
    if "/" in found:
        raise DataLossError(
            f"{what}: expected a file in the same folder, got {ascii(name)[:200]}"
        )
    return found


_UNSAFE: Final = re.compile(r"[\x00-\x1f\x7f\\]|^[A-Za-z]:$")
