"""``storectl config``: names stores, so that commands need no address."""

from dataclasses import replace
from pathlib import Path
from typing import Final

import click

from storesvc_client._views.tables import Column, Shrink, Table, field_column
from storesvc_client._views.texts import ABSENT
from storesvc_client.cli.arguments import convert, json_option, store_target
from storesvc_client.cli.completion import complete_context
from storesvc_client.cli.contexts import (
    FILES,
    Config,
    Context,
    check_name,
    config_path,
    read_config,
    write_config,
)
from storesvc_client.cli.errors import Refusal
from storesvc_client.cli.output import Listing, print_json

_FILE: Final = click.Path(
    exists=True, dir_okay=False, resolve_path=True, path_type=Path
)


def _name(text: str) -> str:
    return convert(check_name, text)


@click.group()
def config() -> None:
    """Name stores, and choose the one that commands use.

    A context is a name for a store and for the options to connect to it. They are kept
    in $STORESVC_CONFIG, by default ~/.config/storesvc/config.toml. An option of a
    command has precedence over an environment variable, and that over the context.

    \b
    Examples:
      storectl config set prod --store ckpt.example:7070 --ca /etc/ssl/ckpt.pem
      storectl config use prod
      storectl -c lab ls
    """


@config.command("set")
@click.argument("name", type=_name, metavar="NAME", shell_complete=complete_context)
@click.option("--store", "-s", type=store_target, required=True, metavar="TARGET")
@click.option("--ca", type=_FILE, metavar="FILE")
@click.option("--cert", type=_FILE, metavar="FILE")
@click.option("--key", type=_FILE, metavar="FILE")
@click.option("--token-file", type=_FILE, metavar="FILE")
@click.option("--insecure", is_flag=True)
def set_context(
    *,
    name: str,
    store: str,
    insecure: bool,
    **files: Path | None,
) -> None:
    """Create a context, or replace it. The first one becomes the current one.

    Its options mean the same as for storectl itself; see storectl --help.
    """
    if "://" in store and (insecure or any(files.values())):
        raise click.UsageError(
            "--ca, --cert, --key, --token-file and --insecure go with a server, not "
            f"with {store}"
        )
    if (files["cert"] is None) != (files["key"] is None):
        raise click.UsageError("expected --cert and --key together")
    context = Context(name=name, store=store, insecure=insecure, **files)
    found = read_config()
    contexts = {**found.contexts, name: context}
    current = found.current if found.contexts else name
    write_config(Config(current=current, contexts=contexts))
    is_current = " (current)" if current == name else ""
    click.echo(f"{name}{is_current}: {store}")


@config.command()
@click.argument("name", type=_name, metavar="NAME", shell_complete=complete_context)
def use(*, name: str) -> None:
    """Make a context the current one."""
    found = read_config()
    context = found.context(name)
    write_config(replace(found, current=name))
    click.echo(f"{name} (current): {context.store}")


@config.command("list")
@json_option
def list_contexts(*, as_json: bool) -> None:
    """List the contexts; an asterisk marks the current one."""
    found = read_config()
    if as_json:
        print_json(
            {
                "file": str(config_path()),
                "current": found.current,
                "contexts": [found.contexts[name] for name in sorted(found.contexts)],
            }
        )
        return
    columns = (
        Column("", lambda context: "*" if context.name == found.current else ""),
        *(field_column("NAME", "name"), field_column("STORE", "store")),
        Column("OPTIONS", _options_text, shrink=Shrink.END),
    )
    contexts = [found.contexts[name] for name in sorted(found.contexts)]
    Listing(Table("context", columns)).show(contexts, as_json=False)


@config.command()
@click.argument("name", type=_name, metavar="NAME", shell_complete=complete_context)
def remove(*, name: str) -> None:
    """Remove a context; its store is not changed."""
    found = read_config()
    context = found.context(name)
    if found.current == name and len(found.contexts) > 1:
        raise Refusal(
            f"context {name} is the current one; make another one current first, with "
            "storectl config use"
        )
    contexts = {n: other for n, other in found.contexts.items() if n != name}
    current = None if found.current == name else found.current
    write_config(Config(current=current, contexts=contexts))
    click.echo(f"{name} removed: {context.store}")


def _options_text(context: Context) -> str:
    options = [
        f"--{key.replace('_', '-')} {file}"
        for key in FILES
        if (file := getattr(context, key))
    ]
    options += ["--insecure"] if context.insecure else []
    return " ".join(options) or ABSENT
