"""Changes that the console offers: each is a value that a form describes.

A change has the storectl command that does the same, and passes on the etag of what the
user saw, so that it is rejected if another user changed that in the meantime. What the
store would reject anyhow is rejected before ``/change/ACTION`` asks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from storesvc.format.names import InvalidNameError, check_hold, check_tag
from storesvc_client import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    RetentionPolicy,
    Run,
    Tag,
    format_policy,
    parse_policy,
)
from storesvc_client._views.texts import count_text, size_text
from storesvc_client.console.rendering import (
    Crumb,
    Page,
    checkpoint_url,
    command,
    crumbs_to_run,
    run_url,
)
from storesvc_client.console.visit import Visit, parse_number

Fields: TypeAlias = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """State of the store that a change meets."""

    etag: str = ""
    """Version of what it changes; "" if there is none yet, or it has none."""
    remark: str = ""
    """Meaning of the change for it, in sentences; "" for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of one run or checkpoint."""

    run: str
    step: int | None = None
    """Step of the checkpoint; None: the change is of the run."""
    title: str
    """Question to the user."""
    verb: str
    """Text of the button."""
    effect: str
    """The effect of the change, in one sentence."""
    command: str
    """The storectl command that makes it."""
    look: Callable[[Run], Seen]
    """Reads what is there now; raises an error if the change is not possible."""
    apply: Callable[[Run], object]
    """Makes the change."""

    @property
    def address(self) -> str:
        """Page that shows it."""
        if self.step is None:
            return run_url(self.run)
        return checkpoint_url(self.run, self.step)


def parse_change(action: str, fields: Fields) -> Change:
    if action not in _CHANGES:
        raise InvalidRequestError(
            f"change: expected one of {', '.join(_CHANGES)}, got {action!r}; use a "
            "form of the console"
        )
    return _CHANGES[action](fields)


def _set_tag(fields: Fields) -> Change:
    name, step, etag = _text(fields, "run"), _step(fields), fields.get("etag", "")
    tag = _text(fields, "tag", check_tag)

    def look(run: Run) -> Seen:
        checkpoint = run.checkpoint(step)
        found, keepers = _find_tag(run, tag)
        if found is None:
            return Seen()
        if found.uid == checkpoint.uid:
            return Seen(etag=found.etag, remark="The tag names this checkpoint now.")
        rest = f"stays protected by {keepers}" if keepers else "loses its protection"
        remark = (
            f"The tag {tag} names step {found.step:,} now; it moves here, and step "
            f"{found.step:,} {rest}."
        )
        return Seen(etag=found.etag, remark=remark)

    def apply(run: Run) -> None:
        if not etag and any(one.name == tag for one in run.tags.list()):
            raise ConflictError(
                f"{name}: expected no tag {tag}, as the page showed, but "
                "another user has set it since; look at it, then decide again"
            )
        run.tags.set(tag, step, etag=etag or None)

    return Change(
        run=name,
        step=step,
        title=f"Set the tag {tag} on {name}@{step}?",
        verb="Set tag",
        effect="A tagged checkpoint is neither deleted nor dropped by a retention "
        "policy.",
        command=command("tag", f"{name}@{step}", tag),
        look=look,
        apply=apply,
    )


def _delete_tag(fields: Fields) -> Change:
    name, tag, etag = _text(fields, "run"), _text(fields, "tag"), fields.get("etag", "")

    def look(run: Run) -> Seen:
        found, keepers = _find_tag(run, tag)
        if found is None:
            run.checkpoint(tag)  # its error lists similar tags
            return Seen()
        rest = f"stays, protected by {keepers}" if keepers else "may then be deleted"
        return Seen(etag=found.etag, remark=f"Step {found.step:,} {rest}.")

    return Change(
        run=name,
        title=f"Delete the tag {tag} of {name}?",
        verb="Delete tag",
        effect="The checkpoint stays until a user or a retention policy deletes it.",
        command=command("tag", name, tag, "--delete"),
        look=look,
        apply=lambda run: run.tags.delete(tag, etag=etag or None),
    )


def _end_hold(fields: Fields) -> Change:
    name, hold = _text(fields, "run"), _text(fields, "hold", check_hold)
    return Change(
        run=name,
        title=f"End the hold {hold} of {name}?",
        verb="End hold",
        effect="Its reader may then fail, if the checkpoint is deleted and purged "
        "while it reads.",
        command=command("hold", name, "--delete", hold),
        look=lambda _: Seen(),  # to end a hold that is no more is no error
        apply=lambda run: run.holds.release(hold),
    )


def _set_pin(fields: Fields, *, pinned: bool) -> Change:
    name, step, etag = _text(fields, "run"), _step(fields), fields.get("etag", "")
    verb, flag = ("Pin", "--pin") if pinned else ("Unpin", "--unpin")
    return Change(
        run=name,
        step=step,
        title=f"{verb} {name}@{step}?",
        verb=verb,
        effect="A pinned checkpoint can be deleted by no user and no policy."
        if pinned
        else "It may then be deleted, also by the retention policy of the run.",
        command=command("update", f"{name}@{step}", flag),
        look=lambda run: Seen(etag=run.checkpoint(step).etag),
        apply=lambda run: run.update(step, pinned=pinned, etag=etag or None),
    )


def _set_label(fields: Fields) -> Change:
    name, step, etag = _text(fields, "run"), _step(fields), fields.get("etag", "")
    label, text = _text(fields, "label"), fields.get("text", "")
    path, verb = f"{name}@{step}", "Set" if text else "Remove"

    def look(run: Run) -> Seen:
        checkpoint = run.checkpoint(step)
        if label in checkpoint.labels:
            return Seen(
                etag=checkpoint.etag, remark=f"It is {checkpoint.labels[label]!r} now."
            )
        if not text:
            raise InvalidRequestError(
                f"{path} has no label {label!r} to remove; fill in a text to set it"
            )
        return Seen(etag=checkpoint.etag)

    def apply(run: Run) -> None:
        labels = dict(run.checkpoint(step).labels)
        labels.pop(label, None)
        if text:
            labels[label] = text
        run.update(step, labels=labels, etag=etag or None)

    return Change(
        run=name,
        step=step,
        title=f"{verb} the label {label} of {path}?",
        verb=f"{verb} label",
        effect="The other labels stay.",
        command=command("update", path, "--label", f"{label}={text}")
        if text
        else command("update", path, "--remove-label", label),
        look=look,
        apply=apply,
    )


def _delete(fields: Fields) -> Change:
    name, step, etag = _text(fields, "run"), _step(fields), fields.get("etag", "")
    uid, path = fields.get("uid", ""), f"{name}@{step}"

    def look(run: Run) -> Seen:
        checkpoint = run.checkpoint(step)
        tags = [one for one in run.tags.list() if one.step == step]
        if keepers := _keepers(run, step, tags):
            raise PreconditionError(
                f"{path} is kept by {keepers}; end that first, then delete it"
            )
        return Seen(etag=checkpoint.etag)

    return Change(
        run=name,
        step=step,
        title=f"Delete {path}?",
        verb="Delete",
        effect="It can be undeleted until the purge delay of the run has passed.",
        command=command("rm", path),
        look=look,
        apply=lambda run: run.delete(step, uid=uid or None, etag=etag or None),
    )


def _undelete(fields: Fields) -> Change:
    name, step, uid = _text(fields, "run"), _step(fields), fields.get("uid", "")
    return Change(
        run=name,
        step=step,
        title=f"Undelete {name}@{step}?",
        verb="Undelete",
        effect="It is in the list of the run again.",
        command=command("undelete", f"{name}@{step}"),
        look=lambda _: Seen(),  # the uid names the checkpoint
        apply=lambda run: run.undelete(step, uid=uid or None),
    )


def _set_policy(fields: Fields) -> Change:
    name, etag = _text(fields, "run"), fields.get("etag", "")
    text = fields.get("policy", "").strip()
    policy = parse_policy(text) if text else None
    return Change(
        run=name,
        title=f"{'Set' if policy else 'Remove'} the retention policy of {name}?",
        verb="Set policy" if policy else "Remove policy",
        effect=f"The server deletes the checkpoints that {text} does not keep: now, "
        "after each commit, and at each collection."
        if policy
        else "All its checkpoints stay.",
        command=command("retain", name, format_policy(policy) if policy else "--clear"),
        look=lambda run: (
            _look_at_policy(run, policy) if policy else Seen(etag=run.info().etag)
        ),
        apply=lambda run: run.retention.set(policy, etag=etag or None),
    )


def _apply_policy(fields: Fields) -> Change:
    name, etag = _text(fields, "run"), fields.get("etag", "")

    def apply(run: Run) -> None:
        if etag and run.info().etag != etag:
            raise ConflictError(
                f"{name}: expected the policy that the page showed, but another "
                "user has changed the run since; look at its policy, then decide again"
            )
        run.retention.apply()

    return Change(
        run=name,
        title=f"Apply the retention policy of {name} now?",
        verb="Apply policy",
        effect="Deletes the checkpoints that the policy does not keep. They can be "
        "undeleted until the purge delay of the run has passed.",
        command=command("retain", name, "--apply"),
        look=lambda run: _look_at_policy(run, None),
        apply=apply,
    )


def _look_at_policy(run: Run, policy: RetentionPolicy | None) -> Seen:
    """Returns what a policy would delete now; None: the policy of the run."""
    etag = run.info().etag
    decisions = run.retention.preview(policy)
    deleted = [one for one in decisions if not one.kept]
    freed = size_text(sum(one.own_bytes for one in deleted))
    counts = f"{len(deleted):,} of {count_text(len(decisions), 'checkpoint')}"
    return Seen(etag=etag, remark=f"Now that is {counts}, with {freed} of their own.")


def _find_tag(run: Run, name: str) -> tuple[Tag | None, str]:
    """Returns a tag, and what else protects its checkpoint from deletion."""
    tags = [*run.tags.list()]
    found = next((one for one in tags if one.name == name), None)
    if found is None:
        return None, ""
    others = [one for one in tags if one.uid == found.uid and one is not found]
    return found, _keepers(run, found.step, others)


def _keepers(run: Run, step: int, tags: Sequence[Tag]) -> str:
    """Returns what protects a checkpoint from deletion: its pin, and these tags."""
    try:
        pin = ["a pin"] if run.checkpoint(step).pinned else []
    except NotFoundError:  # a tag may outlive its checkpoint, and can be moved
        return ""
    return " and ".join([*pin, *(f"the tag {one.name}" for one in tags)])


def _text(
    fields: Fields, name: str, check: Callable[[str], None] = lambda _: None
) -> str:
    value = fields.get(name, "").strip()
    if not value:
        raise InvalidRequestError(f"{name}: expected a text, got none; fill it in")
    try:
        check(value)
    except InvalidNameError as e:
        raise InvalidRequestError(f"{e}; go back and correct it") from e
    return value


def _step(fields: Fields) -> int:
    text = fields.get("step", "")
    return parse_number("step", text, remedy="use a form of the console")


_CHANGES: Final[Mapping[str, Callable[[Fields], Change]]] = {
    "tag": _set_tag,
    "untag": _delete_tag,
    "end-hold": _end_hold,
    "pin": lambda fields: _set_pin(fields, pinned=True),
    "unpin": lambda fields: _set_pin(fields, pinned=False),
    "label": _set_label,
    "delete": _delete,
    "undelete": _undelete,
    "policy": _set_policy,
    "apply": _apply_policy,
}


_OWN: frozenset[str] = frozenset({"token", "json"})
"""Fields that no change has."""


def show_change(visit: Visit) -> Page:
    """Returns the question before a change; changes nothing."""
    action = visit.path["action"]
    change = parse_change(action, visit.query)
    seen = change.look(visit.client.run(change.run))
    fields = {**visit.query, "etag": visit.query.get("etag") or seen.etag}
    at = f"@{change.step}"
    crumbs = () if change.step is None else (Crumb(name=at, address=change.address),)
    return Page(
        template="change.html",
        title=change.title,
        document={
            "command": change.command,
            "effect": f"{change.effect} {seen.remark}".strip(),
        },
        command=change.command,
        crumbs=(*crumbs_to_run(change.run), *crumbs),
        values={
            "action": action,
            "change": change,
            "remark": seen.remark,
            "fields": {k: v for k, v in fields.items() if k not in _OWN},
        },
    )


def make_change(visit: Visit, fields: Mapping[str, str]) -> str:
    """Makes the change, and returns the address of the page that shows it."""
    change = parse_change(visit.path["action"], fields)
    change.apply(visit.client.run(change.run))
    return change.address
