"""A reader searches the documentation site, in a real browser: Debian's chromium.

`make docs` builds the site and runs this.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).parents[2]
SITE: Final = ROOT / "build" / "docs"
CHROMIUM = Path("/usr/bin/chromium")

ANSWERS: Final = {
    "tutorial": ("install", "quick start"),
    "howto": ("best", "bfloat16", "slow restore", "out of memory", "inference"),
    "training": ("resume", "preemption", "SIGTERM", "crash", "rollback"),
    "saving": ("save", "async", "delta", "incremental", "multihost", "data iterator"),
    "restoring": ("restore", "sharding", "mesh", "reshard", "corrupt"),
    "easydel": ("lora", "nnx", "optimizer", "keras", "EMA"),
    "retention": ("tag", "retention", "keep", "delete", "undelete", "gc", "hold"),
    "concepts": ("checkpoint",),
    "monitoring": ("jupyter", "opentelemetry", "goodput"),
    "metrics": ("metrics", "prometheus", "grafana"),
    "storectl": ("verify", "diff", "completion", "copy"),
    "coming-from-orbax": ("orbax", "max_to_keep"),
    "migration": ("safetensors", "hugging face", "levanter"),
    "interop": ("export", "npz"),
    "serving": ("gcs", "s3", "bucket", "timeout", "TLS", "replicas"),
    "security": ("token", "quota", "login", "audit"),
    "errors": ("permission denied",),
    "deployment": ("kubernetes", "docker", "cost", "backup"),
    "compatibility": ("upgrade", "version"),
}
"""Words that users type, by the page that answers them."""

ITEMS: Final = ".md-search-result__list > .md-search-result__item"
FIRST: Final = 3

MILLISECONDS: Final = 60_000
"""Maximum wait for something to appear."""


def _is_built() -> bool:
    """Returns whether the site is newer than the documents."""
    index = SITE / "search" / "search_index.js"
    sources = [ROOT / "mkdocs.yml", *(ROOT / "docs").glob("*.md")]
    newest = max(source.stat().st_mtime for source in sources)
    return index.exists() and index.stat().st_mtime > newest


pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs /usr/bin/chromium"),
    pytest.mark.skipif(not _is_built(), reason="make docs builds the site"),
]


@pytest.fixture
def home() -> Iterator[Page]:
    """The first page of the site, opened as a file."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox"]
        )
        page = browser.new_page()
        page.set_default_timeout(MILLISECONDS)
        page.goto((SITE / "index.html").as_uri())
        yield page
        browser.close()


def found_pages(page: Page, word: str) -> list[str]:
    """Returns the first pages that the search shows, by their paths in the site."""
    box = page.locator("input.md-search__input")
    summary = page.locator(".md-search-result__meta")
    for text, shown in ("", "Type to start"), (word, "matching document"):
        box.fill(text)
        box.dispatch_event("keyup")  # `fill` presses no keys, which the theme needs
        expect(summary).to_contain_text(shown, timeout=MILLISECONDS)
    links = page.locator(f"{ITEMS} > a:first-child")
    hrefs = links.evaluate_all("links => links.map(a => a.href.split(/[?#]/)[0])")
    start = f"{SITE.as_uri()}/"
    return [h.removeprefix(start).removesuffix(".html") for h in hrefs[:FIRST]]


def test_the_page_that_answers_a_word_is_among_the_first_that_a_search_shows(
    home: Page,
) -> None:
    home.locator("input.md-search__input").click()

    found = {
        word: (answer, found_pages(home, word))
        for answer, words in ANSWERS.items()
        for word in words
    }

    missed = [
        f"{word}: expected {answer}, found {hits}"
        for word, (answer, hits) in found.items()
        if answer not in hits
    ]
    assert not missed, "\n".join(missed)
