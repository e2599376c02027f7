"""The pages that the documentation site generates from the code and the contract."""

import hashlib
import inspect
import re
from pathlib import Path

import pytest

import storesvc_client
from storesvc.errors import StoreError
from storesvc_client.cli import main
from storesvc_client.cli.group import COMMANDS
from storesvc_proto.v1 import errors_pb2 as pb
from tests.rpc.test_errors import subclasses
from tests.site.client_pages import CLIENT, MODELS, client_pages, page_of
from tests.site.contract_pages import contract_pages, markdown_of
from tests.site.error_page import PREFIX, completed, reasons_of, remedies
from tests.site.griffe_extensions import fenced
from tests.site.html_pages import loaded_from_elsewhere, with_breaks
from tests.site.proto_files import ProtoFile, read_contract
from tests.site.repository_links import rewritten
from tests.site.storectl_page import storectl_page

ROOT = Path(__file__).parents[2]
PROTO = ROOT / "proto"
ERRORS = ROOT / "docs" / "errors.md"

with_contract = pytest.mark.skipif(
    not (PROTO / "storesvc").exists(), reason="the wheel has generated code only"
)

GUIDE = "../deploy/README.md"
"""Link to the page deployment.md of the site."""

SHIM_SHA256 = "e8e412dbcfea9b7e31b5ffa288d7b6035915e714c542f4176a0cdbe262fc9609"
"""Digest of iframe-worker 1.0.4, shim/index.js, as npm has it."""

SAMPLE = """
// Why.

syntax = "proto3";

package storesvc.v1;

// The cause.
enum ErrorReason {
  // None.
  ERROR_REASON_UNSPECIFIED = 0;
  // `NOT_FOUND`: the run
  // does not exist.
  ERROR_REASON_RUN_NOT_FOUND = 1;
  // `ABORTED`: another call won.
  ERROR_REASON_CONFLICT = 2;
}

// Calls.
service RunService {
  // Returns a run.
  //
  // Errors:
  // * `RUN_NOT_FOUND`: metadata
  //   `nearest` has names.
  rpc GetRun(GetRunRequest) returns (Run);
  // Streams runs, as GetRun does.
  //
  // Errors:
  // * As GetRun; `CONFLICT`.
  rpc WatchRuns(stream GetRunRequest) returns (stream Run);
}

// A request.
message GetRunRequest {
  // Name of the run.
  string name = 1;
}

// A run.
message Run {
  // The kind of a run.
  enum Kind {
    KIND_UNSPECIFIED = 0;
  }
  // Part of a run.
  message Part {}
  // Labels, `a|b`.
  map<string, string> labels = 1;
  // Its parts.
  repeated Part parts = 2;
}
"""


@pytest.fixture
def sample(tmp_path: Path) -> ProtoFile:
    """A contract of one file."""
    folder = tmp_path / "storesvc" / "v1"
    folder.mkdir(parents=True)
    (folder / "errors.proto").write_text(SAMPLE)
    (found,) = read_contract(tmp_path)
    return found


def test_a_file_is_read_with_its_comments(sample: ProtoFile) -> None:
    (service,) = sample.services
    get, watch = service.methods
    request, run, part = sample.messages
    labels, parts = run.fields

    assert "Why." == sample.comment
    assert "Calls." == service.comment
    assert ("GetRunRequest", "Run") == (get.request, get.response)
    assert ("stream GetRunRequest", "stream Run") == (watch.request, watch.response)
    assert "Name of the run." == request.fields[0].comment
    assert ("map<string, string>", 1) == (labels.type, labels.number)
    assert "repeated Run.Part" == parts.type
    assert ("Run.Part", "Part of a run.") == (part.name, part.comment)
    assert ["ErrorReason", "Run.Kind"] == [enum.name for enum in sample.enums]


def test_a_broken_contract_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "broken.proto").write_text("message {")

    with pytest.raises(ValueError, match="protoc rejects it"):
        read_contract(tmp_path)


def test_a_reason_has_the_rpcs_that_list_it_or_refer_to_one_that_does(
    sample: ProtoFile,
) -> None:
    found = reasons_of([sample])

    assert ["RUN_NOT_FOUND", "CONFLICT"] == [*found]
    assert "the run does not exist." == found["RUN_NOT_FOUND"].cause
    assert "NOT_FOUND" == found["RUN_NOT_FOUND"].status
    assert ["GetRun", "WatchRuns"] == found["RUN_NOT_FOUND"].methods
    assert ["WatchRuns"] == found["CONFLICT"].methods


def test_a_reason_without_a_cause_is_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "storesvc" / "v1"
    folder.mkdir(parents=True)
    (folder / "errors.proto").write_text(
        SAMPLE.replace("`ABORTED`: another", "Another")
    )

    with pytest.raises(ValueError, match="ERROR_REASON_CONFLICT"):
        reasons_of(read_contract(tmp_path))


def test_the_page_of_errors_has_cause_status_class_and_remedy(
    sample: ProtoFile,
) -> None:
    page = "### RUN_NOT_FOUND\n\nCorrect it.\n\n## B\n\n### CONFLICT\n\nRetry.\n"

    text = completed(page, [sample])

    assert (
        "### RUN_NOT_FOUND\n\n"
        "**Cause:** The run does not exist.\n\n"
        "**What to do:** Correct it.\n\n"
        "Status `NOT_FOUND`, raised as "
        "[`NotFoundError`](client/errors.md#storesvc_client.NotFoundError), sent by "
        "[GetRun](contract/errors.md#GetRun), "
        "[WatchRuns](contract/errors.md#WatchRuns).\n{ .sent }\n\n"
        "## B\n\n"
    ) in text
    assert "**What to do:** Retry.\n" in text


@pytest.mark.parametrize(
    ("page", "named"),
    [
        ("### RUN_NOT_FOUND\n\nCorrect it.\n", "CONFLICT"),
        ("### RUN_NOT_FOUND\n\n## B\n\n### CONFLICT\n\nRetry.\n", "RUN_NOT_FOUND"),
        ("### RUN_NOT_FOUND\n\nA.\n\n### CONFLICT\n\nB.\n\n### OLD\n\nC.\n", "OLD"),
    ],
)
def test_a_page_of_errors_that_lacks_or_invents_a_reason_is_rejected(
    sample: ProtoFile, page: str, named: str
) -> None:
    with pytest.raises(ValueError, match=rf"\['{named}'\]"):
        completed(page, [sample])


def test_each_reason_has_a_text_about_what_to_do() -> None:
    reasons = [name.removeprefix(PREFIX) for name in pb.ErrorReason.keys()[1:]]
    written = remedies(ERRORS.read_text())

    assert sorted(reasons) == sorted(written)
    assert [] == [name for name, text in written.items() if len(text.split()) < 5]


@with_contract
def test_each_reason_has_a_cause_in_the_contract() -> None:
    found = reasons_of(read_contract(PROTO))

    assert {e.reason: e.code for e in subclasses(StoreError)} == {
        name: reason.status for name, reason in found.items()
    }
    assert [] == [name for name, r in found.items() if len(r.cause.split()) < 4]
    assert "**What to do:**" in completed(ERRORS.read_text(), read_contract(PROTO))


@with_contract
def test_the_pages_of_the_contract_have_every_rpc_message_and_field() -> None:
    files = read_contract(PROTO)
    pages = contract_pages(files, reasons_of(files))

    for file in files:
        text = pages[f"contract/{file.name}.md"]
        for service in file.services:
            for method in service.methods:
                assert f"{{ #{method.name} }}" in text
                assert f"[{method.name}](" in pages["contract/index.md"]
                assert "Idempotent" in method.comment or "idempotent" in method.comment
        for message in file.messages:
            assert f"{{ #{message.name} }}" in text
            assert [] == [f.name for f in message.fields if f"`{f.name}`" not in text]


@with_contract
def test_every_link_of_the_contract_leads_to_a_heading() -> None:
    files = read_contract(PROTO)
    pages = contract_pages(files, reasons_of(files))
    headings = {
        name: set(re.findall(r"\{ #(\S+) \}", text)) for name, text in pages.items()
    }
    headings["errors.md"] = {name.lower() for name in remedies(ERRORS.read_text())}

    links = [
        link for text in pages.values() for link in re.findall(r"\]\(([^\s)]+)\)", text)
    ]
    assert len(links) > 300
    for link in links:
        page, _, heading = link.partition("#")
        place = (
            page.removeprefix("../") if page.startswith("..") else f"contract/{page}"
        )
        assert not heading or heading in headings[place], link


def test_a_list_of_a_comment_is_a_list_in_markdown() -> None:
    comment = "Errors:\n* `A`: one\n  and more.\n* `B`.\n\n    code\n    * no item"

    assert (
        "Errors:\n\n* `A`: one\n  and more.\n* `B`.\n\n    code\n    * no item"
    ) == markdown_of(comment)


def test_the_reference_has_every_public_name_of_the_client_once() -> None:
    names = [name for group in CLIENT.values() for name in group]

    assert sorted(dir(storesvc_client)) == sorted(names)
    for title, group in CLIENT.items():
        lines = client_pages()[page_of(title)].splitlines()
        assert [f"::: storesvc_client.{name}" for name in group] == lines[
            2 : 2 + 2 * len(group) : 2
        ]


@pytest.mark.parametrize("module", MODELS)
def test_the_reference_has_every_public_name_of_a_module_for_models(
    module: str,
) -> None:
    source = Path(inspect.getfile(storesvc_client)).parent
    path = source.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = re.search(r"__all__ = \[(.*?)\]", file.read_text(), re.DOTALL)

    assert found is not None
    assert sorted(re.findall(r'"(\w+)"', found[1])) == sorted(MODELS[module])


def test_the_reference_of_storectl_has_every_command_and_option() -> None:
    page = storectl_page()

    for name in COMMANDS:
        assert f"{{ #storectl-{name} }}" in page
    for parameter in main.params:
        assert parameter.opts[-1] in page
    assert "{ #storectl-config-set }" in page
    assert max(len(line) for line in page.splitlines() if line.startswith(" ")) <= 100


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("[a](saving.md#items)", "[a](saving.md#items)"),
        ("[a](../README.md)", "[a](index.md)"),
        ("[a](../README.md#why)", "[a](index.md#why)"),
        ("[`x.py`](../deploy/examples/x.py)", "[`x.py`](examples/x.md)"),
        ("[a](../tests/x.py) and [b](#c)", "a and [b](#c)"),
        ("[a](https://host/x)", "[a](https://host/x)"),
        ("![a](life.svg)", "![a](life.svg)"),
        ("```text\n[a](../tests/x.py)\n```", "```text\n[a](../tests/x.py)\n```"),
        ("`[lending]` [`[x]`](saving.md)", "`[lending]` [`[x]`](saving.md)"),
    ],
)
def test_links_of_a_checkout_become_links_of_the_site(
    markdown: str, expected: str
) -> None:
    pages = {
        "README.md": "index.md",
        "docs/saving.md": "saving.md",
        "docs/life.svg": "life.svg",
        "deploy/examples/x.py": "examples/x.md",
    }

    assert expected == rewritten(
        markdown, source="docs/page.md", page="page.md", pages=pages
    )


def test_links_of_a_page_in_a_folder_are_relative_to_it() -> None:
    pages = {"docs/saving.md": "saving.md"}

    found = rewritten(
        "[a](../docs/saving.md)", source="deploy/x.md", page="deep/x.md", pages=pages
    )

    assert "[a](../saving.md)" == found


def test_what_a_page_loads_from_another_host_is_found() -> None:
    html = (
        '<a href="https://host/x">x</a> <img src="x.svg"> <script src="a.js"></script>'
        '<script src="https://cdn/x.js"></script><link href=//fonts><link href="//f">'
    )

    assert [
        '<script src="https://cdn/x.js">',
        '<link href="//f">',
    ] == loaded_from_elsewhere(html)


def test_long_names_in_tables_break_behind_separators() -> None:
    html = "<code>a_name_of_a_metric_total</code><td><code>a_name</code></td>"
    cell = "<td><code>storesvc_commit_failures_total</code> x</td>"

    assert html == with_breaks(html)
    assert (
        "<td><code>storesvc_<wbr>commit_<wbr>failures_<wbr>total</code> x</td>"
    ) == with_breaks(cell)


def test_each_document_has_a_page_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]

    for document in sorted((ROOT / "docs").glob("*.md")):
        assert f": {document.name}" in nav, document.name


@pytest.mark.parametrize("path", ["train", "operate", "migrate"])
def test_a_path_of_the_first_page_is_a_tab_with_the_same_order(path: str) -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    tab = nav.partition(f"\n  - {path.title()}:")[2].partition("\n  - ")[0]
    home = (ROOT / "docs" / "index.md").read_text()
    header, *rows = re.findall(r"^\| (.*) \|$", home, re.MULTILINE)
    column = header.split(" | ").index(path)
    cells = " ".join(row.split(" | ")[column] for row in rows)
    links = re.findall(r"\]\(([^)]+)\)", cells.replace(GUIDE, "deployment.md"))

    assert len(links) > 4
    assert links == [page for page in re.findall(r": (.*\.md)", tab) if page in links]


def test_the_code_of_others_is_unchanged() -> None:
    shim = ROOT / "docs" / "assets" / "iframe-worker.js"

    assert SHIM_SHA256 == hashlib.sha256(shim.read_bytes()).hexdigest()
    assert "Permission is hereby granted" in (
        shim.with_suffix(".LICENSE.txt").read_text()
    )


def test_the_site_loads_nothing_from_another_host() -> None:
    assets = ROOT / "docs" / "assets"
    text = (ROOT / "mkdocs.yml").read_text()

    assert "font: false" in text
    assert [] == re.findall(r"https?://\S+", text)
    for path in (*assets.glob("*.css"), *assets.glob("*.js")):
        assert [] == re.findall(r"https?://\S+", path.read_text()), path


def test_an_example_of_a_docstring_gets_a_fence() -> None:
    docstring = "Does it.\n\n    >>> f(\n    ...     1)\n    2\n\nMore.\n>>> g()"

    assert (
        "Does it.\n\n    ```pycon\n    >>> f(\n    ...     1)\n    2\n    ```\n\n"
        "More.\n```pycon\n>>> g()\n```"
    ) == fenced(docstring)
