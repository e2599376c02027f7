"""Bearer tokens of a client: where they come from, and how long they are valid.

A token is asked for again at each call, so that one that was renewed is used at once: a
file is read again when it changes, as kubelets and agents renew projected tokens, and a
function is called again shortly before its token expires. A token is only ever sent
over TLS or to this machine, and is part of no message and no log.
"""

import json
import stat
import threading
import time
from base64 import urlsafe_b64decode
from collections.abc import Callable
from os import PathLike, fspath
from pathlib import Path
from typing import Final, TypeAlias

from storesvc_client.errors import InvalidRequestError, UnauthenticatedError

Token: TypeAlias = "str | PathLike[str] | Callable[[], str]"  # noqa: S105 - a type
"""A token, the path of its file, or a function that returns one."""

MAX_TOKEN_BYTES: Final = 8 << 10
"""Maximum bytes of a token, as servers accept it."""

RENEWAL_SECONDS: Final = 60.0
"""Time before the expiry of a token at which a function is called again."""

UNKNOWN_SECONDS: Final = 60.0
"""Time after which a function is called again whose token does not say its expiry."""

_LEEWAY_SECONDS: Final = 30.0
"""Time after the expiry of a token until servers reject it: clocks differ."""


TokenSource: TypeAlias = Callable[[], str]
"""Returns the token for a call that begins now; raises ``UnauthenticatedError`` if
there is none, or it has expired."""


def token_source(token: Token) -> TokenSource:
    """Returns the source of a token."""
    if isinstance(token, str):
        fixed, expires = _check_token(token, "token"), parse_expiry(token)

        def return_fixed() -> str:
            _check_unexpired(expires, "token")
            return fixed

        return return_fixed
    if isinstance(token, PathLike):
        return _File(Path(fspath(token)))
    if callable(token):
        return _Function(token)
    raise InvalidRequestError(
        "token: expected a text, a path (Path) or a function, got "
        f"{type(token).__name__}"
    )


class _File:
    """A token in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = f"token file {path}"
        self._lock = threading.Lock()
        self._state: tuple[int, int, int] | None = None
        self._token = ""
        self._expires: float | None = None

    def __call__(self) -> str:
        with self._lock:
            changed = self._read_changed()
            if changed is not None:
                text, state = changed
                self._token = _check_token(text.strip(), self._place)
                self._expires = parse_expiry(self._token)
                self._state = state  # only now: what was rejected is read again
            _check_unexpired(self._expires, self._place)
            return self._token

    def _read_changed(self) -> tuple[str, tuple[int, int, int]] | None:
        """Returns text and state of the file; None if it is the same as before."""
        try:
            found = self._path.stat()
            state = (found.st_mtime_ns, found.st_ino, found.st_size)
            if self._token and state == self._state:
                return None
            text = self._path.read_text()
        except UnicodeDecodeError as e:
            raise _unusable(self._place, "bytes that are no UTF-8") from e
        except OSError as e:
            raise UnauthenticatedError(
                f"{self._place}: cannot be read: {e.strerror}; correct the path, or "
                "log in again"
            ) from e
        if stat.S_ISREG(found.st_mode) and found.st_mode & stat.S_IWOTH:
            raise UnauthenticatedError(
                f"{self._place}: expected a file that its owner alone may write, got "
                "one that all users may, so its token may be of any of them; run "
                f"chmod o-w {self._path}, and get another token"
            )
        return text, state


class _Function:
    """Tokens of a function."""

    def __init__(self, function: Callable[[], str]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._token = ""
        self._until = 0.0

    def __call__(self) -> str:
        with self._lock:
            if time.time() >= self._until:
                token = self._function()
                if not isinstance(token, str):
                    raise _unusable("token function", f"a {type(token).__name__}")
                self._token = _check_token(token.strip(), "token function")
                expires = parse_expiry(self._token)
                _check_unexpired(expires, "token function")
                self._until = (
                    time.time() + UNKNOWN_SECONDS
                    if expires is None
                    else expires - RENEWAL_SECONDS
                )
            return self._token


def parse_expiry(token: str) -> float | None:
    """Returns the time at which a JSON Web Token expires, in seconds since 1970; None
    if the token does not say. Verifies nothing: only the server can."""
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        data = urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
        claims = json.loads(data)
    except (ValueError, RecursionError):
        return None
    expires = claims.get("exp") if isinstance(claims, dict) else None
    if not isinstance(expires, int | float) or isinstance(expires, bool):
        return None
    return float(expires)


def _check_token(token: str, place: str) -> str:
    """Returns a token that can be sent."""
    if not token:
        raise _unusable(place, "an empty text")
    if len(token) > MAX_TOKEN_BYTES:
        raise _unusable(place, f"{len(token)} bytes")
    if not all("!" <= character <= "~" for character in token):
        raise _unusable(place, "spaces, line breaks or characters outside ASCII")
    return token


def _unusable(place: str, got: str) -> UnauthenticatedError:
    return UnauthenticatedError(
        f"{place}: expected one token of at most {MAX_TOKEN_BYTES} printable ASCII "
        f"characters, got {got}; get another one"
    )


def _check_unexpired(expires: float | None, place: str) -> None:
    if expires is not None and time.time() >= expires + _LEEWAY_SECONDS:
        ago = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expires))
        raise UnauthenticatedError(
            f"{place}: the token expired at {ago}; get another one, or run `storectl "
            "login`"
        )
