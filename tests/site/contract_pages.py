"""Pages of the contract: a page for each .proto file, from its comments."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from tests.site.proto_files import Declaration, Method, ProtoFile, Service

FOLDER: Final = "contract"
REASONS: Final = "ErrorReason"
"""The enum of the error reasons, which have a page of their own."""

TITLES: Final[Mapping[str, str]] = {
    "checkpoint_service": "Checkpoints",
    "upload_service": "Uploads",
    "chunk_service": "Chunks",
    "maintenance_service": "Maintenance",
    "access_service": "Access",
    "tree": "Trees and manifests",
    "retention": "Retention policies",
    "report": "Reports",
    "bucket": "Objects in the bucket",
    "errors": "Error details",
}
"""Title of the page of each file, in the order of the list of pages."""

_LIST_ITEM: Final = re.compile(r"(?:[*-]|\d+\.) ")
_CODE: Final = re.compile(r"(`[^`\n]+`)")


class Links:
    """Turns the names of reasons, messages and rpcs in a comment into links."""

    def __init__(self, files: Iterable[ProtoFile], reasons: Iterable[str]) -> None:
        self._targets = {reason: f"../errors.md#{reason.lower()}" for reason in reasons}
        self._methods: dict[str, str] = {}
        for file in files:
            for declaration in (*file.messages, *file.enums):
                self._targets[declaration.name] = f"{file.name}.md#{declaration.name}"
            for service in file.services:
                for method in service.methods:
                    self._methods[method.name] = f"{file.name}.md#{method.name}"

    def of_type(self, name: str) -> str:
        """Returns a type of a field or an rpc as Markdown."""
        words = re.split(r"([\w.]+)", name)
        return "".join(self._linked(word) if word else "" for word in words)

    def _linked(self, word: str) -> str:
        target = self._targets.get(word)
        return f"[{word}]({target})" if target else word.replace("<", "&lt;")

    def of_text(self, text: str) -> str:
        """Returns the text with links; blocks of code stay as they are written."""
        lines = [
            line if line.startswith("    ") else self._of_line(line)
            for line in text.split("\n")
        ]
        return "\n".join(lines)

    def _of_line(self, line: str) -> str:
        pieces = []
        for piece in _CODE.split(line):
            if piece.startswith("`"):
                target = self._targets.get(piece.strip("`"))
                pieces.append(f"[{piece}]({target})" if target else piece)
            else:
                pieces.append(re.sub(r"\b[A-Z]\w+\b", self._method, piece))
        return "".join(pieces)

    def _method(self, found: re.Match[str]) -> str:
        target = self._methods.get(found[0])
        return f"[{found[0]}]({target})" if target else found[0]


def markdown_of(comment: str) -> str:
    """Returns a comment as Markdown, in which a blank line precedes each list."""
    lines: list[str] = []
    for line in comment.splitlines():
        before = lines[-1] if lines else ""
        is_within_list = bool(_LIST_ITEM.match(before)) or before.startswith(" ")
        if _LIST_ITEM.match(line) and before and not is_within_list:
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def contract_pages(
    files: Sequence[ProtoFile], reasons: Iterable[str]
) -> dict[str, str]:
    """Returns the Markdown of each page, by its path in the site.

    Raises:
        ValueError: A file of the contract has no title here.
    """
    links = Links(files, reasons)
    by_name = {file.name: file for file in files}
    if by_name.keys() != TITLES.keys():
        raise ValueError(
            f"expected titles of {sorted(by_name)} in {__name__}, got {sorted(TITLES)}"
        )
    pages = {
        f"{FOLDER}/{name}.md": "\n\n".join(_page(by_name[name], links))
        for name in TITLES
    }
    return {f"{FOLDER}/index.md": "\n\n".join(_index(by_name, links)), **pages}


def _index(by_name: Mapping[str, ProtoFile], links: Links) -> Iterator[str]:
    yield "# Contract"
    yield (
        "The contract is the specification of the wire and of every object in the "
        "bucket, in `proto/storesvc/v1`. These pages are generated from its comments. "
        "MUST, SHOULD and MAY are meant as in RFC 2119."
    )
    rows = [
        f"| {links.of_text(method.name)} | {_first_sentence(method, links)} |"
        for name in TITLES
        for service in by_name[name].services
        for method in service.methods
    ]
    yield "\n".join(["| rpc | |", "|---|---|", *rows])
    others = [
        f"- [{TITLES[name]}]({name}.md): `{name}.proto`"
        for name in TITLES
        if not by_name[name].services
    ]
    yield "Files without calls:"
    yield "\n".join(others)


def _first_sentence(method: Method, links: Links) -> str:
    text = " ".join(method.comment.partition("\n\n")[0].split())
    return links.of_text(re.split(r"(?<=\.) ", text)[0])


def _page(file: ProtoFile, links: Links) -> Iterator[str]:
    yield f"# {TITLES[file.name]}"
    yield f"`proto/storesvc/v1/{file.name}.proto`"
    yield links.of_text(markdown_of(file.comment))
    for service in file.services:
        yield from _service(service, links)
    if file.messages:
        yield "## Messages"
        for message in file.messages:
            yield from _declaration(message, links)
    if file.enums:
        yield "## Enums"
        for enum in file.enums:
            if enum.name == REASONS:
                yield f"### {REASONS} {{ #{REASONS} }}"
                yield enum.comment
                yield "[Errors](../errors.md) describes each of them."
            else:
                yield from _declaration(enum, links)


def _service(service: Service, links: Links) -> Iterator[str]:
    yield f"## {service.name}"
    yield links.of_text(markdown_of(service.comment))
    for method in service.methods:
        yield f"### {method.name} {{ #{method.name} }}"
        request, response = map(links.of_type, (method.request, method.response))
        yield f"{method.name}({request}) returns ({response})\n{{ .rpc }}"
        yield links.of_text(markdown_of(method.comment))


def _declaration(declaration: Declaration, links: Links) -> Iterator[str]:
    yield f"### {declaration.name} {{ #{declaration.name} }}"
    yield links.of_text(markdown_of(declaration.comment))
    if not declaration.fields:
        yield "No fields."
        return
    has_types = any(field.type for field in declaration.fields)
    header = "| field | type | number | meaning |\n|---|---|---|---|"
    rows = [header if has_types else "| value | number | meaning |\n|---|---|---|"]
    for field in declaration.fields:
        meaning = _in_a_cell(links.of_text(field.comment))
        kind = f"{links.of_type(field.type)} | " if has_types else ""
        rows.append(f"| `{field.name}` | {kind}{field.number} | {meaning} |")
    yield "\n".join(rows)


def _in_a_cell(text: str) -> str:
    """Returns a comment as one line; paragraphs and items of lists become lines."""
    paragraphs = re.split(r"\n\n+|\n(?=[*-] )", text)
    joined = "<br>".join(" ".join(part.split()) for part in paragraphs)
    return joined.replace("|", "\\|")
