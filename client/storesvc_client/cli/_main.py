"""The command group, the options before every command, and its refusals."""

from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click

from storesvc_client.cli._arguments import store_target
from storesvc_client.cli._connection import DEFAULT_TARGET, Connection
from storesvc_client.cli._refusal import Interrupted, Refusal

COMMANDS: Final = (
    *("ls", "tree", "stat", "get", "diff", "verify", "watch"),
    *("tag", "update", "hold", "rm", "undelete", "retain"),
    *("uploads", "du", "gc", "ping", "serve", "demo"),
)
"""In the order in which one meets them; each has a module of its own."""


class _Group(click.Group):
    """Commands that end in a sentence where the store refuses; each is imported when
    it is asked for."""

    def invoke(self, ctx: click.Context) -> Any:
        verbose = ctx.params["verbose"]
        try:
            return super().invoke(ctx)
        except Refusal as e:
            if verbose and e.__cause__:
                raise e.__cause__ from None
            raise
        except KeyboardInterrupt as e:
            told = ["interrupted", *getattr(e, "__notes__", [])]
            raise Interrupted("; ".join(told)) from e
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except Exception as e:
            # Imported this late, because a command that worked need not have it.
            from storesvc_client import StoreError

            if isinstance(e, StoreError) and not verbose:
                raise Refusal(str(e)) from e
            raise

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Returns the names of the commands."""
        return list(COMMANDS)

    def get_command(
        self,
        ctx: click.Context,  # noqa: ARG002
        cmd_name: str,
    ) -> click.Command | None:
        """Returns a command; None where there is none."""
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"storesvc_client.cli._{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command


@click.group(
    "storectl",
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--store",
    "-s",
    type=store_target,
    metavar="TARGET",
    envvar="STORECTL_STORE",
    show_envvar=True,
    default=DEFAULT_TARGET,
    show_default=True,
    help="host:port of a server, or of several with commas between, or the URI of a "
    "store to open here: file:///path, gs://bucket/prefix.",
)
@click.option(
    "--ca",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    envvar="STORECTL_CA",
    show_envvar=True,
    help="Certificates (PEM) to trust, in place of the system's.",
)
@click.option(
    "--cert",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    envvar="STORECTL_CERT",
    show_envvar=True,
    help="Certificate (PEM) to show to a server that asks for one.",
)
@click.option(
    "--key",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    envvar="STORECTL_KEY",
    show_envvar=True,
    help="Its private key (PEM).",
)
@click.option(
    "--insecure", is_flag=True, help="Talk plaintext to a server on another machine."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait for one answer.",
)
@click.option("--verbose", is_flag=True, help="Show where in the code an error arose.")
@click.version_option(package_name="storesvc", message="storectl %(version)s")
@click.pass_context
def main(
    context: click.Context,
    *,
    store: str,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    insecure: bool,
    timeout: float,
    verbose: bool,  # noqa: ARG001 - _Group.invoke asks for it
) -> None:
    """Look into a checkpoint store, look after it, or serve one.

    \b
    Paths narrow from left to right:
      prod                              a namespace
      prod/llama-8b                     a run
      prod/llama-8b@latest              a checkpoint, by step, tag or "latest"
      prod/llama-8b@500:params/**       leaves of it, by key or glob

    \b
    Examples:
      storectl serve --root file:///ckpts
      storectl ls
      storectl tree prod/llama-8b@latest
      storectl get 'prod/llama-8b@latest:params/**/kernel' -o kernels.npz
      storectl tag prod/llama-8b@500 best

    Exit code 0: done; 1: refused, for the reason on stderr; 2: wrong usage;
    130: interrupted.
    Completion in bash: eval "$(_STORECTL_COMPLETE=bash_source storectl)"; zsh and
    fish alike.
    """
    context.obj = Connection(
        target=store, ca=ca, cert=cert, key=key, insecure=insecure, timeout=timeout
    )
