"""A policy file, read again when it changes.

A new file that cannot be parsed is ignored: the policy before it stays in force, and
the error is logged, until the file changes again. So it does while the file system does
not answer.
"""

import hashlib
import logging
import time
from pathlib import Path
from typing import Final, TypeAlias

from storesvc.errors import InvalidFieldError
from storesvc.identity.policy_document import PolicyDocument, parse
from storesvc.storage.config_files import FileCheck, read_file

CHECK_SECONDS: Final = 1.0
"""Interval at which the file is looked at."""

_DIGEST_DIGITS: Final = 16

_State: TypeAlias = tuple[int, int, int] | None

_log = logging.getLogger(__name__)


class PolicyFile:
    """The policy of a server."""

    def __init__(self, path: Path, *, has_local: bool = True) -> None:
        """Reads the file.

        Args:
            path: The file.
            has_local: True if callers of this machine are ``local``.

        Raises:
            InvalidFieldError: It cannot be read or parsed.
        """
        self._path = path
        self._has_local = has_local
        self._check = FileCheck(self._reload, what=f"policy {path}")
        self._data = b""
        self._state = _state_of(path)
        self._document, self._digest = self._read()
        self._checked = time.monotonic()
        _log.info("policy: %s, %s", path, self._digest)

    @property
    def digest(self) -> str:
        """Identifies the policy in force, as the log has it: replicas with another
        policy differ in it."""
        return self._digest

    def current(self) -> PolicyDocument:
        """Returns the policy in force."""
        now = time.monotonic()
        if now - self._checked >= CHECK_SECONDS:
            self._checked = now
            self._check.run()
        return self._document

    def _reload(self) -> None:
        state = _state_of(self._path)
        if state == self._state:
            return
        self._state = state
        try:
            self._document, self._digest = self._read()
        except InvalidFieldError as e:
            _log.warning("keeping the previous policy: %s", e)
        else:
            _log.info("reloaded the policy: %s, %s", self._path, self._digest)

    def _read(self) -> tuple[PolicyDocument, str]:
        try:
            data = read_file(self._path)
        except OSError as e:
            raise InvalidFieldError(
                f"policy: cannot read {self._path}: {e.strerror}"
            ) from e
        try:
            text = data.decode()
        except UnicodeDecodeError as e:
            raise InvalidFieldError(
                f"{self._path}: expected UTF-8, got other bytes"
            ) from e
        if data != self._data and self._data.startswith(data.rstrip()):
            raise InvalidFieldError(
                f"{self._path}: expected a whole policy, got the beginning of the one "
                "in force, as of a file that was cut; add a comment if that is meant"
            )
        document = parse(text, file=str(self._path), has_local=self._has_local)
        self._data = data
        return document, hashlib.sha256(data).hexdigest()[:_DIGEST_DIGITS]


def _state_of(path: Path) -> _State:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
