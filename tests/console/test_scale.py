"""Pages stay small at 2,000 steps, at 24,000 leaves and at 300 runs, as at
10,000, 100,000 and 1,000 in ``make soak``."""

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import storesvc_client as store
from storesvc.format import layout
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc_client.console.run_pages import NEWEST
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.console.served import ServedConsole
from tests.support import stored_records
from tests.support.examples import soaked

pytestmark = pytest.mark.slow

LONG = RunName("scale", "long")
NODES = 5_000
"""Maximum elements of a page."""


class Scale(NamedTuple):
    """How much a store has."""

    steps: int
    leaves: int
    runs: int


def copy_checkpoints(root: Path, scale: Scale) -> None:
    """Copies the record of step 0 to other steps, and the run to others."""
    paths = RunPaths(LONG)
    record = stored_records.read(root, paths.checkpoint(0), pb.CheckpointRecord)
    for step in range(1, scale.steps):
        record.step = step
        record.metrics["loss"] = 1 + 100 / (step + 50)
        stored_records.write(root, paths.checkpoint(step), record)
    run = stored_records.read(root, layout.run_record(LONG), pb.RunRecord)
    for number in range(scale.runs):
        name = RunName("many", f"run-{number:04d}")
        place = layout.run_record(name)
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        stored_records.write(root, place, run)
        slot = RunPaths(name).checkpoint(0)
        (root / slot).parent.mkdir(parents=True, exist_ok=True)
        record.step = 0
        stored_records.write(root, slot, record)


@pytest.fixture(
    scope="module",
    params=soaked([Scale(2_000, 24_000, 300), Scale(10_000, 100_000, 1_000)], every=2),
    ids=["small", "large"],
)
def scale(request: pytest.FixtureRequest) -> Scale:
    """How much the store has."""
    found: Scale = request.param
    return found


@pytest.fixture(scope="module")
def client(
    tmp_path_factory: pytest.TempPathFactory, scale: Scale
) -> Iterator[store.Client]:
    """A client of a store with long, large and many runs."""
    root = tmp_path_factory.mktemp("scale") / "store"
    with store.connect(root.as_uri()) as client:
        small, half = {"w": np.zeros(2, np.float32)}, scale.leaves // 2
        client.run(str(LONG)).save(0, small, metrics={"loss": 3.0}).result()
        flat = {f"key-{number:06d}-x": number for number in range(half)}
        deep = [{"w": {"kernel": number}} for number in range(half)]
        client.run("scale/large").save(1, {"flat": flat, "deep": deep}).result()
    copy_checkpoints(root, scale)
    with store.connect(root.as_uri()) as client:
        yield client


@pytest.fixture(scope="module")
def console(client: store.Client) -> Iterator[ServedConsole]:
    """The console of that store."""
    with ServedConsole(client) as served:
        yield served


@pytest.mark.parametrize(
    "path",
    soaked(
        [
            "/",
            "/?in=many&from=250",
            "/?q=run-02",
            "/r/scale/long",
            "/r/scale/long?from=1500",
            "/r/scale/long?policy=latest(3)|every(1000 steps)",
            "/r/scale/long@1500",
            "/r/scale/large@1",
            "/r/scale/large@1?at=flat",
            "/r/scale/large@1?at=flat&from=9000",
            "/r/scale/large@1?at=deep&apart=1",
            "/r/scale/large@1?at=deep/8000",
            "/r/scale/large@1?match=kernel",
            "/r/scale/large@1?match=**/w/*",
            "/r/scale/large@1?key=deep/8000/w/kernel&values=1",
            "/tree/scale/large@1?at=deep&apart=1&from=200",
            "/storage",
            "/events?of=many",
        ],
        every=9,
    ),
)
def test_a_page_has_few_elements(console: ServedConsole, path: str) -> None:
    response = console.get(path)
    assert 200 == response.status_code, response.text
    assert len(re.findall(r"<[a-z]", response.text)) < NODES


@pytest.mark.parametrize("whole", soaked(["", "&whole=1"], every=2))
def test_the_pages_of_a_run_lead_to_every_step(
    console: ServedConsole, scale: Scale, whole: str
) -> None:
    start = scale.steps - 200
    path, seen = f"/r/scale/long?metric=loss{whole}&from={start}", set[str]()
    while path:
        html = console.text(path)
        seen |= {*re.findall(r'"/r/scale/long@(\d+)"', html)}
        following = re.findall(r'rel="next" href="(/r/scale/long\?[^"]+)"', html)
        path = unescape(following[0]) if following else ""

    assert {*map(str, range(200))} <= seen


def test_one_jumps_to_a_step_and_to_the_ends_of_a_long_run(
    console: ServedConsole, scale: Scale
) -> None:
    step = scale.steps - 1_679
    html = unescape(console.text(f"/r/scale/long?step={step}"))

    row = html.partition('<tr class="here">')[2].partition("</tr>")[0]
    assert f"/r/scale/long@{step}" in row
    assert f"1,651 to 1,700 of {scale.steps:,} checkpoints" in html
    last = scale.steps - 50
    for rel, start in (("first", 0), ("prev", 1600), ("next", 1700), ("last", last)):
        assert re.search(rf'rel="{rel}" href="[^"]+&whole=1&from={start}"', html)
    beyond = console.text(f"/r/scale/long?step={scale.steps + 5}")
    assert f"/r/scale/long@{scale.steps - 1}" in beyond


def test_a_long_run_shows_its_newest_part_at_once(
    console: ServedConsole, scale: Scale
) -> None:
    first, whole = (console.text(f"/r/scale/long{q}") for q in ("", "?whole=1"))

    assert f"1 to 50 of {NEWEST + 1:,} or more checkpoints" in first
    assert 'hx-get="/r/scale/long?whole=1"' in first
    asked = console.text("/r/scale/long?policy=latest(1)&metric=loss")
    rest = 'hx-get="/r/scale/long?policy=latest%281%29&amp;metric=loss&amp;whole=1"'
    assert rest in asked
    assert f"1 to 50 of {scale.steps:,} checkpoints" in whole
    assert "whole=1" not in whole.partition('class="facts"')[0]


def test_the_tree_of_a_large_checkpoint_follows_its_page(
    client: store.Client, console: ServedConsole, scale: Scale
) -> None:
    with ServedConsole(client) as new:  # which has read no tree
        first = new.text("/r/scale/large@1")
    assert f"Reading {scale.leaves:,} leaves…" in first
    assert '<table class="tree">' not in first
    whole = console.text("/r/scale/large@1?whole=1")
    again = console.text("/r/scale/large@1")  # it is kept now

    for html in (whole, again):
        assert f"{{0..{scale.leaves // 2 - 1}}}" not in html  # one level
        assert "deep" in html
        assert f"{scale.leaves // 2:,} leaves" in html
