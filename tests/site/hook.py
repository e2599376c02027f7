"""Adds the generated pages to a build of the site; ``mkdocs.yml`` names this module.

The documents of the repository stay where a reader of a checkout expects them; their
links are rewritten for the site.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tests.site.client_pages import client_pages
from tests.site.contract_pages import FOLDER, contract_pages
from tests.site.error_page import completed, reasons_of
from tests.site.html_pages import loaded_from_elsewhere, with_breaks
from tests.site.proto_files import ProtoFile, read_contract
from tests.site.repository_links import rewritten
from tests.site.storectl_page import storectl_page

ROOT: Final = Path(__file__).parents[2]
EXAMPLES: Final = ROOT / "deploy" / "examples"
RARE: Final = ("architecture.md", "benchmarks.md", "changelog.md", "guarantees.md")
"""Pages that a search shows after all others, as it does with the reference."""

DOCUMENTS: Final[Mapping[str, str]] = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "deploy/README.md": "deployment.md",
    "benchmarks/RESULTS.md": "benchmarks.md",
}
"""Documents outside of ``docs/``, and their pages."""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the generated pages, and replaces the links of the written ones."""
    try:
        contract = read_contract(ROOT / "proto")
        generated = _generated(contract)
        errors = (ROOT / "docs" / "errors.md").read_text()
        generated["errors.md"] = completed(errors, contract)
    except ValueError as e:
        raise PluginError(str(e)) from e
    for page, text in generated.items():
        found = files.get_file_from_path(page)
        if found is not None:
            files.remove(found)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(
    markdown: str, *, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Returns a page of ``docs/`` with links to other pages."""
    uri = page.file.src_uri
    if uri == "index.md":  # its tab has no other page
        page.meta["hide"] = ["navigation"]
    is_generated = page.file.generated_by is not None
    is_reference = is_generated and uri not in ("errors.md", *DOCUMENTS.values())
    boost = 0.02 if is_reference or uri in RARE else 0.2 if uri == "errors.md" else 1
    page.meta["search"] = {"boost": boost}
    if is_generated and uri != "errors.md":
        return markdown
    return rewritten(markdown, source=f"docs/{uri}", page=uri, pages=_pages(files))


def on_page_content(
    html: str, *, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Returns the contents of a page with breaks in long names."""
    return with_breaks(html)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Returns a page; rejects one that loads something from another host."""
    found = loaded_from_elsewhere(output)
    if found:
        raise PluginError(
            f"{page.file.dest_uri}: expected files of the site only, got {found}"
        )
    # the theme's dialog has no name, which screen readers need
    return output.replace(' role="dialog"', ' role="dialog" aria-label="Search"', 1)


def _generated(contract: list[ProtoFile]) -> dict[str, str]:
    pages = contract_pages(contract, reasons_of(contract))
    pages |= client_pages()
    pages["reference/storectl.md"] = storectl_page()
    pages |= _examples()
    known = _known_pages()
    for document, page in DOCUMENTS.items():
        text = (ROOT / document).read_text()
        pages[page] = rewritten(text, source=document, page=page, pages=known)
    return pages


def _examples() -> dict[str, str]:
    """Returns a page with each script of ``deploy/examples``."""
    pages = {}
    rows = []
    for path in sorted(EXAMPLES.glob("*.py")):
        pages[f"examples/{path.stem}.md"] = (
            f"# {path.name}\n\n`{path.relative_to(ROOT)}`\n\n"
            f"```python\n{path.read_text()}```\n"
        )
        summary = path.read_text().split('"""')[1].strip().partition("\n")[0]
        rows.append(f"| [{path.name}]({path.stem}.md) | {summary} |")
    table = "\n".join(["| script | what it does |", "|---|---|", *rows])
    pages["examples/index.md"] = (
        f"# Examples\n\nWhole training scripts; tests run each of them.\n\n{table}\n"
    )
    return pages


def _known_pages() -> dict[str, str]:
    """Returns the page of each place of the repository, as far as names show it."""
    known = {f"docs/{path.name}": path.name for path in (ROOT / "docs").iterdir()}
    known |= DOCUMENTS
    known["README.md"] = "index.md"
    known["deploy/examples"] = "examples/index.md"
    known["proto/storesvc/v1"] = f"{FOLDER}/index.md"
    for path in (ROOT / "proto" / "storesvc" / "v1").glob("*.proto"):
        known[str(path.relative_to(ROOT))] = f"{FOLDER}/{path.stem}.md"
    for path in EXAMPLES.glob("*.py"):
        known[str(path.relative_to(ROOT))] = f"examples/{path.stem}.md"
    return known


def _pages(files: Files) -> dict[str, str]:
    known = _known_pages()
    known |= {f"docs/{file.src_uri}": file.src_uri for file in files}
    return known
