"""Changes that the console offers: each is a value that a form describes.

A change has the storectl command that does the same, and passes on the etag of what the
user saw, so that it is rejected if another user changed that in the meantime.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from storesvc_client import (
    Client,
    ConflictError,
    InvalidRequestError,
    format_policy,
    parse_policy,
)
from storesvc_client.console.addresses import checkpoint_url, command, run_url
from storesvc_client.console.visit import number_of

Fields: TypeAlias = Mapping[str, str]


class Change(Protocol):
    """A change of one run or checkpoint."""

    @property
    def title(self) -> str:
        """Question to the user."""

    @property
    def effect(self) -> str:
        """The effect of the change, in one sentence."""

    @property
    def command(self) -> str:
        """The storectl command that makes it."""

    @property
    def address(self) -> str:
        """Page that shows it."""

    def with_etag(self, client: Client) -> dict[str, str]:
        """Returns the fields that a form lacks: the etag of what is there now."""

    def apply(self, client: Client) -> None:
        """Makes the change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfRun:
    run: str

    @property
    def address(self) -> str:
        """Page of the run."""
        return run_url(self.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfCheckpoint:
    run: str
    step: int
    etag: str

    @property
    def path(self) -> str:
        """Name of the checkpoint."""
        return f"{self.run}@{self.step}"

    @property
    def address(self) -> str:
        """Page of the checkpoint."""
        return checkpoint_url(self.run, self.step)

    def with_etag(self, client: Client) -> dict[str, str]:
        """Returns the etag of the checkpoint, unless the page had it."""
        if self.etag:
            return {"etag": self.etag}
        return {"etag": client.run(self.run).checkpoint(self.step).etag}


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTag(_OfCheckpoint):
    """Sets a tag, or moves it."""

    tag: str

    @property
    def title(self) -> str:
        """Question to the user."""
        return f"Set the tag {self.tag} on {self.path}?"

    @property
    def effect(self) -> str:
        """The effect of the change."""
        return (
            "A tagged checkpoint is neither deleted nor dropped by a retention policy. "
            "If the tag exists, it moves here."
        )

    @property
    def command(self) -> str:
        """The storectl command."""
        return command("tag", self.path, self.tag)

    def with_etag(self, client: Client) -> dict[str, str]:
        """Returns the etag of the tag; "" if there is no such tag."""
        return {"etag": _tag_etag(client, self.run, self.tag)}

    def apply(self, client: Client) -> None:
        """Sets the tag."""
        tags = client.run(self.run).tags
        if not self.etag and _tag_etag(client, self.run, self.tag):
            raise ConflictError(
                f"{self.run}: expected no tag {self.tag}, as the page showed, but "
                "another user has set it since; look at it, then decide again"
            )
        tags.set(self.tag, self.step, etag=self.etag or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteTag(_OfRun):
    """Deletes a tag."""

    tag: str
    etag: str

    @property
    def title(self) -> str:
        """Question to the user."""
        return f"Delete the tag {self.tag} of {self.run}?"

    @property
    def effect(self) -> str:
        """The effect of the change."""
        return "Its checkpoint stays, and may then be deleted by a retention policy."

    @property
    def command(self) -> str:
        """The storectl command."""
        return command("tag", self.run, self.tag, "--delete")

    def with_etag(self, client: Client) -> dict[str, str]:
        """Returns the etag of the tag."""
        return {"etag": self.etag or _tag_etag(client, self.run, self.tag)}

    def apply(self, client: Client) -> None:
        """Deletes the tag."""
        client.run(self.run).tags.delete(self.tag, etag=self.etag or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndHold(_OfRun):
    """Ends a hold, of any process."""

    hold: str

    @property
    def title(self) -> str:
        """Question to the user."""
        return f"End the hold {self.hold} of {self.run}?"

    @property
    def effect(self) -> str:
        """The effect of the change."""
        return (
            "Its reader may then fail, if the checkpoint is deleted and purged while "
            "it reads."
        )

    @property
    def command(self) -> str:
        """The storectl command."""
        return command("hold", self.run, "--delete", self.hold)

    def with_etag(self, client: Client) -> dict[str, str]:  # noqa: ARG002
        """Returns no etag: holds have none."""
        return {}

    def apply(self, client: Client) -> None:
        """Ends the hold."""
        client.run(self.run).holds.release(self.hold)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPin(_OfCheckpoint):
    """Pins a checkpoint, or ends that."""

    pinned: bool

    @property
    def title(self) -> str:
        """Question to the user."""
        return f"{'Pin' if self.pinned else 'Unpin'} {self.path}?"

    @property
    def effect(self) -> str:
        """The effect of the change."""
        if self.pinned:
            return "A pinned checkpoint can be deleted by no user and no policy."
        return "It may then be deleted, also by the retention policy of the run."

    @property
    def command(self) -> str:
        """The storectl command."""
        return command("update", self.path, "--pin" if self.pinned else "--unpin")

    def apply(self, client: Client) -> None:
        """Sets the pin."""
        client.run(self.run).update(
            self.step, pinned=self.pinned, etag=self.etag or None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLabel(_OfCheckpoint):
    """Sets a label, or removes it."""

    label: str
    text: str
    """Text of the label; "" removes it."""

    @property
    def title(self) -> str:
        """Question to the user."""
        verb = "Set" if self.text else "Remove"
        return f"{verb} the label {self.label} of {self.path}?"

    @property
    def effect(self) -> str:
        """The effect of the change."""
        return "The other labels stay."

    @property
    def command(self) -> str:
        """The storectl command."""
        if self.text:
            return command("update", self.path, "--label", f"{self.label}={self.text}")
        return command("update", self.path, "--remove-label", self.label)

    def apply(self, client: Client) -> None:
        """Sets the label."""
        run = client.run(self.run)
        labels = dict(run.checkpoint(self.step).labels)
        labels.pop(self.label, None)
        if self.text:
            labels[self.label] = self.text
        run.update(self.step, labels=labels, etag=self.etag or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete(_OfCheckpoint):
    """Deletes a checkpoint."""

    uid: str

    @property
    def title(self) -> str:
        """Question to the user."""
        return f"Delete {self.path}?"

    @property
    def effect(self) -> str:
        """The effect of the change."""
        return "It can be undeleted until the purge delay of the run has passed."

    @property
    def command(self) -> str:
        """The storectl command."""
        return command("rm", self.path)

    def apply(self, client: Client) -> None:
        """Deletes the checkpoint."""
        client.run(self.run).delete(
            self.step, uid=self.uid or None, etag=self.etag or None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Undelete(_OfCheckpoint):
    """Reverts the deletion of a checkpoint."""

    uid: str

    @property
    def title(self) -> str:
        """Question to the user."""
        return f"Undelete {self.path}?"

    @property
    def effect(self) -> str:
        """The effect of the change."""
        return "It is in the list of the run again."

    @property
    def command(self) -> str:
        """The storectl command."""
        return command("undelete", self.path)

    def with_etag(self, client: Client) -> dict[str, str]:  # noqa: ARG002
        """Returns no etag: the uid names the checkpoint."""
        return {}

    def apply(self, client: Client) -> None:
        """Reverts the deletion."""
        client.run(self.run).undelete(self.step, uid=self.uid or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPolicy(_OfRun):
    """Sets the retention policy of a run, or removes it."""

    policy: str
    """Text of the policy; "" removes it."""
    etag: str

    @property
    def title(self) -> str:
        """Question to the user."""
        if not self.policy:
            return f"Remove the retention policy of {self.run}?"
        return f"Set the retention policy of {self.run}?"

    @property
    def effect(self) -> str:
        """The effect of the change."""
        if not self.policy:
            return "All its checkpoints stay."
        return (
            "The server deletes the checkpoints that the policy does not keep: now, "
            "after each commit, and at each collection."
        )

    @property
    def command(self) -> str:
        """The storectl command."""
        return command("retain", self.run, self.policy or "--clear")

    def with_etag(self, client: Client) -> dict[str, str]:
        """Returns the etag of the run."""
        return {"etag": self.etag or client.run(self.run).info().etag}

    def apply(self, client: Client) -> None:
        """Sets the policy."""
        policy = parse_policy(self.policy) if self.policy else None
        client.run(self.run).retention.set(policy, etag=self.etag or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyPolicy(_OfRun):
    """Deletes now what the retention policy of a run does not keep."""

    etag: str
    """Etag of the run, whose policy the user saw."""

    @property
    def title(self) -> str:
        """Question to the user."""
        return f"Apply the retention policy of {self.run} now?"

    @property
    def effect(self) -> str:
        """The effect of the change."""
        return (
            "Deletes the checkpoints that the policy does not keep. They can be "
            "undeleted until the purge delay of the run has passed."
        )

    @property
    def command(self) -> str:
        """The storectl command."""
        return command("retain", self.run, "--apply")

    def with_etag(self, client: Client) -> dict[str, str]:
        """Returns the etag of the run."""
        return {"etag": self.etag or client.run(self.run).info().etag}

    def apply(self, client: Client) -> None:
        """Applies the policy."""
        run = client.run(self.run)
        if self.etag and run.info().etag != self.etag:
            raise ConflictError(
                f"{self.run}: expected the policy that the page showed, but another "
                "user has changed the run since; look at its policy, then decide again"
            )
        run.retention.apply()


def change_of(action: str, fields: Fields) -> Change:
    """Returns the change that a form describes.

    Raises:
        InvalidRequestError: There is no such change, or a field is not valid.
    """
    if action not in _CHANGES:
        raise InvalidRequestError(
            f"change: expected one of {', '.join(_CHANGES)}, got {action!r}; use a "
            "form of the console"
        )
    return _CHANGES[action](fields)


def _tag_etag(client: Client, run: str, name: str) -> str:
    return next((t.etag for t in client.run(run).tags.list() if t.name == name), "")


def _text(fields: Fields, name: str) -> str:
    value = fields.get(name, "").strip()
    if not value:
        raise InvalidRequestError(f"{name}: expected a text, got none; fill it in")
    return value


def _step(fields: Fields) -> int:
    text = fields.get("step", "")
    return number_of("step", text, remedy="use a form of the console")


def _policy(fields: Fields) -> str:
    """Returns the policy as it is usually written; "" for none."""
    text = fields.get("policy", "").strip()
    return format_policy(parse_policy(text)) if text else ""


_CHANGES: Final[Mapping[str, Callable[[Fields], Change]]] = {
    "tag": lambda f: SetTag(
        run=_text(f, "run"),
        step=_step(f),
        etag=f.get("etag", ""),
        tag=_text(f, "tag"),
    ),
    "untag": lambda f: DeleteTag(
        run=_text(f, "run"), tag=_text(f, "tag"), etag=f.get("etag", "")
    ),
    "end-hold": lambda f: EndHold(run=_text(f, "run"), hold=_text(f, "hold")),
    "pin": lambda f: SetPin(
        run=_text(f, "run"), step=_step(f), etag=f.get("etag", ""), pinned=True
    ),
    "unpin": lambda f: SetPin(
        run=_text(f, "run"), step=_step(f), etag=f.get("etag", ""), pinned=False
    ),
    "label": lambda f: SetLabel(
        run=_text(f, "run"),
        step=_step(f),
        etag=f.get("etag", ""),
        label=_text(f, "label"),
        text=f.get("text", ""),
    ),
    "delete": lambda f: Delete(
        run=_text(f, "run"),
        step=_step(f),
        etag=f.get("etag", ""),
        uid=f.get("uid", ""),
    ),
    "undelete": lambda f: Undelete(
        run=_text(f, "run"),
        step=_step(f),
        etag="",
        uid=f.get("uid", ""),
    ),
    "policy": lambda f: SetPolicy(
        run=_text(f, "run"), policy=_policy(f), etag=f.get("etag", "")
    ),
    "apply": lambda f: ApplyPolicy(run=_text(f, "run"), etag=f.get("etag", "")),
}
