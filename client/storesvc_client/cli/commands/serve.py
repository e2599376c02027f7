"""``storectl serve`` serves one store, ``console`` pages about one to the browser,
``hub`` its checkpoints to Hugging Face's libraries; ``demo`` runs the main job, end to
end."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Final, Literal

import click
from click.core import ParameterSource

from storesvc_client.cli.arguments import (
    WholeNumber,
    duration,
    existing_file,
    mapping_option,
    max_shard_option,
    store_root,
    store_target,
)
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.errors import Refusal
from storesvc_client.cli.output import print_note

if TYPE_CHECKING:
    from ssl import SSLContext

    from storesvc_client._hub.snapshots import View

_DEMO_NEEDS: Final = ("flax", "jax", "optax", "tensorstore")


@click.command()
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep the store in DIR, which must be empty or absent.",
)
@click.option(
    "--store",
    "-s",
    type=store_target,
    metavar="HOST:PORT",
    help="Train on the store of this server, as a new run; not on a store of its own.",
)
@pass_connection
def demo(connection: Connection, *, keep: Path | None, store: str | None) -> None:
    """Train a small language model, kill it, resume it.

    A new process resumes it from the store, on a mesh of another shape. Takes about a
    minute. The exit code is 0 if every claim holds.

    \b
    Examples:
      storectl demo
      storectl demo --keep /tmp/demo
      storectl demo --store ckpt.example:7070 --ca ca.pem
    """
    if keep and store:
        raise click.UsageError(
            "expected --keep or --store, not both: --keep keeps the demo's own store"
        )
    # find_spec imports nothing: only the training processes need them.
    missing = [name for name in _DEMO_NEEDS if find_spec(name) is None]
    if missing:
        raise Refusal(
            f"the demo needs {', '.join(missing)}: pip install 'storesvc[server,jax]'"
        )
    import tempfile
    from contextlib import nullcontext

    from storesvc_client.demo.job import Served, run_demo

    served = None
    if store:
        connection = connection.to_store(store)
        connection.open().close()  # it can be reached
        reaching = ["--insecure"] if connection.insecure else []
        for option in ("ca", "cert", "key", "token_file"):
            if file := getattr(connection, option):
                reaching += [f"--{option.replace('_', '-')}", str(file)]
        served = Served(address=connection.target, reaching=tuple(reaching))
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory() as place:
        code = run_demo(Path(place), served)
    click.get_current_context().exit(code)


_LOOPBACK: Final = "127.0.0.1"
_LEVELS: Final = ("debug", "info", "warning", "error")


@click.command()
@click.option(
    "--root",
    type=store_root,
    required=True,
    metavar="URI",
    help="The store: /path, file:///path, gs://...",
)
@click.option("--host", default=_LOOPBACK, show_default=True, metavar="ADDRESS")
@click.option(
    "--port",
    type=WholeNumber(0, 65535),
    default=7070,
    show_default=True,
    help="0 takes a free port, which --ready-file contains.",
)
@click.option(
    "--unix",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Serve at this Unix socket, for this user alone, instead of a port.",
)
@click.option(
    "--tls-cert", type=existing_file, metavar="FILE", help="Certificate chain (PEM)."
)
@click.option(
    "--tls-key", type=existing_file, metavar="FILE", help="Private key (PEM)."
)
@click.option(
    "--tls-client-ca",
    type=existing_file,
    metavar="FILE",
    help="Serve only clients with a certificate of these authorities (PEM).",
)
@click.option(
    "--policy",
    type=existing_file,
    metavar="FILE",
    help="Who may do what (TOML); read again when it changes.",
)
@click.option(
    "--anonymous",
    type=click.Choice(("reader", "writer", "manager", "admin")),
    help="Role of every client, also of those without an identity.",
)
@click.option(
    "--audit-log",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Record who changed, deleted or was denied what; opened again on SIGHUP.",
)
@click.option("--audit-reads", is_flag=True, help="Record calls that only read, too.")
@click.option(
    "--audit-best-effort",
    is_flag=True,
    help="Continue calls that cannot be recorded, instead of rejecting them.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Serve other machines without TLS or a policy: anyone may read and write.",
)
@click.option(
    "--read-only",
    is_flag=True,
    help="Reject all calls that change the store, and collect no garbage.",
)
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Written with the address of the server when it is ready.",
)
@click.option(
    "--gc-interval",
    type=duration,
    default="10m",
    show_default=True,
    metavar="TIME",
    help="Interval between collections of garbage; 0s disables them.",
)
@click.option(
    "--collect-only",
    is_flag=True,
    help="Accept no calls: collect garbage for servers that have --gc-interval 0s.",
)
@click.option(
    "--metrics-port",
    type=WholeNumber(0, 65535),
    help="Serve metrics for Prometheus over HTTP, without authentication.",
)
@click.option(
    "--metrics-host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Address of --metrics-port.",
)
@click.option(
    "--metrics-run",
    "metrics_runs",
    multiple=True,
    metavar="RUN",
    help="Run whose newest commit is a metric; repeatable.",
)
@click.option(
    "--hub-port",
    type=WholeNumber(0, 65535),
    help="Serve checkpoints as Hugging Face repositories at this port of --host, too; "
    "0 takes a free one, which the log has.",
)
@click.option(
    "--hub-map",
    metavar="RULES",
    help="A file of rules, or a table, that makes the files of --hub-port.",
)
@click.option(
    "--hub-select",
    multiple=True,
    metavar="GLOB",
    help="Leaves of --hub-port; may be repeated.",
)
@click.option(
    "--otlp-endpoint",
    default="",
    envvar="OTEL_EXPORTER_OTLP_ENDPOINT",
    metavar="URL",
    help="Send spans to this collector (OTLP over HTTP), such as http://localhost:4318.",
)
@click.option(
    "--log-format",
    type=click.Choice(("text", "json")),
    default="text",
    show_default=True,
)
@click.option(
    "--log-level", type=click.Choice(_LEVELS), default="info", show_default=True
)
def serve(
    *,
    root: str,
    host: str,
    port: int,
    unix: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    policy: Path | None,
    anonymous: str | None,
    audit_log: Path | None,
    audit_reads: bool,
    audit_best_effort: bool,
    insecure: bool,
    read_only: bool,
    ready_file: Path | None,
    gc_interval: timedelta,
    collect_only: bool,
    metrics_port: int | None,
    metrics_host: str,
    metrics_runs: tuple[str, ...],
    hub_port: int | None,
    hub_map: str | None,
    hub_select: tuple[str, ...],
    otlp_endpoint: str,
    log_format: Literal["text", "json"],
    log_level: str,
) -> None:
    """Serve a store until SIGTERM or Ctrl-C.

    The server finishes calls in flight before it exits. Only this machine can connect,
    unless --host is given, which needs TLS and a policy, or --insecure. TLS files and
    the policy are read again when they change.

    \b
    Examples:
      storectl serve --root /ckpts
      storectl serve --root /ckpts --unix /run/user/1000/store/socket
      storectl serve --root gs://bucket/prefix --collect-only
      storectl serve --root gs://bucket/prefix --host 0.0.0.0 \\
          --tls-cert chain.pem --tls-key key.pem --policy policy.toml
    """
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key go together")
    if tls_client_ca is not None and tls_cert is None:
        raise click.UsageError("--tls-client-ca needs --tls-cert and --tls-key")
    if unix is not None and (tls_cert is not None or host != _LOOPBACK):
        raise click.UsageError("--unix goes with neither --host nor --tls-cert")
    if collect_only:
        _check_collect_only(gc_interval)
    if hub_port is None and (hub_map or hub_select):
        raise click.UsageError("--hub-map and --hub-select need --hub-port")
    if hub_port is not None and (unix or tls_client_ca):
        raise click.UsageError(
            "--hub-port goes with neither --unix nor --tls-client-ca: its clients have "
            "no certificates, and any user may connect; storectl hub has a token"
        )
    # before gRPC is loaded: it would log each failed handshake of a client
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        from storesvc.errors import StoreError
        from storesvc.server import process
        from storesvc.server.process import MetricsPort, log_to_stderr
        from storesvc.server.security import Audit, Tls
    except ModuleNotFoundError as e:
        raise Refusal(
            f"serving needs {e.name}, which is not installed: "
            "pip install 'storesvc[server]'"
        ) from e

    log_to_stderr(log_level.upper(), form=log_format)
    tls = None
    if tls_cert and tls_key:
        tls = Tls(certificate=tls_cert, key=tls_key, client_ca=tls_client_ca)
    audit = None
    if audit_log:
        audit = Audit(file=audit_log, reads=audit_reads, best_effort=audit_best_effort)
    metrics = None
    if metrics_port is not None:
        metrics = MetricsPort(port=metrics_port, host=metrics_host, runs=metrics_runs)
    what = process.Serving(
        root=root,
        host=host,
        port=port,
        unix=unix,
        tls=tls,
        gc_interval=gc_interval,
        collects_only=collect_only,
        is_read_only=read_only,
        policy=policy,
        anonymous=anonymous or "",
        audit=audit,
        metrics=metrics,
        otlp_endpoint=otlp_endpoint,
    )
    try:
        if hub_port is not None:
            _check_packages("hub", _HTTP_NEEDS)
            view = _make_view(hub_map, hub_select, None)
            context = tls.make_context() if tls else None
            listening = _bind(hub_port, host, option="--hub-port")
            extra = partial(_serve_hub, listening, view, context)
            what = replace(what, extra_server=extra)
        process.serve(what, insecure=insecure, ready_file=ready_file)
    except StoreError as e:
        raise Refusal(str(e)) from e
    except OSError as e:  # from the ready file: errors of the store are StoreErrors
        raise Refusal(f"{e.filename}: {e.strerror or e}") from e


@contextmanager
def _serve_hub(
    listening: socket.socket,
    view: "View",
    tls: "SSLContext | None",
    address: str,
) -> Iterator[str]:
    """Serves the hub of the server at an address; yields what the log says."""
    from storesvc.storage.location import is_this_machine
    from storesvc_client._http import serve_in_thread
    from storesvc_client._hub.app import create_app
    from storesvc_client._hub.callers import ServerCallers

    host, port = listening.getsockname()[:2]
    with closing(listening), closing(ServerCallers(address, view)) as callers:
        app = create_app(callers, is_local=is_this_machine(host))
        with serve_in_thread(app, listening, tls):
            name = f"[{host}]" if ":" in host else host
            yield f"hub at {'https' if tls else 'http'}://{name}:{port}"


def _make_view(
    mapping: str | None, select: tuple[str, ...], max_shard: int | None
) -> "View":
    """Returns what makes the files of a hub."""
    from storesvc_client._export.safetensors import MAX_SHARD_BYTES
    from storesvc_client._hub.snapshots import View
    from storesvc_client._restore.mapped import load_rules

    return View(
        rules=load_rules(mapping) if mapping else None,
        select=select,
        shard_bytes=max_shard or MAX_SHARD_BYTES,
    )


_FOR_CALLERS: Final = (
    *("host", "port", "unix", "tls_cert", "policy", "anonymous", "audit_log"),
    *("insecure", "read_only", "ready_file", "hub_port"),
)
"""Options of a server that accepts calls."""


def _check_collect_only(gc_interval: timedelta) -> None:
    """Rejects options that mean nothing to a process that accepts no calls."""
    source = click.get_current_context().get_parameter_source
    given = [n for n in _FOR_CALLERS if source(n) is ParameterSource.COMMANDLINE]
    if given:
        name = given[0].replace("_", "-")
        raise click.UsageError(f"--collect-only accepts no calls: omit --{name}")
    if not gc_interval:
        raise click.UsageError("--collect-only needs a --gc-interval above 0s")


_HTTP_NEEDS: Final = ("starlette", "uvicorn")


@click.command()
@click.option(
    "--port",
    type=WholeNumber(0, 65535),
    default=7080,
    show_default=True,
    help="Port on this machine; 0 chooses a free one.",
)
@pass_connection
def console(connection: Connection, *, port: int) -> None:
    """Serve pages about the store to your browser, until Ctrl-C.

    Prints the address to open. Only this machine can connect; from another one, forward
    the port: ssh -L 7080:127.0.0.1:7080 HOST. The pages show and change what you may:
    the console uses the identity of storectl.

    \b
    Examples:
      storectl console
      storectl console --store file:///ckpts --port 0
    """
    _check_packages("console", ("jinja2", *_HTTP_NEEDS))
    resolved = connection.resolve()
    with resolved.open() as client:
        import secrets

        from storesvc_client._http import HOST
        from storesvc_client._http import serve as serve_pages
        from storesvc_client.console.app import create_app

        with closing(_bind(port)) as listening:
            key = secrets.token_urlsafe(24)
            taken = listening.getsockname()[1]
            click.echo(f"http://{HOST}:{taken}/?key={key}")
            print_note(f"console of {resolved.target}; Ctrl-C ends it")
            serve_pages(create_app(client, key=key, store=resolved.target), listening)


@click.command()
@click.option(
    "--port",
    type=WholeNumber(0, 65535),
    default=7090,
    show_default=True,
    help="Port on this machine; 0 chooses a free one.",
)
@mapping_option
@click.option(
    "--select",
    multiple=True,
    metavar="GLOB",
    help="Serve leaves that match only; may be repeated.",
)
@max_shard_option
@pass_connection
def hub(
    connection: Connection,
    *,
    port: int,
    mapping: str | None,
    select: tuple[str, ...],
    max_shard: int | None,
) -> None:
    """Serve checkpoints as Hugging Face repositories, until Ctrl-C.

    Prints HF_ENDPOINT and HF_TOKEN for the clients; if HF_TOKEN is set, it is the
    token. A run is a repository; a revision is main, a tag or a step. Files are made
    while they are read, and nothing can be changed. Only this machine can connect, and
    reads what the identity of storectl may read.

    \b
    Examples:
      storectl hub --select 'params/**'
      storectl hub --store file:///ckpts --map rules.toml --port 0
    """
    _check_packages("hub", _HTTP_NEEDS)
    resolved = connection.resolve()
    with resolved.open() as client:
        from storesvc_client._http import HOST
        from storesvc_client._http import serve as serve_files
        from storesvc_client._hub.app import create_app
        from storesvc_client._hub.callers import TokenHolders

        view = _make_view(mapping, select, max_shard)
        known = os.environ.get("HF_TOKEN", "").strip()
        token = known or token_urlsafe(32)
        with closing(_bind(port)) as listening:
            line = f"export HF_ENDPOINT=http://{HOST}:{listening.getsockname()[1]}"
            click.echo(line if known else f"{line} HF_TOKEN={token}")
            print_note(f"hub of {resolved.target}; Ctrl-C ends it")
            callers = TokenHolders(client, view, token=token)
            serve_files(create_app(callers), listening)


def _check_packages(what: str, needed: Sequence[str]) -> None:
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise Refusal(
            f"the {what} needs {', '.join(missing)}, which is not installed: pip "
            "install 'storesvc[console]'"
        )


def _bind(port: int, host: str = _LOOPBACK, *, option: str = "--port") -> socket.socket:
    from storesvc_client._http import bound_socket

    try:
        return bound_socket(port, host)
    except OSError as e:
        raise Refusal(
            f"{host}:{port}: expected a free port, got an error of the system: "
            f"{os.strerror(e.errno or 0)}; give another {option}, or 0"
        ) from e
