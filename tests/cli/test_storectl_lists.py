"""storectl ls and stat: records that match, in order, with tags and pins; suggestions
for names that do not exist."""

import math
from importlib.metadata import version

import numpy as np
import pytest
from click.testing import CliRunner

import storesvc_client as store
from storesvc_client.cli import main
from tests.support.command_line import document, printed, refusal, storectl, table

LOSSES = {100: 2.31, 200: 2.08, 300: math.nan, 400: 2.11}


@pytest.fixture(scope="module")
def address(server_address: str) -> str:
    """The address of a server with a run of five steps, one of them deleted."""
    with store.connect(server_address) as client:
        run = client.run("prod/llama")
        for step, loss in LOSSES.items():
            stage = "final" if step > 200 else "warm-up"
            run.save(
                step,
                {"w": np.full(step, 1.0)},
                metrics={"loss": loss},
                labels={"stage": stage},
            ).result()
        run.save(500, {"w": np.zeros(3)}).result()
        for tag, step in (("best", 200), ("prod", 200), ("candidate", 400)):
            run.tags.set(tag, step)
        run.update(400, pinned=True)
        run.delete(300)
        client.run("prod/other").save(7, {"w": np.zeros(3)}).result()
    return server_address


def steps(address: str, *arguments: str) -> list[int]:
    found = document(address, "ls", "prod/llama", *arguments)
    return [checkpoint["step"] for checkpoint in found]


# --- ls ---------------------------------------------------------------------------


def test_ls_shows_tags_and_pins(address: str) -> None:
    header, *rows = table(printed(address, "ls", "prod/llama"))

    at = header.index("TAGS")
    assert ["TAGS", "PINNED"] == header[at : at + 2]
    assert [["-", "-"], ["candidate", "yes"], ["best prod", "-"], ["-", "-"]] == [
        row[at : at + 2] for row in rows
    ]


def test_json_has_the_tags_of_each_checkpoint(address: str) -> None:
    found = document(address, "ls", "prod/llama")

    assert [[], ["candidate"], ["best", "prod"], []] == [each["tags"] for each in found]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--where", "loss<2.2"], [400, 200]),
        (["--where", "loss<2.5", "--sort", "loss", "--limit", "2"], [200, 400]),
        (["--sort", "-loss"], [100, 400, 200, 500]),
        (["--sort", "step"], [100, 200, 400, 500]),
        (["--sort", "-size", "--limit", "1"], [400]),
        (["--where", "pinned | tags=best"], [400, 200]),
        (["--where", "stage=final", "--where", "age<1h"], [400]),
        (["--where", "~tags"], [500, 100]),
        (["--where", "stage!=final"], [500, 200, 100]),
        (["--where", "loss>9"], []),
    ],
)
def test_ls_lists_what_matches_in_order(
    arguments: list[str], expected: list[int], address: str
) -> None:
    assert expected == steps(address, *arguments)


def test_deleted_checkpoints_are_selected_too(address: str) -> None:
    assert [300] == steps(address, "--deleted", "--where", "loss=nan")
    assert [] == steps(address, "--deleted", "--where", "loss<9")


def test_a_limit_after_sorting_says_that_there_are_more(address: str) -> None:
    result = storectl(address, "ls", "prod/llama", "--sort", "loss", "--limit", "3")

    assert 4 == len(result.stdout.splitlines())
    assert "storectl: 3 checkpoints shown, there are more\n" == result.stderr


@pytest.mark.parametrize(
    ("where", "note"),
    [
        ("loss>9", ""),
        (
            "los<9",
            "storectl: no checkpoint has a metric or label 'los'; did you mean loss?\n",
        ),
    ],
)
def test_an_empty_list_says_why(where: str, note: str, address: str) -> None:
    result = storectl(address, "ls", "prod/llama", "--where", where)

    first = "storectl: none of 4 checkpoints matches --where\n"
    assert (0, "") == (result.exit_code, result.stdout)
    assert first + note == result.stderr


@pytest.mark.parametrize("options", [[], ["--json"], ["--limit", "1"]])
def test_a_sort_by_a_name_that_no_checkpoint_has_is_wrong_usage(
    options: list[str], address: str
) -> None:
    result = storectl(address, "ls", "prod/llama", "--sort", "los", *options)

    assert (2, "") == (result.exit_code, result.stdout)
    assert "no checkpoint has a metric or label 'los'; did you mean loss?" in (
        result.stderr
    )


def test_runs_and_leaves_are_selected_by_their_columns(address: str) -> None:
    runs = document(address, "ls", "prod", "--where", "latest>10", "--sort", "-run")
    found = [
        [leaf["key"] for leaf in document(address, "ls", path, "--where", "size>1kB")]
        for path in ("prod/llama@100", "prod/llama@200")
    ]

    assert ["prod/llama"] == [run["name"] for run in runs]
    assert [[], ["w"]] == found


@pytest.mark.parametrize("option", ["--where", "--sort"])
def test_a_wrong_option_is_wrong_usage_before_a_store_is_opened(option: str) -> None:
    result = storectl("127.0.0.1:1", "ls", "prod/x@1", option, "colour")

    assert (2, "") == (result.exit_code, result.stdout)
    assert f"Invalid value for {option}: " in result.stderr
    assert "expected a field: chunks, dtype, key" in result.stderr


# --- stat -------------------------------------------------------------------------


def test_stat_of_a_run_shows_what_it_holds(address: str) -> None:
    rows = table(printed(address, "stat", "prod/llama"))

    assert ["prod/llama"] == rows[0]
    assert ["checkpoints", "4, steps 100 to 500"] in rows
    assert ["pinned", "1"] in rows
    assert ["deleted", "1"] in rows
    assert ["tags", "best", "step 200"] in rows
    assert ["candidate", "step 400"] in rows
    assert ["retention", "none: all stay"] in rows
    assert [
        *("metrics", "loss"),
        "2.11, lowest 2.08 (step 200), highest 2.31 (step 100)",
    ] in rows


def test_stat_of_a_run_as_json_has_its_record_its_use_and_its_metrics(
    address: str,
) -> None:
    found = document(address, "stat", "prod/llama")

    assert ("prod/llama", 500, 100) == (
        *(found["name"], found["latest_step"], found["first_step"]),
    )
    assert (4, 1, 1) == (
        *(found["checkpoint_count"], found["deleted_checkpoint_count"]),
        found["pinned_count"],
    )
    assert ["best", "candidate", "prod"] == [tag["name"] for tag in found["tags"]]
    assert {
        "newest": 2.11,
        "count": 3,
        "lowest": 2.08,
        "lowest_step": 200,
        "highest": 2.31,
        "highest_step": 100,
    } == found["metrics"]["loss"]
    assert found["distinct_bytes"] > 0


def test_stat_of_a_run_shows_its_holds_and_its_policy(
    address: str, run: store.Run
) -> None:
    run.save(1, {"w": np.zeros(3)}).result()
    run.retention.set(store.KeepLatest(3), purge_delay=3600)
    with run.holds.create(1, owner="tests"):
        rows = table(printed(address, "stat", run.name))
        holds = document(address, "stat", run.name)["holds"]

    assert [(1, "tests")] == [(hold["step"], hold["owner"]) for hold in holds]
    assert ["retention", "latest(3)"] in rows
    assert ["purge delay", "1 hour"] in rows
    assert ["holds", "step 1"] in [row[:2] for row in rows]


def test_stat_of_a_run_shows_its_migrations_in_their_order(
    address: str, run: store.Run
) -> None:
    run.save(1, {"a": np.zeros(3)}).result()
    assert ["migrations", "-"] in table(printed(address, "stat", run.name))
    for old, new in ("ab", "bc"):
        run.migrations.add({"version": 1, "rules": [{"from": old, "to": new}]})
    first, second = run.migrations.list()

    rows = table(printed(address, "stat", run.name))
    found = document(address, "stat", run.name)["migrations"]

    at = rows.index(["migrations", first.digest[:12], "mapping"])
    assert [second.digest[:12], "mapping"] == rows[at + 1]
    assert [{"digest": one.digest, "name": "mapping"} for one in (first, second)] == (
        found
    )


def test_stat_of_a_run_without_a_checkpoint_shows_its_policy(
    address: str, run: store.Run
) -> None:
    run.retention.set(store.KeepLatest(3))

    found = document(address, "stat", run.name)

    assert (0, None, "latest(3)") == (
        *(found["checkpoint_count"], found["latest_step"]),
        found["retention"],
    )


def test_stat_of_a_namespace_adds_up_its_runs(address: str) -> None:
    rows = table(printed(address, "stat", "prod"))
    found = document(address, "stat", "prod")
    used = document(address, "du", "prod")

    assert ["runs", "2"] in rows
    assert ["checkpoints", "5"] in rows
    assert (2, 5) == (found["run_count"], found["checkpoint_count"])
    assert sum(run["distinct_bytes"] for run in used) == found["distinct_bytes"]


# --- names that do not exist ------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("prod/llama@bset", "did you mean prod/llama@best?"),
        ("prod/llama@lastest", "did you mean prod/llama@latest?"),
        ("prod/llama@zzz", "has no tag zzz; 'storectl tag prod/llama' lists all"),
        ("prod/lama", "did you mean prod/llama? 'storectl ls prod' lists all"),
        ("prdo", "namespace prdo has no runs; did you mean prod?"),
        ("nothing-like-it", "namespace nothing-like-it has no runs"),
    ],
)
def test_a_name_that_does_not_exist_gets_a_suggestion(
    path: str, expected: str, address: str
) -> None:
    assert expected in refusal(address, "stat", path)


@pytest.mark.parametrize("command", ["ls", "du", "stat", "gc"])
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_a_namespace_that_does_not_exist_is_refused(
    command: str, options: list[str], address: str
) -> None:
    result = storectl(address, command, "prdo", *options)

    assert (1, "") == (result.exit_code, result.stdout)
    assert "namespace prdo has no runs; did you mean prod?" in result.stderr


OF_CLICK_8_4 = pytest.mark.skipif(
    version("click").split(".")[:2] in (["8", "2"], ["8", "3"]),
    reason="earlier releases list possible options",
)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["lss"], "No such command 'lss'. Did you mean 'ls'?"),
        (["delete"], "No such command 'delete'. Did you mean 'rm'?"),
        pytest.param(*(["config", "sett"], "Did you mean 'set'?"), marks=OF_CLICK_8_4),
        pytest.param(
            *(["ls", "--limti", "3"], "Did you mean '--limit'?"), marks=OF_CLICK_8_4
        ),
        (["xyzzy"], "No such command 'xyzzy'."),
        (["describe", "a/b"], "No such command 'describe'. Did you mean 'stat'?"),
        pytest.param(
            *(["ls", "-o", "json"], "No such option '-o'. Did you mean '--json'?"),
            marks=OF_CLICK_8_4,
        ),
        (
            ["ls", "-n", "5"],
            "'--limit'? A namespace begins a path, as in 'storectl ls prod'.",
        ),
        (
            ["stat", "--namespace", "prod"],
            "A namespace begins a path, as in 'storectl ls prod'.",
        ),
        (["ls", "-A"], "'storectl ls' lists the runs of all namespaces."),
        (["ls", "--watch"], "'storectl watch' prints each change as it happens."),
        (["ls", "--sort-by=age"], "Did you mean '--sort'?"),
        (["get", "prod"], "'prod/llama-8b@latest:**' for all; storectl ls lists runs"),
        (
            ["get", "a/b@1:**", "-o", "json"],
            "json: --json prints JSON; -o json/ writes to a directory",
        ),
        (["ls", "--limit", "x"], "expected a whole number of at least 1, got 'x'"),
        (["console", "--port", "x"], "a whole number from 0 to 65535, got 'x'"),
        (
            ["tag", "a/b", "best", "500"],
            "the step is part of the path: storectl tag a/b@500 best",
        ),
        (["rm", "a/b@1..9"], "expected one step; name each, such as a/b@1 a/b@9"),
    ],
)
def test_a_wrong_command_or_option_gets_a_suggestion(
    arguments: list[str], expected: str
) -> None:
    result = storectl("127.0.0.1:1", *arguments)

    assert 2 == result.exit_code
    assert f"{expected}\n" in result.stderr


def test_help_and_version_are_commands_too() -> None:
    assert storectl("127.0.0.1:1", "ls", "--help").stdout == (
        CliRunner().invoke(main, ["help", "ls"], prog_name="storectl").stdout
    )
    (version,) = CliRunner().invoke(main, ["version"]).stdout.splitlines()
    assert version.startswith("storectl 0.")
    assert "\nCommands:\n" in CliRunner().invoke(main, ["help"]).stdout
    after = CliRunner().invoke(main, ["-s", "127.0.0.1:1", "version"])
    assert (0, f"{version}\n") == (after.exit_code, after.stdout)
