"""Reads and writes the configuration file of storectl.

It is ``$STORESVC_CONFIG``, or ``storesvc/config.toml`` below ``$XDG_CONFIG_HOME``,
which is ``~/.config`` by default. It says which servers get credentials, so a file that
others may write is rejected.
"""

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from storesvc_client.cli.contexts import Config, format_config, parse_config
from storesvc_client.cli.errors import Refusal

VARIABLE = "STORESVC_CONFIG"
"""Environment variable with the path of the file."""


def config_path() -> Path:
    """Returns the path of the file.

    Raises:
        Refusal: There is no home directory to look in.
    """
    if given := os.environ.get(VARIABLE):
        return Path(given)
    try:
        home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    except RuntimeError as e:
        raise Refusal(
            f"no home directory to find the configuration in; set {VARIABLE}"
        ) from e
    return Path(home) / "storesvc" / "config.toml"


def read_config() -> Config:
    """Returns the configuration; without contexts if there is no file.

    Raises:
        Refusal: The file cannot be read, others may write it, or it is wrong.
    """
    path = config_path()
    try:
        with path.open("rb") as file:
            _check_owner(path, os.fstat(file.fileno()))
            data = file.read()
    except FileNotFoundError:
        return Config()
    except OSError as e:
        raise Refusal(f"{path}: {e.strerror}; expected a file to read") from e
    try:
        text = data.decode()
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise Refusal(
            f"{path} line {line}: expected UTF-8, got byte {data[e.start]:#04x}; "
            "correct the file"
        ) from e
    return parse_config(text, str(path))


def write_config(config: Config) -> None:
    """Replaces the file as a whole; only its owner may read it.

    Raises:
        Refusal: It cannot be written.
    """
    text = format_config(config)
    try:
        path = config_path().resolve()  # a link to a file elsewhere stays one
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(handle, "w", encoding="utf-8") as file:  # noqa: PTH123 - it is a descriptor
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(part).replace(path)
        except BaseException:
            with suppress(FileNotFoundError):
                Path(part).unlink()
            raise
    except (OSError, UnicodeEncodeError) as e:
        raise Refusal(f"{config_path()}: cannot be written: {e}") from e


def _check_owner(path: Path, found: os.stat_result) -> None:
    """Rejects a file that another user could have written."""
    if found.st_uid not in (0, os.getuid()):
        raise Refusal(
            f"{path} belongs to user {found.st_uid}, expected this user or root; copy "
            "it"
        )
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise Refusal(
            f"{path}: expected a file that only its owner may write, got the mode "
            f"{stat.S_IMODE(found.st_mode):o}; chmod go-w {path}"
        )
