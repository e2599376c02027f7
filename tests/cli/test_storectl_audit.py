"""storectl audit ls: the entries of a server's audit log, as a table and as JSON."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import storesvc_client as store
from storesvc_client.cli.commands.audit import LISTING
from storesvc_client.cli.output import align_rows, narrow_table
from tests.support.audited import Audited
from tests.support.command_line import document, printed, refusal, storectl, table


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Audited]:
    """A server with an audit log of which one line is no entry."""
    folder = tmp_path_factory.mktemp("audited")
    file = folder / "audit.log"
    file.write_bytes(b"\x1b[2J no entry\n")
    log = Audited(folder, file)
    with store.connect(log.server.address) as client:
        run = client.run("prod/llama")
        run.save(1, {"w": np.arange(9)}).result()
        run.tags.set("best", 1)
        with pytest.raises(store.PreconditionError):
            run.delete(1)  # it is tagged
        client.run("prod/other").save(7, {"w": np.zeros(1 << 18)}).result()
    yield log
    log.server.stop()


def rows(log: Audited, *arguments: str) -> list[list[str]]:
    """Returns stage, method, object and reason of each row."""
    _, *found = table(printed(log.server.address, "audit", "ls", *arguments))
    return [row[2:] for row in found]


@pytest.mark.slow
def test_audit_ls_lists_the_entries_newest_first(log: Audited) -> None:
    output = printed(log.server.address, "audit", "ls")
    header, *found = table(output)
    host = str(log.entries(after=1)[0]["server"])

    assert ["TIME", "PRINCIPAL", "STAGE", "METHOD", "OBJECT", "REASON"] == header
    assert ["local", "ended", "CommitUpload", "prod/other@7", "-"] == found[0][1:]
    assert "prod/other upload " in found[1][4]  # the intent of the commit
    assert ["local", "ended", "BeginUpload", "prod/other@7", "-"] == found[2][1:]
    assert ["local", "ended", "DeleteCheckpoint", "prod/llama@1"] in [
        row[1:5] for row in found
    ]
    assert [host, "started", "-", "-", "-"] == found[-2][1:]
    assert ["-", "-", "unreadable", "-", "-"] == found[-1][:5]
    assert "13 bytes at byte 0: expected a JSON object" in found[-1][5]
    assert "\x1b" not in output


def test_json_has_the_same_entries(log: Audited) -> None:
    found = document(log.server.address, "audit", "ls", "--limit", "2")

    assert ["ended", "intent"] == [entry["stage"] for entry in found]
    assert {"CommitUpload"} == {entry["method"] for entry in found}
    assert found[0]["time"].endswith("Z")
    assert found[0]["latency"].endswith("s")
    asked = [["uploads.commit", "prod/other"], ["uploads.write", "prod/other"]]
    assert asked == found[0]["permissions"]


MARKED = 1
"""The line that is no entry is in each list that reaches it."""


TAGGED: Final = [
    ["ended", "SetTag", "prod/llama tag best", "-"],
    ["intent", "SetTag", "prod/llama tag best", "-"],
]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--method", "DeleteCheckpoint"],
            [
                ["ended", "DeleteCheckpoint", "prod/llama@1", "CHECKPOINT_IN_USE"],
                ["intent", "DeleteCheckpoint", "prod/llama@1", "-"],
            ],
        ),
        (["--run", "prod/llama", "--method", "SetTag"], TAGGED),
        (["--run", "prod/other", "--method", "SetTag"], []),
        (["--principal", "user:ana"], []),
        (["--authentication", "anonymous"], []),
        (["--authentication", "local", "--method", "SetTag"], TAGGED),
        (["--stage", "denied", "--since", "1h"], []),
        (["--method", "SetTag", "--since", "2020-01-01T00:00Z"], TAGGED),
    ],
    ids=range(8),
)
def test_options_choose_entries(
    log: Audited, arguments: list[str], expected: list[list[str]]
) -> None:
    found = rows(log, *arguments)

    assert expected == found[:-MARKED]
    assert "unreadable" == found[-1][0]


def test_a_limit_says_that_there_may_be_more(log: Audited) -> None:
    some = storectl(log.server.address, "audit", "ls", "--limit", "3")
    all_of_them = storectl(log.server.address, "audit", "ls")

    assert 4 == some.stdout.count("\n")
    assert "3 entries of the log of" in some.stderr
    assert "" == all_of_them.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--since", "yesterday"], "expected an age, such as 24h"),
        (["--stage", "begun"], "'begun' is not one of"),
        (["--authentication", "unknown"], "'unknown' is not one of"),
        (["--run", "prod/llama@1"], "expected a namespace or a run"),
    ],
    ids=range(4),
)
def test_an_option_that_is_not_valid_is_a_usage_error(
    log: Audited, arguments: list[str], said: str
) -> None:
    result = storectl(log.server.address, "audit", "ls", *arguments)

    assert 2 == result.exit_code
    assert said in result.stderr


def test_an_unknown_rpc_gets_a_suggestion(log: Audited) -> None:
    message = refusal(log.server.address, "audit", "ls", "--method", "DeleteChekpoint")

    assert "did you mean DeleteCheckpoint?" in message


def test_a_server_without_a_log_is_an_error(server_address: str) -> None:
    message = refusal(server_address, "audit", "ls")

    assert "this server has none" in message


def test_a_narrow_terminal_has_times_stages_and_methods_in_full(log: Audited) -> None:
    _header, *found = table(printed(log.server.address, "audit", "ls"))

    shown = narrow_table(LISTING.table.columns, found, room=70)

    assert ("TIME", "PRINCIPAL", "STAGE", "METHOD") == tuple(
        column.title for column in shown.columns[:4]
    )
    assert max(map(len, align_rows(shown.columns, shown.rows))) <= 70
    assert [row[2:4] for row in found] == [[*row[2:4]] for row in shown.rows]


def entry_keys(found: list[dict[str, Any]]) -> set[str]:
    return {key for entry in found for key in entry}


@pytest.mark.slow
def test_no_entry_has_a_token_or_a_label(log: Audited, tmp_path: Path) -> None:
    found = document(log.server.address, "audit", "ls")

    assert not {"token", "labels", "metrics"} & entry_keys(found)
    assert "no entry" not in json.dumps(found)
