"""A policy whose metric no checkpoint has is rejected, and never deletes anything."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import storesvc_client as store
from tests.support.command_line import printed, refusal

THERE = r"there are loss, train/loss, lr\)"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[store.Client]:
    """A client of an embedded store."""
    with store.connect(f"file://{tmp_path}/store") as client:
        yield client


@pytest.fixture
def run(client: store.Client) -> store.Run:
    """A run with three checkpoints and their metrics."""
    run = client.run("a/b")
    for step in range(3):
        run.save(step, {"x": step}, metrics={"loss": -step, "train/loss": 1, "lr": 1})
    run.wait()
    return run


def best(metric: str, *, force: bool = False) -> store.KeepBest:
    return store.KeepBest(1, metric=metric, mode="min", force=force)


@pytest.mark.parametrize(
    "policy",
    [
        best("los"),
        store.KeepLatest(1) | best("los"),
        (store.KeepLatest(2) & best("los")) | best("loss"),
    ],
)
def test_a_metric_that_no_checkpoint_has_is_rejected_anywhere_in_a_policy(
    run: store.Run, policy: store.RetentionPolicy
) -> None:
    for call in (run.retention.set, run.retention.preview):
        with pytest.raises(store.InvalidRequestError, match=THERE) as caught:
            call(policy)
    assert "best.metric: expected a metric of the checkpoints of a/b" in str(
        caught.value
    )
    assert run.retention.get() is None
    with run.loop(every=store.Steps(1), keep=None):
        pass
    with (
        pytest.raises(store.InvalidRequestError, match=THERE),
        run.loop(every=store.Steps(1), keep=policy),
    ):
        pass


def test_a_policy_of_an_absent_metric_is_accepted_by_force(run: store.Run) -> None:
    policy = best("los", force=True)
    run.retention.set(policy)

    assert policy == run.retention.get()
    assert store.parse_policy("best(1, los, min, force)") == policy
    assert "best(1, los, min, force)" == store.format_policy(policy)
    run.retention.apply()
    assert [2] == run.steps()


def test_checkpoints_that_a_rule_keeps_without_the_metric_need_no_force(
    run: store.Run,
) -> None:
    policy = store.parse_policy("best(1, los, min, or-without)")
    run.retention.set(policy)
    assert {True} == {decision.kept for decision in run.retention.preview()}
    both = store.parse_policy("best(1, los, min, or-without, force)")
    assert "best(1, los, min, or-without, force)" == store.format_policy(both)


def test_a_policy_that_was_set_before_deletes_nothing_until_its_metric_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"file://{tmp_path}/store"
    with store.connect(url) as client:
        run = client.run("a/b")
        run.retention.set(best("los"))
        for step in range(3):
            run.save(step, {"x": step}, metrics={"loss": step})
        run.wait()
        with pytest.raises(store.InvalidRequestError, match="there are loss"):
            run.retention.apply()
    assert "its retention policy was not applied" in caplog.text
    with store.connect(url) as client:
        run = client.run("a/b")
        assert [0, 1, 2] == run.steps()
        run.update(1, metrics={"los": 1})
        run.retention.apply()
        assert [1, 2] == run.steps()


def test_a_loop_says_after_its_first_save_that_the_metric_of_keep_is_absent(
    client: store.Client, caplog: pytest.LogCaptureFixture
) -> None:
    run = client.run("a/new")
    every = store.Steps(1)
    with run.loop(every=every, keep=best("los"), create=True) as loop:
        for step in loop.steps(0, 3):
            save = loop.after(step, {"x": step}, metrics={"loss": 1})
            assert save is not None
            save.result()
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert 3 == len(errors)
    assert errors[0].startswith("keep= of a/new is not applied: retention policy, ")
    assert [0, 1, 2] == run.steps()


@pytest.mark.slow
def test_storectl_rejects_an_absent_metric_and_the_advice_works(
    run: store.Run, tmp_path: Path
) -> None:
    root = f"file://{tmp_path}/store"
    for more in ((), ("--dry-run",)):
        said = refusal(root, "retain", "a/b", "best(3, los, min)", *more)
        assert "expected a metric of the checkpoints of a/b (there are loss, " in said
    assert "best(3, los, min, force)" in printed(
        root, "retain", "a/b", "best(3, los, min, force)"
    )
    assert "best(3, loss, min)" in printed(root, "retain", "a/b", "best(3, loss, min)")
