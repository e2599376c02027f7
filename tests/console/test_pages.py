"""The console shows a store: pages, their links, their JSON, and errors as pages."""

import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import numpy as np
import pytest

import storesvc_client as store
from storesvc_client import SaveReport
from storesvc_client.console import checkpoint_pages, visit
from tests.console.seeded import HOSTILE, LAYERS
from tests.console.served import Elements, ServedConsole
from tests.support.command_line import document
from tests.support.contract import Writer
from tests.support.server_process import ServerProcess

RUN = "/r/prod/llama-8b"

PAGES = [
    "/",
    "/?in=prod",
    "/?q=LLAMA",
    RUN,
    f"{RUN}?policy=latest(1)",
    f"{RUN}?policy=nonsense",
    f"{RUN}@500",
    f"{RUN}@best",
    f"{RUN}@100",
    f"{RUN}@500?at=params/layers/2",
    f"{RUN}@500?at=params/layers&apart=1",
    f"{RUN}@500?match=kernel",
    f"{RUN}@500?match=**/nothing*",
    f"{RUN}@500?key=params/embed&values=1",
    "/r/tests/single@1",
    "/r/tests/single@1?key=&values=1",
    "/r/tests/hostile",
    "/r/tests/hostile@7",
    "/trace/prod/llama-8b@500",
    "/diff",
    "/diff?a=prod/llama-8b@400&b=prod/llama-8b@best",
    "/diff?a=tests/hostile@7&b=tests/hostile@8",
    "/uploads",
    "/storage",
    "/storage?garbage=1",
    "/events",
    "/events?of=tests",
    "/audit",
    "/audit?stage=denied",
    "/audit?in=tests/hostile&since=24h&principal=local",
    "/me",
    "/me?in=prod",
    "/help",
    "/change/tag?run=prod/llama-8b&step=500&tag=next",
    "/change/pin?run=prod/llama-8b&step=500",
    "/change/policy?run=prod/llama-8b&policy=latest(1)",
]

AUDIT = ["/audit", "/audit?stage=ended&in=prod&method=DeleteCheckpoint&principal=local"]

each_page = pytest.mark.parametrize("path", PAGES)


def links(html: str, page: str) -> Iterator[str]:
    """Yields the addresses to which a page leads."""
    for tag, attributes in Elements(html).found:
        for name in ("href", "src", "hx-get", "data-plot"):
            target = attributes.get(name, "")
            if target and tag != "form":
                yield urljoin(page, target).partition("#")[0]


@each_page
def test_a_page_has_a_title_and_names_its_command(
    console: ServedConsole, path: str
) -> None:
    html = console.text(path)

    assert re.search(r"<h1>[^<]+</h1>", html)
    assert '<p class="cmd"><span aria-hidden="true">$ </span><code>storectl ' in html


@each_page
def test_no_name_of_a_store_becomes_markup(console: ServedConsole, path: str) -> None:
    html = console.text(path)

    assert "alert(1)</script>" not in html
    assert "\u202e" not in html
    scripts = [at for tag, at in Elements(html).found if tag == "script"]
    assert scripts
    assert all(at["src"].startswith("/static/") for at in scripts)


@each_page
def test_no_page_has_an_inline_style_or_an_inline_handler(
    console: ServedConsole, path: str
) -> None:
    for tag, attributes in Elements(console.text(path)).found:
        assert tag != "style"
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith(("on", "hx-on"))]


def test_hostile_names_are_shown_as_text(console: ServedConsole) -> None:
    shown = HOSTILE.replace("\u202e", "\\u202e")

    for path in ("/r/tests/hostile", "/r/tests/hostile@7"):
        assert shown in console.words(path)


@pytest.mark.slow
def test_all_links_lead_somewhere(console: ServedConsole) -> None:
    seen = {path: path for path in PAGES}
    ahead = [*PAGES]
    while ahead:
        page = ahead.pop()
        response = console.get(page)
        assert 200 == response.status_code, f"{page} of {seen[page]}: {response.text}"
        if not response.headers["content-type"].startswith("text/html"):
            continue
        for link in links(response.text, page):
            parts = urlsplit(link)
            assert not parts.netloc, link
            if link not in seen:
                seen[link] = page
                ahead.append(link)
    assert f"{RUN}@0" in seen
    assert len(seen) > 100


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("/", ["ls"]),
        ("/?in=prod", ["ls", "prod"]),
        (RUN, ["ls", "prod/llama-8b"]),
        (f"{RUN}@500", ["stat", "prod/llama-8b@500"]),
        (f"{RUN}@best", ["stat", "prod/llama-8b@best"]),
        (f"{RUN}@100", ["stat", "prod/llama-8b@100"]),
        ("/r/tests/hostile@7", ["stat", "tests/hostile@7"]),
        (
            f"{RUN}@500?key=params/layers/1/mlp/kernel",
            ["stat", "prod/llama-8b@500:params/layers/1/mlp/kernel"],
        ),
        ("/r/tests/single@1?key=", ["stat", "tests/single@1:"]),
        (
            "/diff?a=prod/llama-8b@400&b=prod/llama-8b@500",
            ["diff", "prod/llama-8b@400", "prod/llama-8b@500"],
        ),
        ("/trace/prod/llama-8b@best", ["trace", "prod/llama-8b@best"]),
        ("/uploads", ["uploads"]),
        ("/storage", ["du"]),
        ("/storage?in=prod", ["du", "prod"]),
        ("/audit", ["audit", "ls"]),
        (
            "/audit?in=prod/llama-8b&method=SetTag&since=7d",
            ["audit", "ls", "--run", "prod/llama-8b", "--method", "SetTag"],
        ),
        ("/me", ["whoami"]),
    ],
)
def test_the_json_of_a_page_is_that_of_its_command(
    console: ServedConsole, server_address: str, path: str, command: list[str]
) -> None:
    assert document(server_address, *command) == console.document(path)


@pytest.mark.slow
def test_the_command_under_the_title_prints_the_json_of_the_page(
    console: ServedConsole, server_address: str
) -> None:
    for path in (
        "/",
        RUN,
        f"{RUN}@300",
        f"{RUN}@0?key=step",
        "/storage",
        "/uploads",
        *AUDIT,
    ):
        html = console.text(path)
        (command,) = re.findall(r'class="cmd".*?<code>(.*?)</code>', html)
        _, *words = shlex.split(unescape(command))

        assert document(server_address, *words) == console.document(path)


def test_a_run_shows_its_marks_and_its_metrics(console: ServedConsole) -> None:
    text = console.words(RUN)

    for word in ("best", "pinned", "loss", "lr", "latest(2) | tagged", "Deleted"):
        assert word in text


def test_the_list_counts_its_runs_and_says_whose_size_it_shows(
    console: ServedConsole,
) -> None:
    text = console.words("/?q=llama-8b")

    assert "newest step committed its size metric value newest 60 checkpoints" in text
    assert text.endswith("1 run")


def test_the_table_of_a_run_has_the_metrics_of_its_chart(
    console: ServedConsole, run: store.Run
) -> None:
    names = ["train/loss", "accuracy", "eval/top_5", "lr", "tokens"]
    for step in (0, 1000):
        run.save(step, {"w": step}, metrics=dict.fromkeys(names, 1.0)).result()

    html = console.text(f"/r/{run.name}")

    chart = html.partition('id="steps-title"')[0]
    offered = re.findall(r"metric=[^>]*>([^<]+)</a>", chart)
    heads = re.findall(r'<span class="name">(.*?)</span></th>', html)
    assert (names, "eval/<wbr>top_<wbr>5") == (offered, heads[2])
    assert names == [head.replace("<wbr>", "") for head in heads]
    # the plot has the ticks of the picture of the checkpoints
    assert ('data-tick="200' in html, ">200</text>" in html) == (True, True)


def test_the_table_of_a_run_is_sorted_by_a_metric_as_its_command_does(
    console: ServedConsole, run: store.Run, server_address: str
) -> None:
    for step, metrics in enumerate(({"loss": 2.0}, {"loss": 1.0}, {}, {"loss": 3.0})):
        run.save(step, {"w": step}, metrics=metrics).result()

    for order, steps in {"loss": [1, 0, 3, 2], "-loss": [3, 0, 1, 2]}.items():
        html = console.text(f"/r/{run.name}?sort={order}")

        table = html.partition('id="steps-title"')[2]
        shown = re.findall(r'<td class="n"><a class="strong"[^>]*>(\d+)</a>', table)
        assert [str(step) for step in steps] == shown
        following = "-loss" if order == "loss" else "loss"
        assert f"sort={following}#steps" in table
        listed = document(server_address, "ls", run.name, "--sort", order)
        assert steps == [each["step"] for each in listed]
        assert listed == console.document(f"/r/{run.name}?sort={order}")


def test_a_time_is_in_utc_without_a_script(console: ServedConsole) -> None:
    html = console.text(f"{RUN}@500")

    ((exact, shown),) = set(
        re.findall(r'committed</th><td><time datetime="([^"]+)">([^<]+)</time>', html)
    )
    assert f"{exact[:10]} {exact[11:19]} UTC" == shown


def test_a_run_plots_the_metric_that_is_asked_for(console: ServedConsole) -> None:
    html = console.text(f"{RUN}?metric=lr")

    assert "<title>lr of prod/llama-8b</title>" in html
    points = console.get("/plot/prod/llama-8b?metric=lr").json()
    assert {"metric": "lr", "steps": [0, 200, 300, 400, 500]} == {
        name: points[name] for name in ("metric", "steps")
    }


def test_a_preview_lists_what_a_policy_would_delete(console: ServedConsole) -> None:
    text = console.words(f"{RUN}?policy=latest(1)")

    # the pinned and the tagged checkpoint stay too
    assert "2 checkpoints of 5 would be deleted" in text
    assert "Set this policy…" in text


def test_a_policy_that_is_not_valid_is_explained(console: ServedConsole) -> None:
    text = console.words(f"{RUN}?policy=nonsense")

    assert "nonsense" in text
    assert "expected" in text


def test_a_policy_with_a_metric_that_no_checkpoint_has_is_not_offered(
    console: ServedConsole,
) -> None:
    text = console.words(f"{RUN}?policy=best(3,los,min)")
    assert "expected a metric of the checkpoints of prod/llama-8b (there are" in text
    assert "Set this policy" not in text

    forced = console.words(f"{RUN}?policy=best(3,los,min,force)")
    assert "Set this policy…" in forced


def test_a_tree_shows_alike_layers_once(console: ServedConsole) -> None:
    text = console.words(f"{RUN}@500?at=params/layers/0")

    assert f"{{0..{LAYERS - 1}}}" in text
    assert f"{LAYERS} x 2 leaves" in text
    assert "attn/kernel" in text


def test_alike_layers_have_a_row_each_if_asked(console: ServedConsole) -> None:
    html = console.text(f"{RUN}@500?at=params/layers&apart=1")

    for layer in range(LAYERS):
        assert f"at=params/layers/{layer}" in html.replace("%2F", "/")


def test_a_leaf_shows_its_first_values(console: ServedConsole) -> None:
    text = console.words(f"{RUN}@500?key=params/embed&values=1")

    assert "[0:8, 0:8]" in text
    assert "64 65 66 67 68 69 70 71" in text


def test_a_leaf_shows_its_statistics(console: ServedConsole) -> None:
    path = f"{RUN}@500?key=params/embed&values=1"
    text = console.words(path)
    log = console.words(f"{path}&scale=symlog")

    assert "minimum 0 maximum 4095 mean 2047.5" in text
    assert "all 4,096 elements" in text
    assert "linear scale" in text
    assert "symmetric log scale" in log


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        (np.array([1.0, np.nan, np.inf, 0.0], np.float32), ["NaN 1", "infinite 1"]),
        (np.zeros((0, 3), np.float32), ["minimum -"]),
        (np.zeros((2, 3, 0), np.float32), ["minimum -"]),
        (np.ones((2, 3, 4, 5), np.int8), ["[0, 0, 0:4, 0:5]", "maximum 1"]),
        (np.array([True, False]), ["True False", "zeros 1 (50.0%)"]),
        (np.array([3 + 4j]), ["3+4j", "maximum 5"]),
        (np.full(5, np.nan), ["minimum -", "NaN 5"]),
        (np.int32(7), ["[()]", "mean 7"]),
        ("a text", ["An encoded value."]),
    ],
    ids=[
        "not-finite",
        "empty",
        "empty-3d",
        "4d",
        "bool",
        "complex",
        "nan",
        "scalar",
        "text",
    ],
)
def test_a_leaf_of_any_kind_has_values(
    console: ServedConsole, run: store.Run, value: Any, texts: list[str]
) -> None:
    run.save(1, {"x": value}).result()

    text = console.words(f"/r/{run.name}@1?key=x&values=1")

    for expected in texts:
        assert expected in text


def test_a_sample_of_a_large_leaf_is_read(
    console: ServedConsole, run: store.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save(1, {"x": np.arange(5 << 20, dtype=np.float32)}).result()
    monkeypatch.setattr(visit, "READ_BYTES", 10 << 20)

    text = console.words(f"/r/{run.name}@1?key=x&values=1")

    assert re.search(r"A sample of [\d,]+ elements in \d of \d chunks", text)
    assert "Statistics" in text


def test_a_checkpoint_is_drawn_by_dtype_and_by_change(console: ServedConsole) -> None:
    by_dtype = console.text(f"{RUN}@500")
    by_change = console.text(f"{RUN}@500?changed=400")

    assert "by dtype" in by_dtype
    assert "by share of changed chunks" in by_change
    for html in (by_dtype, by_change):
        assert 'data-key="params/embed"' in html


def test_a_key_of_a_subtree_shows_the_tree_below_it(console: ServedConsole) -> None:
    html = console.text(f"{RUN}@500?key=params/layers/0")

    assert "<h1>prod/llama-8b@500</h1>" in html
    assert "attn/kernel" in html


def test_a_run_draws_its_checkpoints_and_the_deleted_ones(
    console: ServedConsole,
) -> None:
    text = console.words(RUN)

    for lane in ("tags", "saved", "pinned"):
        assert lane in text


def test_a_deleted_checkpoint_can_be_undeleted_from_its_page(
    console: ServedConsole,
) -> None:
    html = console.text(f"{RUN}@100")

    assert "/change/undelete?run=prod" in html
    assert "/change/delete" not in html


def test_a_deleted_checkpoint_says_how_its_tree_can_be_read(
    console: ServedConsole,
) -> None:
    text = console.words(f"{RUN}@100")

    assert f"Tree {3 + 2 * LAYERS} leaves Of a deleted checkpoint only the" in text
    assert "once it is undeleted: storectl undelete prod/llama-8b@100" in text


def test_the_facts_of_a_checkpoint_read_as_they_are_meant(
    console: ServedConsole,
) -> None:
    text = console.words(f"{RUN}@400")

    assert re.search(rf"chunks \d+ in {3 + 2 * LAYERS} leaves", text)
    assert "tags and pins best" in text
    assert "Text (empty removes it)" in text


def test_events_and_checkpoints_show_the_loss_first(
    console: ServedConsole, run: store.Run
) -> None:
    metrics = dict.fromkeys(("accuracy", "lr", "tokens", "a", "train/loss"), 1.0)
    run.save(1, {"w": np.ones(1)}, metrics=metrics).result()

    for path in (f"/events?of={run.name}", f"/r/{run.name}@1"):
        words = console.words(path).split()
        assert words.index("train/loss") < words.index("accuracy"), path


def test_the_phases_of_a_save_are_drawn(console: ServedConsole) -> None:
    text = console.words("/trace/prod/llama-8b@500")

    assert "Process 0" in text
    for phase in ("snapshot", "send", "acknowledge"):
        assert phase in text


def test_the_times_of_a_save_have_one_unit_and_its_phases_are_explained(
    console: ServedConsole,
) -> None:
    text = console.words("/trace/prod/llama-8b@500")

    assert re.search(r"upload \d+\.\d{3} s from its begin to the commit", text)
    assert not re.search(r"\d ms\b", text)
    assert "acknowledge waits, after the last send, until the server" in text
    assert "await others" not in text  # a phase that did not occur


def test_every_phase_of_a_save_is_explained() -> None:
    source = inspect.getsource(SaveReport)
    named = source.partition("Seconds by phase")[2].partition("Phases that")[0]

    for phase in checkpoint_pages._PHASES:
        assert re.search(rf"\b{phase}\b", named)
    words = re.sub(r"\([^)]*\)", "", " ".join(named.split()).partition(": ")[2])
    for phase in re.split(r",| and | or ", words.rstrip(". ")):
        assert phase.strip() in checkpoint_pages._PHASES


def test_a_comparison_lists_leaves_in_natural_order(
    console: ServedConsole, run: store.Run
) -> None:
    for step in (1, 2):
        layers = [np.full(4, step, np.float32)] * 11
        run.save(step, {"layers": layers}, items={"seed": step}).result()

    address = f"/diff?a={run.name}@1&b={run.name}@2"
    html = console.text(f"{address}&apart=1")

    table = html.partition('id="leaves-title"')[2]
    assert [*map(str, range(11))] == re.findall(r">layers/(\d+)</a>", table)
    # equal before and after
    assert 11 == table.count('<td class="mono soft" colspan="2">float32[4]</td>')

    # as the tree shows them, unless each is asked for
    text = console.text(address).partition('id="leaves-title"')[2]
    assert f"key={quote('layers/0', safe='')}" in text
    assert re.search(r">layers/{0\.\.10}</a>.*&amp;apart=1.*>11 x 1 of 1<", text)


def test_a_comparison_counts_what_differs(console: ServedConsole) -> None:
    text = console.words("/diff?a=prod/llama-8b@400&b=prod/llama-8b@500")

    # all but the frozen embedding
    assert "the same 1 leaf" in text
    assert f"content {2 * LAYERS + 2} leaves" in text


def test_an_upload_in_flight_is_shown(
    console: ServedConsole, server_address: str
) -> None:
    Writer(server_address, "prod/llama-8b", 900, chunks=2).begin()

    for path in ("/uploads", RUN):
        assert "900" in console.words(path)
    assert "1 upload" in console.words("/")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/nothing", 404),
        ("/r/prod/absent", 404),
        (f"{RUN}@12345", 404),
        (f"{RUN}@absent-tag", 404),
        (f"{RUN}@100?key=step", 404),
        (f"{RUN}@500?key=params/absent", 404),
        ("/r/a+b/case", 400),
        (f"{RUN}@-1", 400),
        (f"{RUN}?from=-1", 400),
        (f"{RUN}?from=x", 400),
        ("/diff?a=prod&b=prod", 400),
        ("/change/nothing?run=prod/llama-8b", 400),
        ("/change/tag?run=prod/llama-8b&step=x&tag=y", 400),
        ("/change/tag?run=prod/llama-8b&step=5&tag=", 400),
        ("/me?in=a+b", 400),
        ("/audit?in=a+b", 400),
        ("/audit?stage=begun", 400),
        ("/audit?since=yesterday", 400),
        ("/audit?method=DeleteChekpoint", 400),
        ("/audit?after=x", 400),
    ],
)
def test_an_error_is_a_page_with_its_message_and_its_status(
    console: ServedConsole, path: str, status: int
) -> None:
    response = console.get(path)
    as_json = console.get(f"{path}{'&' if '?' in path else '?'}json")

    assert (status, status) == (response.status_code, as_json.status_code)
    message = as_json.json()["error"]["message"]
    assert message
    assert " ".join(message.split()) in Elements(response.text).text


@pytest.mark.parametrize(
    ("path", "links"),
    [
        (f"{RUN}@401", ["prod/llama-8b@400", "prod/llama-8b@500"]),
        (f"{RUN}@bestt", ["prod/llama-8b@best"]),
        ("/r/prod/llama-8c", ["prod/llama-8b"]),
        (f"{RUN}@500?key=params/embet", ["prod/llama-8b@500?key=params/embed"]),
    ],
)
def test_an_error_links_to_what_is_nearest(
    console: ServedConsole, path: str, links: list[str]
) -> None:
    html = console.get(path).text

    for link in links:
        name = link.rpartition("=")[2]
        assert f'<a href="/r/{link.replace("params/", "params%2F")}">{name}</a>' in html


def test_an_error_names_its_kind_and_its_reason(console: ServedConsole) -> None:
    error = console.get("/r/prod/absent?json").json()["error"]

    assert ("NotFoundError", "RUN_NOT_FOUND") == (error["kind"], error["reason"])


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_a_page(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    with store.connect(server.address, timeout=1) as client:
        client.run("prod/x").save(1, {"w": np.ones(1)}).result()
        client._connection.patience = 0.5
        with ServedConsole(client) as served:
            assert 200 == served.get("/").status_code
            server.kill()

            response = served.get("/")

    assert 503 == response.status_code
    assert server.address in response.text


def test_a_console_works_on_a_root_without_a_server(tmp_path: Path) -> None:
    with store.connect(tmp_path.as_uri()) as client, ServedConsole(client) as served:
        assert "No run yet." in served.text("/")
        assert "No run yet." in served.text("/events")
        client.run("a/b").save(1, {"w": np.ones(2)}).result()

        assert "/r/a/b@1" in served.text("/")


def test_the_links_of_a_page_keep_its_namespace(console: ServedConsole) -> None:
    uploads = console.text("/uploads?in=prod")
    storage = console.text("/storage?in=prod")

    assert 'hx-get="/uploads?in=prod"' in uploads
    assert 'href="/storage?garbage=1&in=prod"' in unescape(storage)


def test_an_empty_key_without_a_leaf_leads_to_the_tree(console: ServedConsole) -> None:
    assert 'id="tree"' in console.text(f"{RUN}@500?key=")
