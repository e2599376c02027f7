"""Defines the command group of storectl and its options, given before or after a
command, and reports errors."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

from storesvc_client.cli.arguments import existing_file, store_target
from storesvc_client.cli.completion import complete_context
from storesvc_client.cli.connection import DEFAULT_TARGET, VERBOSE, Connection
from storesvc_client.cli.errors import (
    Interrupted,
    Refusal,
    command_hint,
    error_text,
    json_line,
    option_hint,
)

_F = TypeVar("_F", bound=Callable[..., Any])


def _file_option(name: str, text: str) -> dict[str, Any]:
    """Returns the settings of an option for a file, with its environment variable."""
    return {
        "type": existing_file,
        "metavar": "FILE",
        "envvar": f"STORECTL_{name}",
        "show_envvar": True,
        "help": text,
    }


_OPTIONS: Final[dict[tuple[str, ...], dict[str, Any]]] = {
    ("--store", "-s"): {
        "type": store_target,
        "metavar": "TARGET",
        "envvar": "STORECTL_STORE",
        "show_envvar": True,
        "default": DEFAULT_TARGET,
        "show_default": True,
        "help": "HOST[:PORT] of a server, or of several with commas between, or the "
        "root of a store to open here: /path, file:///path, gs://bucket/prefix.",
    },
    ("--context", "-c"): {
        "metavar": "NAME",
        "shell_complete": complete_context,
        "help": "Store and options that storectl config set NAME has kept, in place of "
        "the current context.",
    },
    ("--ca",): _file_option(
        "CA", "Certificates (PEM) to trust, in place of the system's."
    ),
    ("--cert",): _file_option(
        "CERT", "Client certificate (PEM), for a server that requires one."
    ),
    ("--key",): _file_option("KEY", "Its private key (PEM)."),
    ("--token-file",): _file_option(
        "TOKEN_FILE", "File with a bearer token, in place of the one of storectl login."
    ),
    ("--insecure",): {
        "is_flag": True,
        "help": "Use plaintext to a server on another machine.",
    },
    ("--timeout",): {
        "type": click.FloatRange(min=0, min_open=True),
        "default": 30.0,
        "show_default": True,
        "metavar": "SECONDS",
        "help": "Maximum wait for one response.",
    },
    ("--verbose",): {
        "is_flag": True,
        "help": "Show tracebacks, and the log of native libraries.",
    },
}


_OF_BOTH: Final = ("type", "is_flag", "shell_complete")
"""Settings of an option before a command that it has after a command, too."""


def global_options(function: _F) -> _F:
    for names, settings in reversed(_OPTIONS.items()):
        function = click.option(*names, **settings)(function)
    return function


def accept_global_options(command: click.Command) -> None:
    """Adds the options of storectl to a command, where they override storectl's, and to
    the commands of a group.

    An option that the command itself defines, such as ``serve --insecure``, is kept.
    """
    own = {name for parameter in command.params for name in parameter.opts}
    command.params += (
        click.Option(
            names,
            expose_value=False,
            hidden=True,
            callback=_override,
            **{name: value for name, value in settings.items() if name in _OF_BOTH},
        )
        for names, settings in _OPTIONS.items()
        if own.isdisjoint(names)
    )
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            accept_global_options(inner)


def _override(context: click.Context, option: click.Parameter, value: Any) -> None:
    name = str(option.name)
    if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
        return
    if name == "verbose":
        context.meta[VERBOSE] = True
    elif isinstance(context.obj, Connection):
        field = "target" if name == "store" else name
        changes: dict[str, Any] = {field: value}
        changes["from_environment"] = context.obj.from_environment - {name}
        changes["given"] = context.obj.given | {name}
        context.obj = replace(context.obj, **changes)


COMMANDS: Final = {
    "ls": "look",
    "tree": "look",
    "stat": "look",
    "get": "read",
    "cat": "read",
    "export": "transfer",
    "diff": "inspect",
    "verify": "inspect",
    "map": "mapping",
    "trace": "watch",
    "watch": "watch",
    "tag": "change",
    "update": "change",
    "hold": "hold",
    "rm": "change",
    "undelete": "change",
    "retain": "storage",
    "import": "transfer",
    "cp": "transfer",
    "uploads": "storage",
    "du": "storage",
    "quota": "auth",
    "gc": "storage",
    "upgrade": "storage",
    "config": "config",
    "login": "auth",
    "whoami": "auth",
    "auth": "auth",
    "audit": "audit",
    "ping": "auth",
    "doctor": "doctor",
    "serve": "serve",
    "console": "serve",
    "hub": "serve",
    "demo": "serve",
}
"""The commands in the order of ``--help``, and the module of each."""


@contextmanager
def _report_errors(*, as_json: bool) -> Generator[None]:
    """Reports an error as JSON if requested; click prints the others.

    Ctrl-C is reported as an error, where click would report an abort.
    """
    try:
        try:
            yield
        except KeyboardInterrupt as e:
            # without the note of Python 3.12 about a class that was being made
            notes = [n for n in getattr(e, "__notes__", []) if "__set_name__" not in n]
            raise Interrupted("; ".join(["interrupted", *notes])) from e
    except click.ClickException as e:
        if isinstance(e, click.NoSuchOption) and (hint := option_hint(e)):
            e = click.UsageError(e.message + hint, ctx=e.ctx)
        if not as_json:
            raise e  # noqa: TRY201 - it may be another one
        click.echo(json_line(e), err=True)
        raise click.exceptions.Exit(e.exit_code) from e


_JSON: Final = "storesvc_client.json"
"""Key of ``Context.meta``: whether errors are printed as JSON."""


class _Group(click.Group):
    """Imports commands when they are called; prints errors of the store in one line."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        as_json = "--json" in args[: args.index("--") if "--" in args else None]
        with _report_errors(as_json=as_json):
            context = super().make_context(info_name, args, parent, **extra)
            context.meta[_JSON] = as_json
            if context.resilient_parsing:  # a shell completes; no command is called
                context.obj = _connection(context, **context.params)
            return context

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; reports an error of the store in one line, or as JSON."""
        with _report_errors(as_json=ctx.meta[_JSON]):
            try:
                return super().invoke(ctx)
            except Refusal as e:
                if ctx.meta[VERBOSE] and e.__cause__:
                    raise e.__cause__ from None
                raise
            except (click.ClickException, click.Abort, click.exceptions.Exit):
                raise
            except Exception as e:
                # Imported here: a command that succeeds does not need it.
                from storesvc_client import StoreError

                if isinstance(e, StoreError) and not ctx.meta[VERBOSE]:
                    raise Refusal(error_text(e)) from e
                raise

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the command of the arguments; suggests one if there is none."""
        match args:  # as other programs have them
            case ["version" | "help" as name]:
                self.make_context(ctx.info_name, [f"--{name}"])  # prints it and exits
            case ["help", name, *_]:
                args = [name, "--help"]
            case _:
                pass
        name = args[0]
        is_wrong = name not in COMMANDS and not name.startswith("-")
        if is_wrong and not ctx.resilient_parsing:
            ctx.fail(f"No such command {name!r}.{command_hint(name, COMMANDS)}")
        return super().resolve_command(ctx, args)

    def get_command(
        self,
        ctx: click.Context,  # noqa: ARG002
        cmd_name: str,
    ) -> click.Command | None:
        return _command(cmd_name) if cmd_name in COMMANDS else None


@cache
def _command(name: str) -> click.Command:
    module = import_module(f"storesvc_client.cli.commands.{COMMANDS[name]}")
    # of a keyword, or of a builtin of Python
    command: click.Command = getattr(module, f"{name}_", None) or getattr(module, name)
    accept_global_options(command)
    return command


@click.group(
    "storectl",
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@global_options
@click.version_option(package_name="storesvc", message="storectl %(version)s")
@click.pass_context
def main(ctx: click.Context, /, *, verbose: bool, **_: object) -> None:
    """Inspect, change or serve a checkpoint store.

    \b
    Paths narrow from left to right:
      prod                              a namespace
      prod/llama-8b                     a run
      prod/llama-8b@latest              a checkpoint, by step, tag or "latest"
      prod/llama-8b@500:params/**       leaves of it, by key or glob
      prod/llama-8b@500:config          for "cat", an item of it, by name

    \b
    Examples:
      storectl serve --root file:///ckpts
      storectl ls
      storectl tree prod/llama-8b@latest
      storectl get 'prod/llama-8b@latest:params/**/kernel' -o kernels.npz
      storectl tag prod/llama-8b@500 best

    The options below may be given after the command, too. Without --store the current
    context applies; see storectl config. With --json an error is one line of JSON on
    stderr.

    Exit code 0: done; 1: rejected, for the reason on stderr; 2: wrong usage;
    130: interrupted.
    Completion in bash: eval "$(_STORECTL_COMPLETE=bash_source storectl)"; likewise
    for zsh and fish.
    """
    ctx.meta[VERBOSE] = verbose
    ctx.obj = _connection(ctx, **ctx.params)


def _connection(ctx: click.Context, **options: Any) -> Connection:
    def options_from(source: ParameterSource) -> frozenset[str]:
        names = ("store", "ca", "cert", "key", "token_file")
        return frozenset(n for n in names if ctx.get_parameter_source(n) is source)

    options.pop("verbose")
    return Connection(
        target=options.pop("store"),
        from_environment=options_from(ParameterSource.ENVIRONMENT),
        given=options_from(ParameterSource.COMMANDLINE),
        **options,
    )
