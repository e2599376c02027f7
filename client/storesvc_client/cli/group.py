"""Defines the command group of storectl and reports its errors."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from keyword import iskeyword
from typing import Any, Final

import click
from click.core import ParameterSource

from storesvc_client.cli.connection import VERBOSE, Connection
from storesvc_client.cli.errors import Interrupted, Refusal, json_line
from storesvc_client.cli.global_options import accept_global_options, global_options
from storesvc_client.cli.suggestions import command_hint, error_text, option_hint

COMMANDS: Final = {
    "ls": "ls",
    "tree": "tree",
    "stat": "stat",
    "get": "get",
    "cat": "cat",
    "export": "export",
    "diff": "diff",
    "verify": "verify",
    "trace": "trace",
    "watch": "watch",
    "tag": "tag",
    "update": "update",
    "hold": "hold",
    "rm": "rm",
    "undelete": "undelete",
    "retain": "retain",
    "import": "import_",
    "cp": "cp",
    "uploads": "uploads",
    "du": "du",
    "quota": "quota",
    "gc": "gc",
    "config": "config",
    "login": "login",
    "whoami": "whoami",
    "auth": "auth",
    "audit": "audit",
    "ping": "ping",
    "serve": "serve",
    "console": "console",
    "demo": "demo",
}
"""The commands in the order of ``--help``, and the module of each."""


@contextmanager
def _reported(*, as_json: bool) -> Generator[None]:
    """Reports an error as JSON if requested; click prints the others.

    Ctrl-C is reported as an error, where click would report an abort.
    """
    try:
        try:
            yield
        except KeyboardInterrupt as e:
            parts = ["interrupted", *getattr(e, "__notes__", [])]
            raise Interrupted("; ".join(parts)) from e
    except click.ClickException as e:
        if isinstance(e, click.NoSuchOption) and (hint := option_hint(e)):
            e = click.UsageError(f"{e.message} Did you mean {hint!r}?", ctx=e.ctx)
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
        """Parses the options of the group."""
        match args:  # as other programs have them
            case ["version"]:
                args = ["--version"]
            case ["help", *command]:
                args = [*command[:1], "--help"]
            case _:
                pass
        as_json = "--json" in args[: args.index("--") if "--" in args else None]
        with _reported(as_json=as_json):
            context = super().make_context(info_name, args, parent, **extra)
            context.meta[_JSON] = as_json
            if context.resilient_parsing:  # a shell completes; no command is called
                context.obj = _connection(context, **context.params)
            return context

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; reports an error of the store in one line, or as JSON."""
        with _reported(as_json=ctx.meta[_JSON]):
            return self._invoke(ctx)

    def _invoke(self, ctx: click.Context) -> Any:
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
        """Returns the names of the commands."""
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the command of the arguments; suggests one if there is none."""
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
        """Returns a command, or None if there is none."""
        return _command(cmd_name) if cmd_name in COMMANDS else None


@cache
def _command(name: str) -> click.Command:
    module = import_module(f"storesvc_client.cli.commands.{COMMANDS[name]}")
    command: click.Command = getattr(module, f"{name}_" if iskeyword(name) else name)
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
def main(
    ctx: click.Context,
    /,
    *,
    verbose: bool,
    **_: object,
) -> None:
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
    """Returns the connection that the options of the group describe."""

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
