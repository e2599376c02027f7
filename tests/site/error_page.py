"""The page of the error reasons: causes of the contract, remedies of docs/errors.md.

docs/errors.md has a heading for each reason and, below it, what to do. The contract has
the cause and the status, its rpcs list where the reason is sent, and the client derives
the class that it raises. ``completed`` joins them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from storesvc_client.errors import error_class
from tests.site.contract_pages import REASONS, Links
from tests.site.proto_files import Method, ProtoFile

MANY: Final = 12
"""Calls that are counted instead of named."""

PREFIX: Final = "ERROR_REASON_"
_SECTION: Final = re.compile(
    r"^### (?P<name>[A-Z_]+)\n(?P<text>.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL
)
_COMMENT: Final = re.compile(r"`([A-Z_]+)`: (.+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """An error reason as the contract describes it."""

    name: str
    status: str
    cause: str
    methods: Sequence[str]
    """Names of the rpcs that list it, in the order of the contract."""


def remedies(page: str) -> dict[str, str]:
    """Returns the text below the heading of each reason of docs/errors.md."""
    return {found["name"]: found["text"].strip() for found in _SECTION.finditer(page)}


def reasons_of(files: Iterable[ProtoFile]) -> dict[str, Reason]:
    """Returns the reasons of the contract by name.

    Raises:
        ValueError: The comment of a reason does not begin with its status.
    """
    files = list(files)
    senders = _senders(files)
    (enum,) = (e for file in files for e in file.enums if e.name == REASONS)
    found = {}
    for value in enum.fields:
        name = value.name.removeprefix(PREFIX)
        if value.number == 0:
            continue
        comment = _COMMENT.fullmatch(value.comment)
        if comment is None:
            raise ValueError(
                f"errors.proto, {value.name}: expected a comment '`STATUS`: cause', "
                f"got {value.comment!r}"
            )
        found[name] = Reason(
            name=name,
            status=comment[1],
            cause=" ".join(comment[2].split()),
            methods=senders.get(name, []),
        )
    return found


def _senders(files: Iterable[ProtoFile]) -> dict[str, list[str]]:
    """Returns the rpcs that list each reason, themselves or as another rpc does."""
    methods = {
        method.name: method
        for file in files
        for service in file.services
        for method in service.methods
    }
    found: dict[str, list[str]] = {}
    for name in methods:
        for reason in _reasons(name, methods):
            found.setdefault(reason, []).append(name)
    return found


def _reasons(name: str, methods: Mapping[str, Method]) -> set[str]:
    method = methods[name]
    others = method.same_as() & methods.keys() - {name}
    return method.own_reasons().union(*(_reasons(other, methods) for other in others))


def completed(page: str, files: Sequence[ProtoFile]) -> str:
    """Returns docs/errors.md with status, class, cause and rpcs of each reason.

    Args:
        page: The text of docs/errors.md.
        files: The contract.

    Raises:
        ValueError: The page lacks a reason, or has one that the contract lacks.
    """
    reasons = reasons_of(files)
    links = Links(files, reasons)
    written = remedies(page)
    missing = [name for name in reasons if not written.get(name)]
    unknown = [name for name in written if name not in reasons]
    if missing or unknown:
        raise ValueError(
            f"docs/errors.md: expected a heading and what to do for each reason of "
            f"errors.proto; lacks {missing}, has in addition {unknown}"
        )

    return _SECTION.sub(
        lambda found: _section(reasons[found["name"]], found["text"].strip(), links),
        page,
    )


def _section(reason: Reason, remedy: str, links: Links) -> str:
    kind = error_class(reason.status, reason.name).__name__
    client = f"[`{kind}`](client/errors.md#storesvc_client.{kind})"
    cause = _from_root(links.of_text(reason.cause))
    parts = [
        f"### {reason.name}",
        f"**Cause:** {cause[:1].upper()}{cause[1:]}",
        f"**What to do:** {remedy}",
        f"Status `{reason.status}`, raised as {client}, {_sent(reason, links)}.",
    ]
    return "\n\n".join(parts) + "\n{ .sent }\n\n"


def _sent(reason: Reason, links: Links) -> str:
    if not reason.methods:
        return "sent by any call"
    if len(reason.methods) > MANY:
        return (
            f"sent by {len(reason.methods)} calls of the [contract](contract/index.md)"
        )
    return "sent by " + ", ".join(
        _from_root(links.of_text(name)) for name in reason.methods
    )


def _from_root(text: str) -> str:
    """Returns links of pages of the contract as links of a page next to its folder."""
    return re.sub(r"\]\((?!\.\./)", "](contract/", text).replace("](../errors.md", "](")
