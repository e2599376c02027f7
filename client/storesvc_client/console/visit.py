"""A visit: what the function of a page gets."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from storesvc.format.names import InvalidNameError, Which, parse_which
from storesvc_client import Client, InvalidRequestError, Run
from storesvc_client.console.event_feeds import EventFeeds
from storesvc_client.console.opened import OpenedCheckpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One request of a browser."""

    client: Client
    opened: OpenedCheckpoints
    feeds: EventFeeds
    now: datetime
    """Time of the request, in UTC."""
    path: Mapping[str, str]
    """Parts of the address."""
    query: Mapping[str, str]
    """Values of the query."""

    @property
    def run(self) -> Run:
        """The run that the address names.

        Raises:
            InvalidRequestError: No run could have this name.
        """
        run, _, _ = self.path["name"].partition("@")
        return self.client.run(f"{self.path['namespace']}/{run}")

    @property
    def which(self) -> Which:
        """The step or the tag that the address names.

        Raises:
            InvalidRequestError: It is neither a step nor a tag.
        """
        _, _, text = self.path["name"].partition("@")
        return which_of(text)

    def permissions(self) -> frozenset[str]:
        """Returns what the user may do on the run of the address.

        A page leaves out the changes that the server would deny; the server decides.
        """
        return frozenset(self.client.test_permissions(self.run.name))

    @property
    def wants_whole(self) -> bool:
        """True if the page waits for all there is, as its document always does."""
        return "whole" in self.query or "json" in self.query

    def number(self, name: str) -> int:
        """Returns a number of the query, 0 if it is absent.

        Raises:
            InvalidRequestError: It is no number of at least 0.
        """
        text = self.query.get(name, "") or "0"
        return number_of(name, text, remedy="correct the address")


def number_of(name: str, text: str, *, remedy: str) -> int:
    """Returns a number that a browser has sent.

    Args:
        name: Name of its field.
        text: The number as text.
        remedy: What to do about another text.

    Raises:
        InvalidRequestError: It is no number of at least 0.
    """
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise InvalidRequestError(
            f"{name}: expected a number of 0 or more, got {text!r}; {remedy}"
        )
    return int(text)


def which_of(text: str) -> Which:
    """Returns a step, "latest" or a tag.

    Raises:
        InvalidRequestError: It is none of them.
    """
    try:
        return parse_which(text)
    except InvalidNameError as e:
        raise InvalidRequestError(f"{e}; correct the address") from e


def checkpoint_path(text: str) -> tuple[str, Which]:
    """Returns the run and the step or tag of ``namespace/run@step``.

    Raises:
        InvalidRequestError: It is no path of a checkpoint.
    """
    run, at, which = text.strip().partition("@")
    if not at:
        raise InvalidRequestError(
            f"expected a checkpoint, such as prod/llama-8b@500, got {text!r}; name one"
        )
    return run, which_of(which)
