"""``storectl retain``: shows or sets the retention policy of a run."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import click

from storesvc_client._views.tables import DECISIONS
from storesvc_client._views.texts import plural, size_text, time_text
from storesvc_client.cli.arguments import duration, json_option, run_path
from storesvc_client.cli.completion import Part, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.output import json_value, print_json, print_note, print_table
from storesvc_client.cli.paths import RunPath

if TYPE_CHECKING:
    from storesvc_client import RetentionDecision, RetentionPolicy, Run


def policy(text: str) -> "RetentionPolicy":
    """Returns the retention policy."""
    from storesvc_client import InvalidRequestError, parse_policy

    try:
        return parse_policy(text)
    except InvalidRequestError as e:
        raise click.BadParameter(str(e)) from e


@click.command()
@click.argument(
    "path",
    type=run_path,
    metavar="RUN",
    shell_complete=complete_path(Part.RUN, Part.RUN),
)
@click.argument("wanted", type=policy, metavar="[POLICY]", required=False)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Change nothing; show what POLICY, or the run's, would delete.",
)
@click.option(
    "--apply", "now", is_flag=True, help="Delete now what the policy does not keep."
)
@click.option("--clear", is_flag=True, help="Remove the policy: all checkpoints stay.")
@click.option(
    "--purge-delay",
    type=duration,
    metavar="TIME",
    help="How long a deleted checkpoint can be undeleted, such as 3d.",
)
@json_option
@pass_connection
def retain(
    connection: Connection,
    *,
    path: RunPath,
    wanted: "RetentionPolicy | None",
    dry_run: bool,
    now: bool,
    clear: bool,
    purge_delay: timedelta | None,
    as_json: bool,
) -> None:
    """Show or set which checkpoints of a run stay.

    POLICY alone becomes the policy of the run: servers delete the checkpoints that it
    does not keep, now, after each commit and at each collection. The newest, pinned and
    tagged checkpoints always stay.

    \b
    A policy combines rules with | (either), & (both), ~ (not) and parentheses:
      latest(3)                 the three highest steps
      every(1000 steps)         multiples of 1000
      every(1 day)              the first checkpoint of each day
      newer-than(12h)           checkpoints committed within 12 hours
      best(2, loss, min)        the two with the lowest loss; max: the highest
      best(2, loss, min, or-without)   also checkpoints without a loss
      best(2, loss, min, force)        even if no checkpoint has a loss
      steps(0, 500)             these steps
      tagged, pinned            tagged or pinned checkpoints
    ~ applies only to rules that judge one checkpoint at a time.

    \b
    Examples:
      storectl retain prod/llama-8b
      storectl retain prod/llama-8b 'latest(3) | every(1 day)' --dry-run
      storectl retain prod/llama-8b 'latest(3) | every(1 day)' --purge-delay 3d
      storectl retain prod/llama-8b --apply
      storectl retain prod/llama-8b --clear
    """
    if dry_run + now + clear > 1 or (clear and wanted is not None):
        raise click.UsageError("expected one of POLICY, --dry-run, --apply and --clear")
    if dry_run and purge_delay is not None:
        raise click.UsageError(
            "expected --dry-run without --purge-delay: it changes nothing"
        )
    with connection.open() as client:
        run = client.run(path.run)
        if dry_run:
            _print_decisions(
                run.retention.preview(wanted), "would delete", as_json=as_json
            )
            if not as_json:
                _print_when(_delay(run))
            return
        if wanted is not None or clear:
            run.retention.set(wanted, purge_delay=purge_delay)
        elif purge_delay is not None:
            run.configure(purge_delay=purge_delay)
        if now:
            decisions = run.retention.apply()
            _print_decisions(decisions, "deleted", as_json=as_json)
            ends = _last_purge(run, decisions)
            if ends and not as_json:
                _print_when(time_text(ends))
        else:
            _print_policy(run, as_json=as_json)


def _print_policy(run: "Run", *, as_json: bool) -> None:
    from storesvc_client import format_policy

    info, kept = run.info(), run.retention.get()
    if as_json:
        text = format_policy(kept) if kept else None
        print_json(json_value(info) | {"retention": text})
    elif kept is None:
        print_note(f"{run.name} has no retention policy: all its checkpoints stay")
    else:
        click.echo(format_policy(kept))
        _print_when(_delay(run))


def _delay(run: "Run") -> str:
    from storesvc_client._views.texts import duration_text

    delay = run.info().purge_delay
    return "the server's purge delay" if delay is None else duration_text(delay)


def _last_purge(
    run: "Run", decisions: Sequence["RetentionDecision"]
) -> datetime | None:
    """Returns the latest purge time of the deleted checkpoints, if any."""
    if all(decision.kept for decision in decisions):
        return None
    damaged: list[Exception] = []  # named by ls
    ends = (
        c.purge_time for c in run.checkpoints(deleted=True, on_damage=damaged.append)
    )
    return max(filter(None, ends), default=None)


def _print_when(purged_after: str) -> None:
    """Prints when the space of deleted checkpoints becomes free."""
    print_note(
        f"deleted checkpoints are purged after {purged_after}, and the next collection "
        "frees their space; to free it at once: 'storectl rm RUN@STEP --purge', then "
        "'storectl gc --grace 0s'"
    )


def _print_decisions(
    decisions: Sequence["RetentionDecision"], done: str, *, as_json: bool
) -> None:
    if as_json:
        print_json(decisions)
        return
    if decisions:
        print_table(DECISIONS.columns, map(DECISIONS.row, decisions))
    deleted = [decision for decision in decisions if not decision.kept]
    own = size_text(sum(decision.own_bytes for decision in deleted))
    print_note(
        f"{done} {len(deleted):,} of {len(decisions):,} {plural('checkpoint')}, up to "
        f"{own}"
    )
