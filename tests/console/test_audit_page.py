"""The page of the audit log: for users who may read it, with filters and pages."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from storesvc.audit.log import AuditLog
from storesvc.audit.reader import SCAN_BYTES, AuditReader
from storesvc.auth.policy import Authentication, Principal
from storesvc.format.audit_chain import FIRST, make_line
from storesvc.rpc.calls import OPEN, Security
from storesvc_client.console import rendering, store_pages
from tests.console.seeded import HOSTILE
from tests.console.served import Elements, ServedConsole
from tests.support.faulty_server import serving
from tests.support.policies import Policies

NAVIGATED = '<a href="/audit"'
"""The page in the navigation."""


@contextmanager
def audited(folder: Path) -> Iterator[tuple[store.Client, ServedConsole]]:
    """Yields a client and a console of a server whose audit log is in a folder."""
    reader = AuditReader(AuditLog(folder / "audit.log", server="here"))
    with (
        serving(folder / "store", security=replace(OPEN, audit=reader)) as address,
        store.connect(address) as client,
        ServedConsole(client) as served,
    ):
        yield client, served


def read_pages(console: ServedConsole, path: str) -> list[Any]:
    """Returns the entries of a page, and of those that follow it."""
    found = list[Any]()
    while path:
        found += console.document(path)
        next_page = re.findall(r'rel="next" href="([^"]+)"', console.text(path))
        path = unescape(next_page[0]) if next_page else ""
    return found


@pytest.mark.slow
def test_the_log_is_in_the_navigation_and_shows_the_newest_entry_first(
    console: ServedConsole,
) -> None:
    assert NAVIGATED in console.text("/")
    text = console.words("/audit")

    assert text.index("prod/llama-8b tag best") < text.index("7 more before it")
    assert "unreadable audit log," in text
    assert "took" in text


def test_hostile_texts_of_the_log_are_shown_as_text(console: ServedConsole) -> None:
    text = console.words("/audit?stage=denied")

    # principal, method, object, reason, peer, request id
    assert text.count(HOSTILE.replace("\u202e", "\\u202e")) >= 6


def test_pages_of_the_log_lead_to_the_oldest_entry(
    console: ServedConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = console.document("/audit")
    monkeypatch.setattr(store_pages, "AUDIT_ROWS", 7)
    found = read_pages(console, "/audit")

    assert everything == found
    assert 'rel="first" href="/audit"' in console.text(
        f"/audit?after={_token(console)}"
    )


def test_pages_of_an_age_join(
    console: ServedConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = console.document("/audit?since=1h")
    monkeypatch.setattr(store_pages, "AUDIT_ROWS", 7)
    found = read_pages(console, "/audit?since=1h")

    assert len(everything) > 7
    assert everything == found


def _token(console: ServedConsole) -> str:
    """Returns the token of the second page."""
    (token,) = re.findall(r"after=([^\"&]+)\"", console.text("/audit"))
    return str(token)


def test_an_entry_leads_to_what_its_caller_did_and_to_its_run(
    console: ServedConsole,
) -> None:
    html = unescape(console.text("/audit?method=SetTag"))

    assert "/audit?method=SetTag&principal=local" in html
    assert "/audit?method=SetTag&in=prod/llama-8b" in html.replace("%2F", "/")
    assert "/audit?method=SetTag&stage=denied" in html


def test_an_anonymous_caller_leads_to_what_all_of_them_did(tmp_path: Path) -> None:
    file = tmp_path / "audit.log"
    values = {"time": "2026-11-24T07:55:00.000000000Z", "stage": "denied"}
    callers = (("", "anonymous", "GetRun"), ("user:b", "token", "ListTags"))
    file.write_bytes(
        b"".join(
            make_line(
                {
                    **values,
                    "principal": name,
                    "authentication": how,
                    "method": method,
                    "missing": {"permission": "a.read", "resource": "lab/eve"},
                },
                seq=1,
                prev=FIRST,
            )
            + b"\n"
            for name, how, method in callers
        )
    )
    with audited(tmp_path) as (_, served):
        everything = served.text("/audit")
        found = served.text("/audit?authentication=anonymous")
        wrong = served.get("/audit?authentication=unknown")

    assert 'href="/audit?authentication=anonymous"' in everything
    assert "ListTags" in everything
    assert "GetRun" in found
    assert "lacks a.read of lab/eve" in found
    assert "lab/eve</td>" in found
    assert "ListTags" not in found
    assert "storectl audit ls --authentication anonymous" in found
    assert 400 == wrong.status_code


def test_the_navigation_keeps_what_it_shows_while_it_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "_SECONDS", 0.0)
    with audited(tmp_path) as (client, _):
        sections = rendering.Navigation(client)
        first = sections.current()
        shown = []
        ask = client.test_permissions

        def slow(*arguments: Any) -> Any:
            shown.append(sections.known)
            return ask(*arguments)

        monkeypatch.setattr(client, "test_permissions", slow)
        second = sections.current()

    assert rendering.AUDIT in first
    assert [first] == shown
    assert first == second


def test_a_server_without_a_log_has_no_page_of_it(tmp_path: Path) -> None:
    with store.connect(tmp_path.as_uri()) as client, ServedConsole(client) as served:
        response = served.get("/audit")

        assert NAVIGATED not in served.text("/")
        assert 409 == response.status_code
        assert "--audit-log" in Elements(response.text).text
        error = served.get("/audit?json").json()["error"]
    assert "AUDIT_LOG_DISABLED" == error["reason"]


@pytest.mark.slow
def test_only_users_who_may_read_the_log_have_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = Policies()

    async def authenticate(_context: object) -> Principal:
        return Principal(name="user:ana", authentication=Authentication.TOKEN)

    security = Security(
        authenticate=authenticate,
        policy=lambda: policies.policy,
        audit=AuditReader(AuditLog(tmp_path / "audit.log", server="here")),
    )
    policies.bind(("manager", "**", "user:ana"))
    with serving(tmp_path / "store", security=security) as address:
        with store.connect(address) as client, ServedConsole(client) as served:
            client.run("prod/open").save(1, {"w": np.ones(2)}).result()
            denied = served.get("/audit")
            assert NAVIGATED not in served.text("/")
        policies.bind(("admin", "**", "user:ana"))
        with store.connect(address) as client, ServedConsole(client) as served:
            assert NAVIGATED in served.text("/")
            assert "here" in served.words("/audit")

    assert 403 == denied.status_code
    assert "audit.read" in denied.text


@pytest.mark.slow
def test_a_search_that_finds_nothing_yet_leads_to_older_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_pages, "_CALLS", 1)
    file = tmp_path / "audit.log"
    values = {"time": "2026-11-24T07:55:00.000000000Z", "stage": "ended"}
    rare = make_line(
        {**values, "principal": "user:b", "method": "A"}, seq=1, prev=FIRST
    )
    long = make_line({**values, "principal": "x" * 90_000}, seq=1, prev=FIRST)
    file.write_bytes(rare + b"\n" + (long + b"\n") * (SCAN_BYTES // 90_000 + 1))
    with audited(tmp_path) as (_, served):
        first = served.text("/audit?principal=user:b")
        (older,) = re.findall(r'rel="next" href="([^"]+)"', first)
        second = served.words(unescape(older))

    assert "in the part of the log that was searched" in first
    assert "Search older entries" in first
    assert "user:b" in second
