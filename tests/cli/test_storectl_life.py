"""storectl changes checkpoints: tags, updates, deletion, undeletion, purges."""

import json
import subprocess
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from storesvc_client.cli.group import COMMANDS
from tests.support.command_line import COMMAND, Storectl, on_a_terminal, storectl, table
from tests.support.contract import Writer


@pytest.fixture
def saved(run: store.Run) -> store.Run:
    """A run with the steps 10, 20 and 30, of which a leaf stays the same."""
    same = np.ones(1000, np.float32)
    for step in (10, 20, 30):
        tree = {"params": {"same": same, "w": np.full(3, step, np.float32)}}
        base = step - 10 or None  # a small tree is sent whole without one
        run.save(step, tree, base=base, metrics={"loss": 3 - step / 100}).result()
    return run


@pytest.fixture
def ctl(server_address: str) -> Storectl:
    """storectl for the store of the run."""
    return Storectl(server_address)


def steps(found: list[dict[str, Any]]) -> list[int]:
    return [checkpoint["step"] for checkpoint in found]


# --- tags -------------------------------------------------------------------------


def test_a_path_takes_a_tag_in_place_of_a_step(saved: store.Run, ctl: Storectl) -> None:
    said = ctl.printed("tag", f"{saved.name}@20", "best")

    assert f"{saved.name}@best is step 20\n" == said
    assert 20 == ctl.document("stat", f"{saved.name}@best")["step"]
    (leaf,) = ctl.document("ls", f"{saved.name}@best:params/w")
    assert "params/w" == leaf["key"]
    (summary,) = ctl.document("get", f"{saved.name}@best:**/w")
    assert 20 == summary["max"]
    assert ctl.printed("tree", f"{saved.name}@best").startswith(f"{saved.name}@20 ")
    assert ctl.printed("verify", f"{saved.name}@best").startswith(f"{saved.name}@20: ")


def test_tags_are_listed_by_name_and_move(saved: store.Run, ctl: Storectl) -> None:
    ctl.printed("tag", f"{saved.name}@10", "prod", "--protected")
    ctl.printed("tag", f"{saved.name}@10", "best")
    ctl.printed("tag", f"{saved.name}@latest", "best")

    header, best, prod = table(ctl.printed("tag", saved.name))

    assert ["TAG", "STEP", "SET", "PROTECTED"] == header
    assert ["best", "30", "no"] == [best[0], best[1], best[3]]
    assert ["prod", "10", "yes"] == [prod[0], prod[1], prod[3]]
    first, _ = ctl.document("tag", saved.name)
    assert ["best", 30, False] == [first[k] for k in ("name", "step", "protected")]
    assert first["update_time"].endswith("Z")


def test_a_tag_is_deleted_by_its_name(saved: store.Run, ctl: Storectl) -> None:
    for name in ("one", "two"):
        ctl.printed("tag", f"{saved.name}@10", name)

    assert f"tag one of {saved.name} deleted\n" == ctl.printed(
        "tag", saved.name, "one", "--delete"
    )
    gone = ctl.document("tag", saved.name, "two", "--delete")

    assert {"run": saved.name, "tag": "two", "deleted": True} == gone
    assert [] == ctl.document("tag", saved.name)


def test_a_protected_tag_moves_with_its_etag_and_stays_protected(
    saved: store.Run, ctl: Storectl
) -> None:
    name, path = saved.name, f"{saved.name}@20"
    etag = ctl.document("tag", f"{name}@10", "prod", "--protected")["etag"]

    assert f"'storectl tag {name} --json' shows" in ctl.refusal("tag", path, "prod")
    assert "--etag" in ctl.refusal("tag", name, "prod", "--delete")
    assert f"{name}@prod is step 20, protected\n" == ctl.printed(
        "tag", path, "prod", "--etag", etag
    )
    assert "it has changed since" in ctl.refusal("tag", path, "prod", "--etag", etag)
    # as it is in JSON, and as a shell that took the quotes off passes it on
    (moved,) = ctl.document("tag", name)
    bare = moved["etag"].strip('"')
    free = ctl.document("tag", path, "prod", "--unprotected", "--etag", bare)
    assert not free["protected"]


def test_an_absent_tag_is_an_error_that_names_similar_tags(
    saved: store.Run, ctl: Storectl
) -> None:
    ctl.printed("tag", f"{saved.name}@10", "best")

    for arguments in (
        ["stat", f"{saved.name}@bets"],
        ["get", f"{saved.name}@bets:**"],
        ["tag", f"{saved.name}@bets", "good"],
        ["tag", saved.name, "bets", "--delete"],
    ):
        sentence = ctl.refusal(*arguments)
        assert f"has no tag bets; did you mean {saved.name}@best?" in sentence


def test_a_deleted_checkpoint_cannot_be_tagged_or_updated(
    saved: store.Run, ctl: Storectl
) -> None:
    path = f"{saved.name}@10"
    ctl.printed("rm", path)

    assert "undelete it before" in ctl.refusal("tag", path, "best")
    assert "undelete it before" in ctl.refusal("update", path, "--pin")


@pytest.mark.parametrize(
    "line",
    [
        *("tag {run}", "tag {run}@10 best", "ls {run} --deleted", "stat {run}@10"),
        *("update {run}@10 --pin", "rm {run}@10", "undelete {run}@10", "hold {run}"),
        *("hold {run}@10 -- true", "uploads {run}"),
    ],
)
def test_a_run_that_is_not_there_is_one_sentence(line: str, ctl: Storectl) -> None:
    name = "tests/no-such-run"

    assert name in ctl.refusal(*line.format(run=name).split())


# --- updates ----------------------------------------------------------------------


def test_update_sets_what_is_given_and_leaves_the_rest(
    saved: store.Run, ctl: Storectl
) -> None:
    path = f"{saved.name}@20"
    ctl.printed("update", path, "--label", "stage=a=b c", "--label", "by=me", "--pin")

    both = ["--metric", "eval/loss=2.5", "--remove-label", "by", "--remove-label", "x"]
    text = ctl.printed("update", path, *both)

    assert [
        [path],
        ["pinned", "yes"],
        ["metrics", "eval/loss=2.5 loss=2.8"],
        ["labels", "stage='a=b c'"],
    ] == table(text)
    found = ctl.document("update", path, "--unpin", "--remove-metric", "loss")
    assert [False, {"eval/loss": 2.5}] == [found["pinned"], found["metrics"]]


@pytest.mark.slow
def test_updates_at_once_lose_nothing(server_address: str, saved: store.Run) -> None:
    path = f"{saved.name}@20"
    update = [*COMMAND, "-s", server_address, "update", path, "--json"]

    updates = [
        subprocess.Popen([*update, "--metric", f"m{n}={n}"], stdout=subprocess.DEVNULL)
        for n in range(4)
    ]

    assert [0] * 4 == [process.wait() for process in updates]
    metrics = saved.checkpoint(20).metrics
    assert {f"m{n}": n for n in range(4)} | {"loss": 2.8} == metrics


# --- deletion ---------------------------------------------------------------------


def test_rm_prints_how_to_undelete_and_until_when(
    saved: store.Run, ctl: Storectl
) -> None:
    path = f"{saved.name}@20"

    said = ctl.printed("rm", path, "--purge-delay", "12h")

    start, end = f"{path} deleted; until ", f": storectl undelete {path}\n"
    assert said.startswith(start)
    assert said.endswith(end)
    until = datetime.fromisoformat(said.removeprefix(start).removesuffix(end))
    assert abs(until - datetime.now(UTC) - timedelta(hours=12)) < timedelta(minutes=5)
    assert [30, 10] == steps(ctl.document("ls", saved.name))
    assert f"{path} undeleted\n" == ctl.printed("undelete", path)
    assert [30, 20, 10] == steps(ctl.document("ls", saved.name))


def test_rm_takes_several_checkpoints_and_continues_after_an_error(
    saved: store.Run, ctl: Storectl
) -> None:
    saved.tags.set("best", 10)
    paths = [f"{saved.name}@{step}" for step in (10, 20, 25, 30)]

    result = ctl.run("rm", *paths, "--json")

    assert 1 == result.exit_code
    one, other = (
        json.loads(line)["error"]["message"] for line in result.stderr.splitlines()
    )
    assert one.startswith(f"{paths[0]} is kept by tag best; ")
    assert other.startswith(f"{paths[2]} does not exist; ")
    assert [30, 20] == steps(ctl.document("ls", saved.name, "--deleted"))
    assert [20, 30] == steps(ctl.document("undelete", paths[1], paths[3]))


def test_a_pinned_or_tagged_checkpoint_is_not_deleted(
    saved: store.Run, ctl: Storectl
) -> None:
    saved.update(10, pinned=True)
    saved.tags.set("best", 20)

    for options in [], ["--purge"]:
        assert "is kept by a pin" in ctl.refusal("rm", f"{saved.name}@10", *options)
        assert "is kept by tag best" in ctl.refusal("rm", f"{saved.name}@20", *options)
    assert [30, 20, 10] == [checkpoint.step for checkpoint in saved.checkpoints()]


def test_deleted_ones_are_listed_with_their_times(
    saved: store.Run, ctl: Storectl
) -> None:
    nothing = ctl.run("ls", saved.name, "--deleted")
    assert ("", "storectl: no deleted checkpoints\n") == (
        nothing.stdout,
        nothing.stderr,
    )
    ctl.printed("rm", f"{saved.name}@10", f"{saved.name}@20", "--purge-delay", "0s")

    header, newest, oldest = table(ctl.printed("ls", saved.name, "--deleted"))

    assert ["STEP", "DELETED", "PURGE", "SIZE", "loss", "LABELS"] == header
    assert ["20", "10"] == [newest[0], oldest[0]]
    assert "2.8" in newest


def test_a_purge_is_permanent_and_frees_the_step(
    saved: store.Run, ctl: Storectl
) -> None:
    path = f"{saved.name}@20"
    ctl.printed("rm", f"{saved.name}@10")

    assert f"{path} purged\n" == ctl.printed("rm", "--purge", path)
    (other,) = ctl.document("rm", "--purge", "--yes", f"{saved.name}@10")

    assert [10, True] == [other["step"], other["purged"]]
    assert f"{path} does not exist" in ctl.refusal("undelete", path)
    assert [] == ctl.document("ls", saved.name, "--deleted")
    saved.save(20, {"w": 1}).result()


def test_a_purge_of_what_is_held_leaves_it_deleted(
    saved: store.Run, ctl: Storectl
) -> None:
    path = f"{saved.name}@20"

    with saved.holds.create(20, owner="eval"):
        sentence = ctl.refusal("rm", "--purge", path)

    assert sentence.startswith(f"{path} is kept by hold ")
    assert "by eval; " in sentence
    assert "until then it stays deleted and can be undeleted" in sentence
    assert [20] == steps(ctl.document("undelete", path))


@pytest.mark.slow
def test_a_purge_asks_on_a_terminal(server_address: str, saved: store.Run) -> None:
    arguments = ["-s", server_address, "rm", "--purge", f"{saved.name}@20"]

    text = on_a_terminal(*arguments, typed=b"\n", code=1)
    assert f"Purge {saved.name}@20 permanently? [y/N]" in text
    assert 20 == saved.checkpoint(20).step

    assert f"{saved.name}@20 purged" in on_a_terminal(*arguments, typed=b"y\n")
    text = on_a_terminal(*arguments[:-1], "--yes", f"{saved.name}@10")
    assert f"{saved.name}@10 purged" == text.strip()


# --- stat -------------------------------------------------------------------------


def test_stat_shows_uid_tags_and_base_of_a_checkpoint(
    saved: store.Run, ctl: Storectl
) -> None:
    path = f"{saved.name}@20"
    saved.tags.set("good", 20)
    saved.tags.set("best", 20)
    saved.update(20, pinned=True, labels={"stage": "final"})

    rows = dict(row for row in table(ctl.printed("stat", path))[1:])
    found = ctl.document("stat", path)

    tags = "best (by local), good (by local)"
    assert [tags, "yes", "stage=final", "loss=2.8"] == [
        rows[name] for name in ("tags", "pinned", "labels", "metrics")
    ]
    assert [f"{saved.name}@10", "16 B"] == [rows["base"], rows["own"]]
    assert rows["shared"].startswith("3.9 KiB (4,00")
    assert [["best", "good"], 10, True] == [
        found[name] for name in ("tags", "base_step", "pinned")
    ]
    assert found["stored_bytes"] == found["own_bytes"] + found["shared_bytes"]


def test_stat_shows_a_deleted_checkpoint_too(saved: store.Run, ctl: Storectl) -> None:
    path = f"{saved.name}@20"
    ctl.printed("rm", path)

    rows = table(ctl.printed("stat", path))
    found = ctl.document("stat", path)

    assert {"deleted", "purge"} < {row[0] for row in rows}
    assert found["delete_time"] < found["purge_time"]
    assert "kinds" not in found  # its leaves are not for reading


# --- uploads ----------------------------------------------------------------------


def test_live_uploads_are_listed_and_aborted(
    server_address: str, saved: store.Run, ctl: Storectl
) -> None:
    writer = Writer(server_address, saved.name, 40, writers=2)
    upload = writer.begin(owner="host a").name.rpartition("/")[2]

    header, row = table(ctl.printed("uploads", saved.name))
    (found,) = ctl.document("uploads", saved.name)

    titles = ["UPLOAD", "STEP", "BEGAN", "RENEWED", "WRITERS", "WAITS FOR", "OWNER"]
    assert titles == header
    assert [upload, "40", "0 of 2", "0, 1", "host a"] == [*row[:2], *row[4:7]]
    assert [0, 1] == found["unfinished_writers"]
    assert [upload, "live", "600s"] == [found[k] for k in ("id", "state", "lease")]
    abort = ["uploads", saved.name, "--abort", upload]
    assert f"upload {upload} of {saved.name}@40 aborted\n" == ctl.printed(*abort)
    assert "has already ended" in ctl.refusal(*abort)
    assert [] == ctl.document("uploads", saved.name)


def test_uploads_of_all_runs_are_listed_even_of_those_without_a_checkpoint(
    server_address: str, saved: store.Run, ctl: Storectl
) -> None:
    namespace = f"uploads-{uuid.uuid4().hex[:8]}"
    began = {}
    for name in (f"{namespace}/a", f"{namespace}/b", saved.name):
        writer = Writer(server_address, name, 40)
        began[name] = writer.begin().name.rpartition("/")[2]

    header, first, second = table(ctl.printed("uploads", namespace))
    everywhere = {found["run"]: found["id"] for found in ctl.document("uploads")}

    assert ["RUN", "UPLOAD", "STEP"] == header[:3]
    of_namespace = [[n, i, "40"] for n, i in began.items() if n != saved.name]
    assert of_namespace == [first[:3], second[:3]]
    assert began == {name: everywhere[name] for name in began}
    none = ctl.run("uploads", f"{namespace}-other")
    assert (0, "", "storectl: no uploads\n") == (
        none.exit_code,
        none.stdout,
        none.stderr,
    )


def test_du_shows_a_run_whose_first_save_is_in_progress(
    server_address: str, ctl: Storectl
) -> None:
    namespace = f"uploads-{uuid.uuid4().hex[:8]}"
    Writer(server_address, f"{namespace}/first", 1).begin()

    header, row = table(ctl.printed("du", namespace))

    assert ["RUN", "CHECKPOINTS", "UPLOADS"] == header[:3]
    assert [f"{namespace}/first", "0", "1"] == row[:3]
    assert 1 == ctl.document("du", f"{namespace}/first")["upload_count"]


def test_only_a_live_upload_can_be_aborted(
    server_address: str, saved: store.Run, ctl: Storectl
) -> None:
    committed = saved.checkpoint(10).uid
    abort = ["uploads", saved.name, "--abort"]

    assert f"'storectl rm {saved.name}@10'" in ctl.refusal(*abort, committed)
    assert "has no upload 0000" in ctl.refusal(*abort, "0" * 32)
    assert "expected 32 lower-case hexadecimal digits" in ctl.refusal(*abort, "x")
    upload = Writer(server_address, saved.name, 40).begin().name.rpartition("/")[2]
    assert "ended" == ctl.document(*abort, upload)["state"]
    assert 10 == saved.checkpoint(10).step


# --- wrong usage ------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        *("tag a/b@10", "tag a/b best", "tag a/b --delete", "tag a/b@10 best --delete"),
        *("tag a/b@10 latest", "tag a/b@10 1st", "tag a/b@10:params/** best"),
        *("stat a/b@best.", "stat a/b@", "ls --deleted", "ls a --deleted"),
        *("ls a/b@10 --deleted", "update a/b@10", "update a/b@10 --label stage"),
        *("update a/b@10 --label =x", "update a/b@10 --metric loss=low"),
        *("update a/b@10 --label x=1 --remove-label x", "rm", "rm a/b"),
        *("rm a/b@latest", "rm a/b@best", "rm a/b@10:params/**"),
        *("rm a/b@10 --purge-delay soon", "rm a/b@10 --purge-delay 3"),
        *("rm a/b@10 --purge-delay 3d --purge", "rm a/b@10 --yes"),
        *("undelete a/b@latest", "uploads a --abort 00000000000000000000000000000000"),
        *("uploads --abort 00000000000000000000000000000000", "uploads a/b@10"),
    ],
)
def test_contradictory_arguments_are_wrong_usage(line: str) -> None:
    result = storectl("127.0.0.1:1", *line.split())

    assert (2, "") == (result.exit_code, result.stdout)


@pytest.mark.parametrize("delay", ["-1s", "366d", "999999999d"])
def test_a_delay_out_of_bounds_is_one_sentence(
    delay: str, saved: store.Run, ctl: Storectl
) -> None:
    sentence = ctl.refusal("rm", f"{saved.name}@10", "--purge-delay", delay)

    assert "purge_delay" in sentence
    assert "expected" in sentence
    assert 10 == saved.checkpoint(10).step


def test_the_summary_of_each_command_fits_into_the_list_of_commands() -> None:
    text = storectl("127.0.0.1:1", "--help").stdout

    listed = text.partition("Commands:")[2].splitlines()[1:]
    assert list(COMMANDS) == [line.split()[0] for line in listed]
    assert [] == [line for line in listed if line.endswith("...")]


def test_a_checkpoint_that_is_not_deleted_is_not_undeleted(
    run: store.Run, ctl: Storectl
) -> None:
    run.save(1, {"x": 1}).result()

    sentence = ctl.refusal("undelete", f"{run.name}@1")

    assert f"{run.name}@1 is not deleted" == sentence
