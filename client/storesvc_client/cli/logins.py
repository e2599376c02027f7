"""Keeps the logins of a person: ``tokens.json`` next to the configuration of storectl.

Only its owner may read the file, and it is rejected if others may.
"""

import json
import os
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from storesvc_client.cli.config_file import config_path
from storesvc_client.cli.errors import Refusal

if TYPE_CHECKING:
    from storesvc_client.cli.device_login import Login

RENEWAL_SECONDS: Final = 60.0
"""Time before the expiry of a token at which it is renewed."""


def logins_path() -> Path:
    """Returns the path of the file."""
    return config_path().with_name("tokens.json")


def stored_login(store: str) -> "Login | None":
    """Returns the login for a store; None if there is none.

    Raises:
        Refusal: The file cannot be read, others may read it, or it is wrong.
    """
    from storesvc_client.cli.device_login import Login

    found = _read().get(store)
    if found is None:
        return None
    try:
        return Login(**found)
    except TypeError as e:
        raise _wrong(logins_path()) from e


def keep_login(store: str, login: "Login | None") -> None:
    """Keeps the login for a store; None forgets it.

    Raises:
        Refusal: The file cannot be read or written.
    """
    logins = {name: value for name, value in _read().items() if name != store}
    if login is not None:
        logins[store] = asdict(login)
    path = logins_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(handle, "w", encoding="utf-8") as file:  # noqa: PTH123 - it is a descriptor
                json.dump(logins, file, indent=1)
            Path(part).replace(path)
        except BaseException:
            with suppress(FileNotFoundError):
                Path(part).unlink()
            raise
    except OSError as e:
        raise Refusal(f"{path}: cannot be written: {e.strerror}") from e


def token_of_login(store: str) -> Callable[[], str] | None:
    """Returns a function that returns the token for a store, and renews it before it
    expires; None if there is no login."""
    if stored_login(store) is None:
        return None

    def token() -> str:
        from storesvc_client.cli.device_login import renewed

        login = stored_login(store)
        if login is None:
            raise Refusal(f"{store}: the login has ended; run storectl login")
        if login.refresh_token and time.time() >= login.expire_time - RENEWAL_SECONDS:
            login = renewed(login)
            keep_login(store, login)
        return login.token

    return token


def _read() -> dict[str, Any]:
    path = logins_path()
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read()
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise Refusal(f"{path}: {e.strerror}; expected a file to read") from e
    if mode & 0o077:
        raise Refusal(
            f"{path}: expected a file that only its owner may read, got the mode "
            f"{mode:o}; chmod 600 {path}, and log in again: others may have the tokens"
        )
    try:
        found = json.loads(data)
    except ValueError as e:
        raise _wrong(path) from e
    is_valid = isinstance(found, dict) and all(
        isinstance(value, dict) for value in found.values()
    )
    if not is_valid:
        raise _wrong(path)
    return dict(found)


def _wrong(path: Path) -> Refusal:
    return Refusal(
        f"{path}: expected the logins of storectl, got other text; remove it, and "
        "log in again"
    )
