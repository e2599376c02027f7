"""Connects commands to a store.

A command declares its connection with ``@pass_connection``; nothing is imported and
nothing is sent before it is opened.

Log lines of native libraries are hidden from the terminal: gRPC, TensorStore and its
AWS SDK write directly to file descriptor 2, in their own format, and cannot be
configured from Python. While a store is opened, such lines would precede the one-line
error message.
"""

import os
import re
import sys
import tempfile
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import click

from storesvc.errors import InvalidFieldError
from storesvc.format.layout import STORE
from storesvc.storage.location import storage_at
from storesvc_client._chunks.memory import collector_paused
from storesvc_client.cli.errors import Refusal
from storesvc_client.cli.paths import (
    ContextName,
    ForeignOptions,
    ForeignStore,
    StorePart,
    StoreTarget,
    is_foreign,
)

if TYPE_CHECKING:
    from storesvc_client import Client
    from storesvc_client._rpc.connection import Connection as RpcConnection
    from storesvc_client._rpc.tokens import Token
    from storesvc_client.cli.paths import Readable, StorePath
    from storesvc_proto.v1.access_service_pb2 import LoginOption

_LINE: Final = re.compile(
    rb"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w./-]+:\d+\] |WARNING: All log messages "
    rb"before absl::InitializeLog"
)
"""Beginning of a line of Abseil's log."""

_STDERR: Final = 2


@contextmanager
def native_log_hidden(*, shown: bool) -> Generator[None]:
    """Drops log lines that native libraries write inside the block; forwards the rest,
    and all of them if they are to be shown.

    Output of Python to ``sys.stderr`` appears at once; other output to file descriptor
    2 that is not a log line appears at the end of the block.
    """
    if shown or not _is_stderr(sys.stderr):
        yield
        return
    ours, python_stderr = os.dup(_STDERR), sys.stderr
    try:
        with (
            open(ours, "w", buffering=1, closefd=False) as direct,
            tempfile.TemporaryFile() as caught,
        ):
            os.dup2(caught.fileno(), _STDERR)
            sys.stderr = direct
            try:
                yield
            finally:
                sys.stderr = python_stderr
                os.dup2(ours, _STDERR)
                caught.seek(0)
                for line in caught:
                    if not _LINE.match(line):
                        os.write(_STDERR, line)
    finally:
        os.close(ours)


def _is_stderr(stream: IO[str]) -> bool:
    try:
        return stream.fileno() == _STDERR
    except (AttributeError, OSError):  # a stream of a test, or none
        return False


def is_verbose() -> bool:
    """Returns whether ``--verbose`` is given."""
    return bool(click.get_current_context().meta.get(VERBOSE))


DEFAULT_TARGET: Final = "127.0.0.1:7070"

VERBOSE: Final = "storesvc_client.verbose"
"""Key of ``Context.meta``: whether ``--verbose`` is given."""

_LIBRARIES: Final = {
    # NumPy would start a thread for each core, for linear algebra, which no command
    # does: a tenth of the time of ``ls``.
    "OPENBLAS_NUM_THREADS": "1",
    # gRPC would log failed handshakes in addition to the error message.
    "GRPC_VERBOSITY": "ERROR",
}
"""Defaults of variables that libraries read when they are loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The location of a store and the options to connect to it."""

    target: str
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    from_environment: frozenset[str] = frozenset()
    """Names of the options above that come from environment variables."""
    insecure: bool = False
    timeout: float
    """Seconds that one call may take."""
    token_file: Path | None = None
    """File with the token; None: the token of a login, if there is one."""
    given: frozenset[str] = frozenset()
    """Names of the options that were given on the command line; "store" for
    ``target``."""
    context: str | None = None
    """Name of the context to use; None: the current one, if no store is given."""

    def to_store(self, target: str) -> "Connection":
        """Returns the connection to another store, with the same options."""
        return replace(self, target=target, given=self.given | {"store"}, context=None)

    def to_context(self, name: str) -> "Connection":
        """Returns the connection to the store of a context, with its options."""
        return Connection(target=self.target, timeout=self.timeout, context=name)

    def to_part(self, store: StorePart) -> "Connection":
        """Returns the connection to the store of a place; certificates of the command
        are for servers only."""
        match store:
            case None:
                return self
            case ContextName(name):
                return self.to_context(name)
            case StoreTarget(target):
                found = self.to_store(target)
                if "://" not in target:
                    return found
                return replace(found, ca=None, cert=None, key=None, insecure=False)

    def resolve(self) -> "Connection":
        """Returns the connection with the values of its context, if one applies.

        A context applies as a whole or not at all: its certificates are for its store.
        """
        from storesvc_client.cli.contexts import FILES, read_config

        kept = self.given
        if self.context is not None:
            if "store" in self.given:
                raise click.UsageError("expected one of --store and --context")
            context = read_config().context(self.context)
        elif "store" in self.given | self.from_environment:
            return self
        else:
            config = read_config()
            if config.current is None:
                return self
            context = config.context(config.current)
            kept |= self.from_environment
        files = {
            name: file
            for name in FILES
            if name not in kept and (file := getattr(context, name))
        }
        return replace(
            self,
            **files,
            target=context.store,
            insecure=self.insecure or context.insecure,
            given=self.given | {"store"},
            context=None,
        )

    def open(self, *, create: bool = False) -> "Client":
        """Returns a client of the store, to be used as a context manager.

        A context applies, if one is given, or if no store is.

        Args:
            create: Whether to create a store if the root holds none.

        Raises:
            Refusal: The root holds no store, and ``create`` is not set.
            StoreError: The store cannot be reached.
        """
        if (resolved := self.resolve()) is not self:
            return resolved.open(create=create)
        shown = is_verbose()
        # Imports allocate many objects, and all of them stay.
        with collector_paused(), _library_defaults(), native_log_hidden(shown=shown):
            from storesvc_client import _session as sessions
            from storesvc_client._api.client import MAX_TIMEOUT, open_client
            from storesvc_client._telemetry.events import Telemetry
            from storesvc_client._values.arguments import checked_duration

            if not create:
                self._check_root()
            checked_duration("connect: timeout=", self.timeout, most=MAX_TIMEOUT)
            connection = self._dial(self.token())
            # A person waits at a terminal: retry for --timeout and no longer.
            connection.patience = self.timeout
            return open_client(
                sessions.Session(
                    connection,
                    sessions.new_staging(sessions.DEFAULT_STAGING_BYTES),
                    sessions.new_blocks(sessions.DEFAULT_RESTORE_POOL_BYTES),
                    Telemetry(self.target),
                )
            )

    def open_for(
        self, path: "StorePath | None", options: ForeignOptions | None = None
    ) -> "Readable":
        """Returns what a path leads into, to be used as a context manager: the store,
        or checkpoints of another project, for which no store is opened."""
        if options is not None:
            options.check(path)
        if is_foreign(str(path or "")):
            return ForeignStore(options)
        return self.open()

    def login_options(self) -> "list[LoginOption]":
        """Returns the issuers that a person can log in at; needs no identity."""
        from storesvc_client._rpc.tls import is_root
        from storesvc_proto.v1 import access_service_pb2 as api
        from storesvc_proto.v1.access_service_pb2_grpc import AccessServiceStub

        if is_root(self.target):
            raise Refusal(
                f"{self.target}: expected a server to log in to, got a root, which the "
                "permissions of its files protect"
            )
        with closing(self._dial(None)) as opened:
            stub = AccessServiceStub(opened.channel)
            response = opened.call(stub.GetLoginOptions, api.GetLoginOptionsRequest())
            return [*response.options]

    def _dial(self, token: "Token | None") -> "RpcConnection":
        from storesvc_client._rpc.connection import open_connection

        return open_connection(
            self.target,
            **self.server_files(),
            insecure=self.insecure,
            timeout=self.timeout,
            token=token,
            collect=None,
        )

    def server_files(self) -> dict[str, Path | None]:
        """Returns the options of ``connect`` for certificates."""
        from storesvc_client._rpc.tls import is_root

        # Files from the environment are for servers only.
        unused = self.from_environment if is_root(self.target) else frozenset()
        files = {"ca": self.ca, "cert": self.cert, "key": self.key}
        return {name: None if name in unused else file for name, file in files.items()}

    def token(self) -> "Token | None":
        """Returns the token to connect with; None for a root, which takes none."""
        from storesvc_client._rpc.tls import is_root
        from storesvc_client.cli.logins import login_token

        if is_root(self.target) and (
            self.token_file is None or "token_file" in self.from_environment
        ):
            return None
        return self.token_file or login_token(self.target)

    def _check_root(self) -> None:
        """Rejects a root without a store, which opening it would create."""
        try:
            storage = storage_at(self.target)
        except InvalidFieldError:  # an address, or a root that is rejected later
            return
        if storage.is_files:
            root = str(Path(storage.spec["path"]))
            try:
                is_store = (Path(root) / STORE).exists()
            except OSError as e:
                raise Refusal(
                    f"{root}: expected the root of a store, got an error of the "
                    f"system: {e.strerror}; check the path and its permissions"
                ) from e
        elif storage.is_remote:
            from storesvc_client._rpc.connection import holds_store

            root = storage.name
            is_store = holds_store(self.target, timeout=self.timeout)
        else:
            return
        if not is_store:
            raise Refusal(
                f"{root} holds no store; expected the root of one, which a first "
                "save, storectl serve, or --create of import and cp creates"
            )


@contextmanager
def _library_defaults() -> Generator[None]:
    """Sets the defaults for libraries that are loaded inside the block, and not for
    commands that storectl starts later."""
    added = {name: v for name, v in _LIBRARIES.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


pass_connection = click.make_pass_decorator(Connection)
