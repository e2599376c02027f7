"""The page of events shows changes, and streams them while it is open."""

import json
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

import storesvc_client as store
from storesvc_client.console.visit import EventFeeds
from tests.console.seeded import HOSTILE
from tests.console.served import ServedConsole

TREE = {"w": np.ones(2, np.float32)}


def rows_of(response: httpx.Response) -> Iterator[str]:
    """Yields the rows that a stream sends."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.slow
def test_a_stream_begins_with_the_newest_checkpoint_and_follows_changes(
    own: ServedConsole, run: store.Run
) -> None:
    run.save(1, TREE, metrics={HOSTILE: 1.0}).result()
    with own.http.stream("GET", f"/events/stream?of={run.name}") as response:
        rows = rows_of(response)
        first = next(rows)
        run.tags.set("best", 1)
        second = next(rows)
        run.save(2, TREE).result()
        third = next(rows)

    assert f"{run.name}@1" in first
    assert "<script" not in first
    assert "tagged" in second
    assert "best" in second
    assert f"{run.name}@2" in third


def test_a_page_without_javascript_lists_the_events(
    own: ServedConsole, run: store.Run
) -> None:
    run.save(1, TREE).result()
    path = f"/events?of={run.name}"
    with own.http.stream("GET", f"/events/stream?of={run.name}") as response:
        next(rows_of(response))

    html = own.text(path)

    assert f"/r/{run.name}@1" in html
    assert ["committed"] == [event["kind"] for event in own.document(path)]


def test_a_stream_continues_after_the_last_event_that_was_seen(
    own: ServedConsole, run: store.Run
) -> None:
    run.save(1, TREE).result()
    address = f"/events/stream?of={run.name}"
    with own.http.stream("GET", address) as response:
        next(rows_of(response))
    run.save(2, TREE).result()
    headers = {"Last-Event-ID": "1"}
    with own.http.stream("GET", address, headers=headers) as response:
        row = next(rows_of(response))

    assert f"{run.name}@2" in row


@pytest.mark.slow
def test_too_many_watches_are_refused(own: ServedConsole, client: store.Client) -> None:
    for number in range(33):
        name = f"many/run-{number}"
        client.run(name).save(1, TREE).result()
        status = own.get(f"/events?of={name}").status_code

    assert 429 == status


def test_a_namespace_that_cannot_exist_is_an_error(own: ServedConsole) -> None:
    assert 400 == own.get("/events?of=a+b").status_code
    assert 400 == own.get("/events/stream?of=a+b").status_code


@pytest.mark.slow
def test_rejected_watches_do_not_use_up_the_limit(
    own: ServedConsole, run: store.Run
) -> None:
    run.save(1, TREE).result()
    for number in range(40):
        assert own.http.get(f"/events?of=bad{number}/+").status_code == 400

    assert own.http.get(f"/events?of={run.name}").status_code == 200


def test_a_feed_that_begins_again_continues_the_numbers(
    client: store.Client, run: store.Run
) -> None:
    run.save(1, TREE).result()
    feeds = EventFeeds(client)
    (last, _), *_ = feeds.find_feed(run.name).after(0)
    feeds.find_feed(run.name).problem = store.UnavailableError("the server is gone")

    begun = feeds.find_feed(run.name)

    assert [number > last for number, _ in begun.after(last)] == [True]


@pytest.mark.parametrize("after", ["9" * 5000, "-1", "x", "\u0661"])
def test_a_place_that_is_no_number_is_rejected(
    console: ServedConsole, after: str
) -> None:
    response = console.http.get("/events/stream", params={"of": "prod", "after": after})

    assert 400 == response.status_code
    assert "expected a number" in response.text
