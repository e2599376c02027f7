"""A person uses the console in a real browser: Debian's chromium."""

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from urllib.parse import quote
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

import storesvc_client as store
from storesvc_client.console import run_pages
from tests.console.seeded import LAYERS, state
from tests.console.served import ServedConsole
from tests.support.contract import Writer
from tests.support.examples import soaked

CHROMIUM = Path("/usr/bin/chromium")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs /usr/bin/chromium"),
]

MILLISECONDS = 20_000
"""Maximum wait for something to appear."""

RUN = "/r/prod/llama-8b"

VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective} ${event.blockedURI}`);
});
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser that the tests of the module share."""
    with sync_playwright() as driver:
        launched = driver.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox"]
        )
        yield launched
        launched.close()


class Watched:
    """A tab whose errors, dialogs and policy violations fail the test."""

    def __init__(self, page: Page, console: ServedConsole) -> None:
        self.page = page
        self._address = console.address
        self.problems: list[str] = []
        self.expected = ""
        """Text in the problems that the test provokes; "" if it provokes none."""
        page.set_default_timeout(MILLISECONDS)
        page.add_init_script(VIOLATIONS)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda m: self._noted(m.type, m.text))
        page.on("dialog", lambda dialog: self.problems.append(dialog.message))
        page.goto(console.entrance)

    def open(self, path: str) -> Page:
        """Opens a page of the console."""
        self.check()
        self.page.goto(f"{self._address}{path}")
        return self.page

    def check(self) -> None:
        """Fails if something was reported that the test did not provoke."""
        found = [*self.problems, *self.page.evaluate("window.violations || []")]
        unexpected = [p for p in found if not self.expected or self.expected not in p]
        assert [] == unexpected

    def _noted(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.problems.append(text)


@pytest.fixture
def tab(browser: Browser, console: ServedConsole) -> Iterator[Watched]:
    """A tab of the console of the seeded store."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    watched = Watched(context.new_page(), console)
    yield watched
    watched.check()
    context.close()


@pytest.fixture
def run(run: store.Run) -> store.Run:
    """A run with three checkpoints, for the changes of a test."""
    for step in (1, 2, 3):
        run.save(step, state(step), metrics={"loss": 1 / step}).result()
    return run


def test_the_printed_address_opens_the_runs_and_hides_the_key(tab: Watched) -> None:
    expect(tab.page.get_by_role("heading", name="Runs")).to_be_visible()

    assert "key" not in tab.page.url


def test_the_list_is_filtered_while_one_types(tab: Watched) -> None:
    tab.page.get_by_label("Filter").press_sequentially("llam")

    expect(tab.page.get_by_role("link", name="tests/hostile")).to_have_count(0)
    expect(tab.page.get_by_role("link", name="prod/llama-8b")).to_have_count(1)
    tab.page.wait_for_url("**/?q=llam*")


def test_a_tree_opens_and_closes(tab: Watched) -> None:
    page = tab.open(f"{RUN}@500")
    twig = page.get_by_role("link", name="params", exact=True)

    twig.click()
    expect(page.get_by_role("link", name="embed")).to_be_visible()
    expect(twig).to_have_attribute("aria-expanded", "true")
    page.get_by_role("link", name="layers", exact=True).click()
    page.get_by_role("link", name=f"{{0..{LAYERS - 1}}}").click()
    expect(page.get_by_role("link", name="attn/kernel")).to_be_visible()

    twig.click()
    expect(page.get_by_role("link", name="attn/kernel")).to_have_count(0)
    expect(twig).to_have_attribute("aria-expanded", "false")


def test_a_leaf_of_one_of_several_alike_layers_is_reached(tab: Watched) -> None:
    page = tab.open(f"{RUN}@500?at=params/layers/0")
    page.get_by_role("link", name="each").click()
    page.get_by_role("link", name="2", exact=True).click()
    page.get_by_role("link", name="mlp/kernel").click()

    expect(page.get_by_role("heading", level=1)).to_have_text(
        "params/layers/2/mlp/kernel"
    )
    page.get_by_role("link", name="Read the values").click()
    expect(page.get_by_text("[0:8, 0:8]")).to_be_visible()


def test_a_tile_of_the_treemap_leads_to_its_leaf(tab: Watched) -> None:
    page = tab.open(f"{RUN}@500")
    page.locator('[data-key="params/embed"]').click()

    expect(page.get_by_role("heading", level=1)).to_have_text("params/embed")


def test_the_treemap_shows_what_has_changed(tab: Watched) -> None:
    page = tab.open(f"{RUN}@500")
    page.get_by_role("link", name="change since 400").click()

    expect(page.get_by_role("img", name="by share of changed chunks")).to_be_visible()


def test_keys_are_found(tab: Watched) -> None:
    page = tab.open(f"{RUN}@500")
    page.get_by_label("Keys").fill("**/attn/kernel")
    page.get_by_role("button", name="Find").click()

    expect(page.locator("#tree tbody tr")).to_have_count(LAYERS)


def test_a_metric_is_plotted_and_another_one_chosen(tab: Watched) -> None:
    page = tab.open(RUN)
    expect(page.locator(".plot canvas")).to_be_visible()
    expect(page.locator(".plot")).to_have_attribute("aria-label", "loss by step")

    page.get_by_role("link", name="lr", exact=True).click()
    expect(page.locator(".plot")).to_have_attribute("aria-label", "lr by step")


def test_a_plot_is_zoomed_and_a_point_opens_its_checkpoint(tab: Watched) -> None:
    page = tab.open(RUN)
    area = page.locator(".plot .u-over")
    box = area.bounding_box()
    assert box is not None
    reset = page.get_by_role("button", name="All steps")
    expect(reset).to_be_hidden()

    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 50, steps=5)
    page.mouse.up()
    reset.click()
    expect(reset).to_be_hidden()
    area.click(position={"x": box["width"] - 2, "y": 50})

    expect(page.get_by_role("heading", level=1)).to_have_text("prod/llama-8b@500")


def test_two_checkpoints_are_compared(tab: Watched) -> None:
    page = tab.open(f"{RUN}@500")
    page.get_by_role("link", name="Compare with step 400").click()

    expect(page.get_by_label("Before")).to_have_value("prod/llama-8b@400")
    page.get_by_role("link", name="params/layers/{0..3}/attn/kernel").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(
        "params/layers/0/attn/kernel"
    )


def test_a_policy_is_previewed_set_and_applied(tab: Watched, run: store.Run) -> None:
    page = tab.open(f"/r/{run.name}")
    page.get_by_label("Preview a policy").fill("latest(1)")
    page.get_by_role("button", name="Preview").click()
    expect(page.get_by_text("2 checkpoints of 3 would be deleted")).to_be_visible()

    page.get_by_role("link", name="Set this policy…").click()
    expect(page.get_by_text(f"storectl retain {run.name} 'latest(1)'")).to_be_visible()
    page.get_by_role("button", name="Set policy").click()
    page.get_by_role("link", name="Apply now…").click()
    page.get_by_role("button", name="Apply policy").click()

    expect(page.get_by_role("heading", name="Deleted")).to_be_visible()
    assert [3] == run.steps()


def test_a_tag_that_another_user_has_moved_is_a_conflict(
    tab: Watched, run: store.Run
) -> None:
    run.tags.set("best", 1)
    tab.expected = "409"
    page = tab.open(f"/r/{run.name}@2")
    page.get_by_label("Tag").fill("best")
    page.get_by_role("button", name="Set…").first.click()
    expect(page.get_by_text(f"storectl tag {run.name}@2 best")).to_be_visible()
    run.tags.set("best", 3)

    page.get_by_role("button", name="Set tag").click()

    expect(page.get_by_role("alert")).to_be_visible()
    assert [3] == [tag.step for tag in run.tags.list()]


def test_a_checkpoint_is_deleted_and_undeleted(tab: Watched, run: store.Run) -> None:
    page = tab.open(f"/r/{run.name}@2")
    page.get_by_role("link", name="Delete…").click()
    page.get_by_role("link", name="Cancel").click()
    assert 2 in run.steps()

    page.get_by_role("link", name="Delete…").click()
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_text("it can be undeleted")).to_be_visible()
    assert 2 not in run.steps()

    page.get_by_role("link", name="Undelete…").click()
    page.get_by_role("button", name="Undelete").click()
    expect(page.get_by_role("link", name="Delete…")).to_be_visible()
    assert 2 in run.steps()


def test_a_label_is_set(tab: Watched, run: store.Run) -> None:
    page = tab.open(f"/r/{run.name}@2")
    page.get_by_role("textbox", name="Label").fill("stage")
    page.get_by_role("textbox", name="Text").fill("<b>final</b> & done")
    page.get_by_role("button", name="Set…").nth(1).click()
    page.get_by_role("button", name="Set label").click()

    expect(page.get_by_text("<b>final</b> & done")).to_be_visible()
    assert {"stage": "<b>final</b> & done"} == run.checkpoint(2).labels


def test_an_upload_appears_and_ends_without_a_reload(
    tab: Watched, run: store.Run, server_address: str
) -> None:
    page = tab.open("/uploads")
    row = page.get_by_role("row", name=run.name)
    expect(row).to_have_count(0)

    writer = Writer(server_address, run.name, 77, writers=4)
    writer.begin()
    expect(row).to_contain_text("0 of 4")
    writer.abort()
    expect(row).to_have_count(0)


def test_an_event_arrives_without_a_reload(tab: Watched, run: store.Run) -> None:
    page = tab.open(f"/events?of={run.name}")
    rows = page.locator("#events tr")
    expect(rows).to_have_count(1)

    run.tags.set("fresh", 2)
    expect(rows.first).to_contain_text("fresh")
    run.save(4, {"w": np.ones(1, np.float32)}).result()
    expect(rows.first).to_contain_text(f"{run.name}@4")


def test_the_keyboard_alone_suffices(tab: Watched, run: store.Run) -> None:
    page = tab.open("/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the page")).to_be_focused()
    page.keyboard.press("Enter")
    _tab_to(page, "Filter")
    page.keyboard.type(run.name)
    page.keyboard.press("Enter")
    page.wait_for_url("**/?q=*")
    _tab_to(page, run.name)
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/r/{run.name}")
    _tab_to(page, "3")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/r/{run.name}@3")
    _tab_to(page, "params")
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="embed")).to_be_visible()
    _tab_to(page, "Pin…")
    page.keyboard.press("Enter")
    page.wait_for_url("**/change/pin*")
    _tab_to(page, "Pin")
    page.keyboard.press("Enter")

    expect(page.get_by_role("link", name="Unpin…")).to_be_visible()
    assert run.checkpoint(3).pinned


def _tab_to(page: Page, name: str) -> None:
    """Presses Tab until what has the name is focused."""
    focused = "document.activeElement.innerText || document.activeElement.id"
    names = {name, {"Filter": "q"}.get(name, name)}
    for _ in range(120):
        page.keyboard.press("Tab")
        if page.evaluate(focused).strip() in names:
            return
    raise AssertionError(f"no Tab leads to {name}")


def test_the_focus_is_visible(tab: Watched) -> None:
    page = tab.open("/")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")

    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert "solid" == page.evaluate(outline)


def test_a_dark_desktop_gets_dark_pages(tab: Watched) -> None:
    page = tab.open(RUN)
    background = "getComputedStyle(document.body).backgroundColor"

    def brightness() -> int:
        text: str = page.evaluate(background)
        return sum(map(int, text.removeprefix("rgb(").removesuffix(")").split(", ")))

    page.emulate_media(color_scheme="light")
    light = brightness()
    page.emulate_media(color_scheme="dark")

    assert light > 700
    assert brightness() < 100
    expect(page.locator(".plot canvas")).to_be_visible()


def test_without_javascript_everything_can_be_read_and_changed(
    browser: Browser, console: ServedConsole, run: store.Run
) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(console.entrance)
    page.goto(f"{console.address}/r/{run.name}")
    expect(page.locator(".plot svg")).to_be_visible()
    page.get_by_role("link", name="3", exact=True).click()
    page.get_by_role("link", name="params", exact=True).click()
    page.get_by_role("link", name="layers", exact=True).click()
    page.get_by_role("link", name=f"{{0..{LAYERS - 1}}}").click()
    expect(page.get_by_role("link", name="attn/kernel")).to_be_visible()
    page.get_by_role("link", name="layers", exact=True).click()  # closes it
    expect(page.get_by_role("link", name="attn/kernel")).to_have_count(0)
    page.get_by_role("link", name="Pin…").click()
    page.get_by_role("button", name="Pin").click()

    assert run.checkpoint(3).pinned
    context.close()


@pytest.mark.parametrize(
    "path",
    soaked(
        [
            "/",
            RUN,
            "/r/tests/hostile",
            "/r/tests/hostile@7",
            "/r/tests/hostile@7?at=",
            "/diff?a=tests/hostile@7&b=tests/hostile@8",
            "/events?of=tests",
            "/storage",
            "/audit",
        ],
        every=3,
    ),
)
def test_hostile_names_run_no_script(tab: Watched, path: str) -> None:
    page = tab.open(path)
    page.wait_for_load_state("networkidle" if "events" not in path else "load")

    assert 2 == page.locator("head script, body script").count() - _plots(page)


def _plots(page: Page) -> int:
    """The scripts of the plot."""
    return page.locator('script[src*="uplot"]').count()


def test_a_hostile_leaf_has_a_page(tab: Watched) -> None:
    page = tab.open("/r/tests/hostile@7")
    page.locator("a.leaf").first.click()

    expect(page.get_by_role("heading", level=1)).to_contain_text("<script>alert(1)")


def test_the_rest_of_a_long_run_follows_its_newest_part(
    tab: Watched, run: store.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_pages, "NEWEST", 2)
    page = tab.open(f"/r/{run.name}")

    expect(page.locator(".fact", has_text="checkpoints")).to_contain_text("3")
    expect(page.locator(".plot canvas")).to_be_visible()


@pytest.mark.parametrize("scheme", soaked(["light", "dark"], every=2))
@pytest.mark.parametrize(
    "path",
    [
        "/",
        f"{RUN}?policy=latest(1)",
        f"{RUN}@500?at=params/layers/0",
        f"{RUN}@100",
        f"{RUN}@500?key=params/embed&values=1",
        "/diff?a=prod/llama-8b@400&b=prod/llama-8b@500",
        "/trace/prod/llama-8b@500",
        "/uploads",
        "/storage?garbage=1",
        "/events?of=prod",
        "/audit",
        "/me",
        "/help",
        "/change/pin?run=prod/llama-8b&step=500",
        "/nothing",
    ],
)
def test_a_page_is_accessible(tab: Watched, path: str, scheme: str) -> None:
    tab.expected = "404" if path == "/nothing" else ""
    tab.page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    page = tab.open(path)

    found = Axe().run(page).response["violations"]

    serious = [v for v in found if v["impact"] in ("serious", "critical")]
    assert [] == [(v["id"], v["nodes"][0]["html"][:200]) for v in serious]


@pytest.mark.parametrize("width", soaked([400, 800, 1280], every=3))
@pytest.mark.parametrize(
    "path",
    soaked(
        [
            f"{RUN}@500?at=params/layers/0",
            *("/", RUN, "/r/tests/hostile@7", "/storage", "/audit"),
        ],
        every=2,
    ),
)
def test_a_page_is_no_wider_than_its_window(
    tab: Watched, path: str, width: int
) -> None:
    tab.page.set_viewport_size({"width": width, "height": 800})
    page = tab.open(path)

    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_times_are_in_the_zone_of_the_viewer(
    browser: Browser, console: ServedConsole
) -> None:
    context = browser.new_context(timezone_id="Asia/Kathmandu")
    watched = Watched(context.new_page(), console)
    for path, row in ((f"{RUN}@500", "committed"), (RUN, "created")):
        time = watched.open(path).get_by_role("row", name=row).locator("time").last
        exact = datetime.fromisoformat(time.get_attribute("datetime") or "")
        there = exact.astimezone(ZoneInfo("Asia/Kathmandu"))

        expect(time).to_have_text(there.strftime("%Y-%m-%d %H:%M:%S"))
        expect(time).to_have_attribute("title", exact.strftime("%Y-%m-%d %H:%M:%S UTC"))
    age = watched.open(RUN).locator("td time").first
    expect(age).to_have_text(re.compile("ago|just now"))
    expect(age).to_have_attribute("title", re.compile(r"^[\d :-]{19} \(.*\)$"))
    watched.check()
    context.close()


def test_a_long_name_of_a_metric_makes_no_wide_column(
    tab: Watched, run: store.Run
) -> None:
    names = ("part_of/a_long_name_" * 3 + "x", "y" * 60)
    run.save(9, {"w": 1}, metrics=dict.fromkeys(names, 1.0)).result()
    page = tab.open(f"/r/{run.name}")

    for name in names:
        head = page.locator("th .name", has_text=name)
        assert head.evaluate("name => name.offsetWidth") < 160


def test_a_picture_is_readable_and_shows_like_a_table_that_it_scrolls_on_a_phone(
    tab: Watched,
) -> None:
    tab.page.set_viewport_size({"width": 390, "height": 800})
    page = tab.open(f"{RUN}@500")

    text = page.locator(".picture text").first
    assert text.evaluate("text => text.getBoundingClientRect().height") > 9
    for scrolling in (".scroll", ".picture"):
        shadow = page.locator(scrolling).first.evaluate(
            "box => getComputedStyle(box).backgroundAttachment"
        )
        assert "local, local, scroll, scroll" == shadow
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_run_in_another_namespace_is_reached_by_its_chip(tab: Watched) -> None:
    page = tab.open("/")
    page.get_by_role("group", name="Namespaces").get_by_role(
        "link", name="tests", exact=True
    ).click()

    expect(page.get_by_role("heading", level=1)).to_have_text("tests")
    assert quote("tests") in page.url
