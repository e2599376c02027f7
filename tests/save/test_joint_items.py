"""Items of a job: process 0's, and values that each process saves for itself."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import storesvc_client as store
from storesvc_client._job.job import JointSave
from storesvc_client._save.items import ItemExchange, checked_items
from tests.conftest import gcs_root
from tests.save import item_parts
from tests.support.jax_job import run_job
from tests.support.job_parts import RUN
from tests.support.thread_job import ThreadJob, ThreadProcess

PROCESSES = 3


@pytest.mark.slow
def test_each_process_saves_its_own_values_and_gets_them_back(
    bucket_storage: None,
) -> None:
    root = gcs_root()
    part = "tests.save.item_parts:saves"
    outcomes = run_job(part, PROCESSES, devices=1, target=root)

    size = sum(range(PROCESSES)) * 1000
    for index, outcome in enumerate(outcomes):
        refusal = outcome.pop("alone")
        assert "expected to be read by the 3 processes that saved a value" in refusal
        assert "got a job of 1; per_process('data') returns" in refusal
        config = {"from": 0, "padding": ""}
        assert {
            "sent": 0,
            "name": "a text",
            "large": True,
            "config": config,
            "own": [item_parts.own_value(index), index * 1000],
            "opened": item_parts.own_value(index),
            "all": [0, 1, 2],
            "count": PROCESSES,
            "size": size,
            "alone config": config,
        } == outcome
    with store.connect(root) as client:  # one process reads what all saved
        run = client.run(RUN)
        items = run.items(2)
        assert [item_parts.own_value(i) for i in range(3)] == items.per_process("data")
        assert bytes([2]) * 2000 == items.encoded("raw", 2)
        with pytest.raises(
            store.MismatchError, match=r"by the 3 processes .* a job of 1"
        ):
            items["data"]
        assert () == run.verify(2).damages
        assert run.diff(1, 2).is_same

    for outcome in run_job("tests.save.item_parts:reads", 2, devices=1, target=root):
        assert (
            "the 3 processes that saved a value each, got a job of 2"
            in (outcome["error"])
        )
        assert [0, 1, 2] == outcome["all"]
        assert {"from": 0, "padding": ""} == outcome["config"]


@pytest.mark.slow
def test_items_that_do_not_go_together_are_rejected_in_all_processes(
    tmp_path: Path,
) -> None:
    root = (tmp_path / "store").as_uri()
    first, second = run_job("tests.save.item_parts:fails", 2, devices=1, target=root)

    # the error of the process that finds it; the other one has it as the cause
    names = r"pass the same names in all processes of the job$"
    expected = [
        (0, rf"Invalid.* process 0 \(.* passes a, process 1 .* a, b; {names}"),
        (0, rf"Invalid.* process 0 \(.* passes a, process 1 .* none; {names}"),
        (1, rf"Invalid.* process 0 \(.* passes none, process 1 .* a; {names}"),
        (1, r"Invalid.* 'a' is one value for all in process 0 \(.*, but a PerProcess "),
        (0, r"Invalid.* 'a': process 0 \(.* text, process 1 \(.* bytes; pass"),
        (1, r"InvalidRequestError: save to tests/job: items=: item 'a': .* got tuple"),
        (1, r"PreconditionError: .* item 'a': expected json of 1 bytes, got none; the"),
        (0, r"InvalidRequestError: save to tests/job: items=: item 'a': .* got tuple"),
    ]
    for step, (finder, pattern) in enumerate(expected, start=1):
        errors = first[step - 1], second[step - 1]
        assert re.match(pattern, errors[finder]), errors[finder]
        cause = errors[finder].partition(": ")[2]
        assert errors[1 - finder].endswith(cause)
        assert errors[1 - finder].startswith(
            f"PeerFailedError: save of tests/job@{step} failed in another process of "
            f"the job: process {finder} ("
        )
    # the call raises its own error only, and the handle the error of another process
    assert ("", "InvalidRequestError") == (first[8], second[8].partition(":")[0])
    assert ["0", "1"] == [first[9], second[9]]


# --- the agreement, between threads ------------------------------------------------


def publish_items(process: ThreadProcess, items: Any) -> ItemExchange:
    """Begins the exchange of the items of a process."""
    place = "save of a/b@1"
    joint = JointSave(process, "a/b", 1)
    return ItemExchange(joint, place, checked_items(place, items))


def agreed(count: int, items: Any, *, seconds: float = 5) -> list[Any]:
    """Returns the rows that each process agrees on, or its error."""

    def part(process: ThreadProcess) -> Any:
        place = "save of a/b@1"
        joint = JointSave(process, "a/b", 1)
        try:
            own = checked_items(place, items(process.index))
            exchange = ItemExchange(joint, place, own)
            return exchange.agree_items(seconds=seconds)
        except store.StoreError as e:
            joint.fail(e)
            raise

    return ThreadJob(count).run(part)


def test_all_processes_agree_on_rows_and_write_their_own_values() -> None:
    rows = agreed(12, lambda i: {"z": "x" * i, "data": store.PerProcess("x" * i)})

    for index, own in enumerate(rows):
        keys = [row.name.key for row in own]
        assert sorted(keys) == keys
        assert [("%item/z", 0)] + [(f"%item/data/{i}", i) for i in range(12)] == sorted(
            ((row.name.key, row.size) for row in own),
            key=lambda each: (each[0][6] != "z", each[1]),
        )
        written = {row.name.process for row in own if row.data is not None}
        assert ({None, 0} if index == 0 else {index}) == written


OWN = store.PerProcess
DIFFERING: dict[str, tuple[list[Any], int, str]] = {
    "other names": (
        [{"a": OWN(1)}, {"a": OWN(1), "b": 1}],
        0,
        "process 0 passes a, process 1 a, b; pass the same names",
    ),
    "no items in process 0": (
        [None, {"a": 1}],
        1,
        "process 0 passes none, process 1 a",
    ),
    "no items in process 1": (
        [{"a": OWN(1)}, None],
        0,
        "process 1 none; pass the same",
    ),
    "per process in one": (
        [{"a": 1}, {"a": OWN(1)}],
        1,
        "'a' is one value for all in process 0, but a PerProcess in process 1",
    ),
    "per process in the other": (
        [{"a": OWN(1)}, {"a": 1}],
        0,
        "'a' is a PerProcess in process 0, but one value for all in process 1",
    ),
    "of another kind": (
        [{"a": OWN("x")}, {"a": OWN(b"x")}],
        0,
        "item 'a': process 0 passes text, process 1 bytes; pass values of one kind",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("items", "finder", "match"), DIFFERING.values(), ids=DIFFERING
)
def test_items_that_differ_in_more_than_their_values_are_rejected(
    items: list[Any], finder: int, match: str
) -> None:
    errors = agreed(2, items.__getitem__)

    assert isinstance(errors[finder], store.InvalidRequestError)
    assert match in str(errors[finder])
    if finder == 0 and items[1]:  # process 0 may have ended its wait, or had none
        assert isinstance(errors[1], store.PeerFailedError)
        assert match in str(errors[1])


def test_values_of_process_0_may_be_of_another_kind_than_those_of_others() -> None:
    (one, other) = agreed(2, lambda i: {"a": "x" * 3 if i == 0 else b"y"})

    assert ("%item/a", 3, b"xxx") == (one[0].name.key, one[0].size, one[0].data)
    assert ("%item/a", 3, None) == (other[0].name.key, other[0].size, other[0].data)
    assert one[0].kind == other[0].kind


def test_a_process_without_items_waits_for_none() -> None:
    assert [[], []] == agreed(2, lambda i: None, seconds=0)


def test_items_of_process_0_alone_do_not_make_it_wait() -> None:
    board = ThreadJob(2)
    exchange = publish_items(board.process(0), {"a": [1]})

    (row,) = exchange.agree_items(seconds=0)
    assert ("%item/a", b"[1]") == (row.name.key, row.data)
    (text,) = (text for key, text in board.board.items() if key.endswith("all-items"))
    assert [[["a", "first", 7, 3, ""]]] == [
        json.loads(each) for each in json.loads(text)
    ]


class Iterator:
    """A data iterator of a process."""

    def __init__(self, at: int) -> None:
        self.at = at

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_an_iterator_is_saved_by_each_process_and_a_replicated_one_once() -> None:
    rows = agreed(3, lambda i: {"a": Iterator(i), "b": store.Replicated(Iterator(7))})

    for index, own in enumerate(rows):
        assert {
            **{f"%item/a/{i}": None for i in range(3)},
            "%item/b": None,
            f"%item/a/{index}": b'{"at":%d}' % index,
            **({"%item/b": b'{"at":7}'} if index == 0 else {}),
        } == {row.name.key: row.data for row in own}


@pytest.mark.slow
@pytest.mark.parametrize("others", [{}, {"own": store.PerProcess(1)}], ids=str)
def test_a_replicated_value_must_be_equal_in_all_processes(
    others: dict[str, Any],
) -> None:
    def items(index: int) -> dict[str, Any]:
        return {"data": store.Replicated(Iterator(7 + (index == 1)))} | others

    first, second = agreed(2, items)

    finder, other = (first, second) if others else (second, first)
    assert isinstance(finder, store.InvalidRequestError)
    assert re.search(
        r"items=: item 'data': expected an equal value in all processes of the job, "
        r"got another one in process 1 than in process 0; a data iterator must have "
        r"gone through as many batches in each$",
        str(finder),
    )
    if others:
        assert isinstance(other, store.PeerFailedError)


def test_a_replicated_value_must_be_one_in_all_processes() -> None:
    _, second = agreed(2, lambda i: {"a": store.Replicated(1) if i else 1})

    assert isinstance(second, store.InvalidRequestError)
    assert (
        "item 'a' is one value for all in process 0, but Replicated in process 1; "
        "pass it in the same way in all processes of the job" in str(second)
    )


def test_a_process_that_does_not_save_the_step_is_named() -> None:
    exchange = publish_items(ThreadJob(2).process(0), {"a": OWN(1)})

    with pytest.raises(
        store.UnavailableError, match="save of a/b@1: items=: process 1 has not begun"
    ):
        exchange.agree_items(seconds=0.2)


@pytest.mark.slow
def test_the_failure_of_another_process_ends_the_wait() -> None:
    job = ThreadJob(2)
    JointSave(job.process(1), "a/b", 1).fail(ValueError("no memory"))
    exchange = publish_items(job.process(0), {"a": OWN(1)})

    with pytest.raises(store.PeerFailedError, match="process 1: no memory"):
        exchange.agree_items(seconds=60)


class GoneBoard(ThreadProcess):
    """A process whose coordination service does not answer."""

    def post(self, key: str, text: str) -> None:
        raise store.UnavailableError("no board")


def test_a_board_that_is_gone_fails_only_saves_with_items() -> None:
    for index in (0, 1):
        process = GoneBoard(ThreadJob(2), index)
        assert [] == publish_items(process, {}).agree_items(seconds=0)
        with pytest.raises(store.UnavailableError, match="no board"):
            publish_items(process, {"a": 1})


def test_a_process_that_saves_another_step_is_named_with_it() -> None:
    job = ThreadJob(2)
    JointSave(job.process(1), "a/b", 2)
    exchange = publish_items(job.process(0), {"a": OWN(1)})

    with pytest.raises(
        store.UnavailableError,
        match=r"process 1 \(its last save is of step 2\) has not",
    ):
        exchange.agree_items(seconds=0.1)
