"""Contexts: names for stores and the options to connect to them, as text.

A configuration is a TOML file::

    current = "prod"

    [contexts.prod]
    store = "ckpt.example:7070"
    ca = "/etc/ssl/ckpt.pem"

The file is ``$STORESVC_CONFIG``, or ``storesvc/config.toml`` below
``$XDG_CONFIG_HOME``, which is ``~/.config`` by default. It says which servers get
credentials, so a file that others may write is rejected.
"""

import json
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from storesvc.format.names import InvalidNameError, check_id
from storesvc_client.cli.errors import Refusal
from storesvc_client.cli.paths import parse_target

FILES: Final = ("ca", "cert", "key", "token_file")
"""Options of a context that are files."""

_CURRENT: Final = "current"
_CONTEXTS: Final = "contexts"
_HEADER: Final = "# Written by storectl config, which keeps no comments.\n"
_TABLE: Final = re.compile(r"\s*\[([^\[\]]*)\]")
_PATH_SPACE: Final = re.compile(r"[\s\"']")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A named store."""

    name: str
    store: str
    """As of ``--store``, in full."""
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    token_file: Path | None = None
    insecure: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The contexts of a user."""

    current: str | None = None
    """Name of the context that applies if no store is given."""
    contexts: Mapping[str, Context] = field(
        default_factory=lambda: MappingProxyType({})
    )

    def context(self, name: str) -> Context:
        if name not in self.contexts:
            known = ", ".join(sorted(self.contexts)) or "none"
            raise Refusal(
                f"no context {name!r}; there are: {known}; storectl config set {name} "
                "--store TARGET creates it"
            )
        return self.contexts[name]


def check_name(name: str) -> str:
    check_id(name, "context")
    return name


def parse_config(text: str, place: str) -> Config:
    """Returns the configuration in a text."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise Refusal(f"{place}: {e}; correct the file") from e
    reader = _Reader(text, place)
    reader.check_keys((), document, {_CURRENT, _CONTEXTS})
    tables = document.get(_CONTEXTS, {})
    if not isinstance(tables, dict):
        raise reader.refusal((), _CONTEXTS, "expected tables [contexts.NAME]", tables)
    contexts = {name: reader.context(name, table) for name, table in tables.items()}
    current = document.get(_CURRENT)
    if current is not None and current not in contexts:
        known = ", ".join(sorted(contexts)) or "none"
        raise reader.refusal((), _CURRENT, f"expected one of: {known}", current)
    return Config(current=current, contexts=contexts)


class _Reader:
    """Checks the values of a document; its errors name the line."""

    def __init__(self, text: str, place: str) -> None:
        self._lines = text.splitlines()
        self._place = place

    def context(self, name: str, table: Any) -> Context:
        path = (_CONTEXTS, name)
        try:
            check_name(name)
        except InvalidNameError as e:
            raise self._at(path, "", str(e)) from e
        if not isinstance(table, dict):
            raise self.refusal((_CONTEXTS,), name, "expected a table", table)
        self.check_keys(path, table, {"store", "insecure", *FILES})
        if "store" not in table:
            raise self._at(path, "", 'expected a key store, such as "gs://bucket/x"')
        insecure = table.get("insecure", False)
        if not isinstance(insecure, bool):
            raise self.refusal(path, "insecure", "expected true or false", insecure)
        files = {key: self._file(path, table, key) for key in FILES}
        store = self._text(path, table, "store")
        try:
            store = parse_target(store)
        except InvalidNameError as e:
            raise self._at(path, "store", str(e)) from e
        return Context(name=name, store=store, insecure=insecure, **files)

    def check_keys(
        self, path: tuple[str, ...], table: Mapping[str, Any], known: set[str]
    ) -> None:
        """Rejects keys that a table does not have."""
        for key in table:
            if key not in known:
                expected = ", ".join(sorted(known))
                raise self._at(
                    path, key, f"expected one of the keys {expected}, got {key!r}"
                )

    def refusal(
        self, path: tuple[str, ...], key: str, expected: str, got: Any
    ) -> Refusal:
        """Returns the error of a wrong value."""
        return self._at(path, key, f"{key}: {expected}, got {got!r}")

    def _text(self, path: tuple[str, ...], table: Mapping[str, Any], key: str) -> str:
        text = table[key]
        if not isinstance(text, str) or not text:
            raise self.refusal(path, key, "expected a text", text)
        return text

    def _file(
        self, path: tuple[str, ...], table: Mapping[str, Any], key: str
    ) -> Path | None:
        if key not in table:
            return None
        file = Path(self._text(path, table, key))
        if not file.is_absolute():
            raise self.refusal(path, key, "expected an absolute path", str(file))
        return file

    def _at(self, path: tuple[str, ...], key: str, problem: str) -> Refusal:
        line = next(self._find_lines(path, key), None)
        where = "" if line is None else f" line {line}"
        return Refusal(f"{self._place}{where}: {problem}; correct the file")

    def _find_lines(self, path: tuple[str, ...], key: str) -> Iterator[int]:
        """Yields the line of a key of a table, or of the table if the key is ""."""
        outer, inner = ".".join(path), ".".join((*path, key) if key else path)
        table = ""
        for number, line in enumerate(self._lines, 1):
            header = _TABLE.match(line)
            if header:
                table = _PATH_SPACE.sub("", header[1])
            is_key = table == outer and _PATH_SPACE.sub("", line).startswith(f"{key}=")
            is_table = header and (table == inner or table.startswith(f"{inner}."))
            if is_table or (key and is_key):
                yield number


def format_config(config: Config) -> str:
    """Returns the text of a configuration, which ``parse_config`` accepts."""
    parts = [_HEADER]
    if config.current is not None:
        parts.append(f"{_CURRENT} = {_quote_text(config.current)}\n")
    for name, context in sorted(config.contexts.items()):
        parts.append(f"\n[{_CONTEXTS}.{name}]\nstore = {_quote_text(context.store)}\n")
        for key in FILES:
            file = getattr(context, key)
            if file is not None:
                parts.append(f"{key} = {_quote_text(str(file))}\n")
        if context.insecure:
            parts.append("insecure = true\n")
    return "".join(parts)


def _quote_text(text: str) -> str:
    """Returns a basic string of TOML; JSON escapes the same, but not DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


VARIABLE = "STORESVC_CONFIG"
"""Environment variable with the path of the file."""


def config_path() -> Path:
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
    """Returns the configuration; without contexts if there is no file."""
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
    """Replaces the file as a whole; only its owner may read it."""
    text = format_config(config)
    try:
        # a link to a file elsewhere stays one
        write_private_file(config_path().resolve(), text)
    except (OSError, UnicodeEncodeError) as e:
        raise Refusal(f"{config_path()}: cannot be written: {e}") from e


def write_private_file(path: Path, text: str) -> None:
    """Replaces a file as a whole; only its owner may read it."""
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
