"""The public surface: names, groups of a run, options, durations, handles."""

import inspect
import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import storesvc_client as store

TREE = {"x": np.arange(8.0)}
RUN = {
    *("checkpoint", "checkpoints", "configure", "copy_to", "delete", "diff", "export"),
    *("holds", "import_from", "info", "items", "latest", "latest_step", "loop"),
    *("migrations", "name"),
    *("open", "plot", "purge", "restore", "retention", "save", "steps", "tags"),
    *("timeline", "trace", "undelete", "update", "uploads", "usage", "verify"),
    *("wait", "watch"),
}


def visible(value: object) -> set[str]:
    """Returns the public attributes of an object."""
    return {name for name in dir(value) if not name.startswith("_")}


def test_the_public_names_are_sorted_and_all_that_is_visible() -> None:
    names = vars(store)["__all__"]
    assert sorted(names) == dir(store)
    assert len({*names}) == len(names)
    assert all(name == getattr(store, name).__name__ for name in dir(store))


@pytest.mark.parametrize("name", dir(store))
def test_each_public_name_and_method_has_a_docstring(name: str) -> None:
    value: Any = getattr(store, name)

    assert value.__doc__
    assert not value.__doc__.startswith(f"{name}(")  # that of dataclasses
    for method in visible(value) if isinstance(value, type) else ():
        found: Any = inspect.getattr_static(value, method)
        if isinstance(found, property | classmethod) or inspect.isfunction(found):
            assert found.__doc__, f"{name}.{method}"


def test_a_run_has_few_methods_and_groups(run: store.Run) -> None:
    assert visible(run) == RUN
    assert {"delete", "list", "set"} == visible(run.tags)
    assert {"create", "list", "release"} == visible(run.holds)
    assert {"apply", "get", "preview", "set"} == visible(run.retention)
    assert {"abort", "get", "list"} == visible(run.uploads)


def test_handles_show_no_internals(run: store.Run) -> None:
    save = run.save(1, TREE)
    save.result()
    opened = run.open()

    methods = {"done", "exception", "rehearsal", "report", "result", "step"}
    assert methods == visible(save)
    methods = {
        *("document", "export", "info", "items", "leaves", "map", "name", "pictures"),
        *("read", "report", "restore", "statistics"),
    }
    assert methods == visible(opened)
    assert {"chunks", "layers", "sharding", "treemap"} == visible(opened.pictures)


def test_the_values_of_a_run_have_short_texts(run: store.Run) -> None:
    save = run.save(1, TREE)
    checkpoint = save.result()
    opened = run.open()
    shown = [
        *(run, run.tags, run.holds, run.retention, run.uploads, run.info()),
        *(save, checkpoint, opened, opened.leaves["x"]),
        *(run.uploads.get(checkpoint.uid), run.tags.set("best", 1)),
    ]

    assert all(len(repr(value)) < 320 for value in shown)
    assert f"<Checkpoint {run.name}@1, 1 leaf, 64 bytes>" == repr(checkpoint)
    assert "<LeafInfo x float64[8]>" == repr(opened.leaves["x"])


def test_groups_act_on_their_run(client: store.Client, run: store.Run) -> None:
    run.save(1, TREE).result()
    run.save(2, TREE).result()

    assert 1 == run.tags.set("best", 1).step
    assert ["best"] == [tag.name for tag in run.tags.list()]
    run.tags.delete("best")
    assert [] == list(run.tags.list())

    hold = run.holds.create(1, ttl=60)
    (found,) = run.holds.list()
    assert (1, timedelta(minutes=1)) == (found.step, found.ttl)
    run.holds.release(found.id)
    assert [] == list(run.holds.list())
    hold.close()

    policy = store.KeepLatest(1)
    assert [True, False] == [d.kept for d in run.retention.preview(policy)]
    info = run.retention.set(policy, purge_delay=86_400)
    assert timedelta(days=1) == info.purge_delay
    assert policy == run.retention.get()
    assert [True, False] == [d.kept for d in run.retention.apply()]


def test_the_latest_step_and_all_steps_of_a_run(run: store.Run) -> None:
    assert run.latest_step() is None
    assert [] == run.steps()

    for step in (3, 1, 20):
        run.save(step, TREE).result()
    run.delete(3)

    assert 20 == run.latest_step()
    assert [1, 20] == run.steps()
    assert [3] == [found.step for found in run.checkpoints(deleted=True)]
    assert [20, 1] == [found.step for found in run.checkpoints()]


def test_the_exception_of_a_save_is_returned_and_then_seen(run: store.Run) -> None:
    good, bad = run.save(1, TREE), run.save(1, TREE, if_busy="queue")

    assert good.exception() is None
    assert isinstance(bad.exception(timedelta(minutes=1)), store.AlreadyExistsError)
    run.wait()  # would raise an error that was not seen
    run.save(2, TREE).result()


def test_a_timeout_leaves_the_exception_of_a_save_unseen(run: store.Run) -> None:
    goes_on = threading.Event()

    def stop(progress: store.Progress) -> None:
        goes_on.wait(60)
        if progress.is_done:
            raise ZeroDivisionError

    save = run.save(1, TREE, progress=stop)
    for timeout in (0, 0.01, timedelta(milliseconds=10)):
        with pytest.raises(TimeoutError):
            save.exception(timeout)
        with pytest.raises(TimeoutError):
            save.result(timeout)
    goes_on.set()

    with pytest.raises(ZeroDivisionError):
        run.wait()


STEPS = itertools.count(10)
DURATIONS: dict[str, Callable[[store.Run, Any], object]] = {
    "restore": lambda run, length: run.restore(deadline=length),
    "open": lambda run, length: run.open(deadline=length),
    "restore of an open one": lambda run, length: run.open().restore(deadline=length),
    "result": lambda run, length: run.save(next(STEPS), TREE).result(length),
    "report": lambda run, length: run.save(next(STEPS), TREE).report(length),
    "lease": lambda run, length: run.save(
        next(STEPS), TREE, distributed=store.Distributed(lease=length)
    ).result(),
    "hold": lambda run, length: run.holds.create(ttl=length).close(),
    "delete": lambda run, length: run.delete(1, purge_delay=length),
    "retention": lambda run, length: run.retention.set(None, purge_delay=length),
    "configure": lambda run, length: run.configure(purge_delay=length),
}


@pytest.mark.parametrize("call", DURATIONS.values(), ids=DURATIONS)
def test_durations_are_timedeltas_or_seconds(
    run: store.Run, call: Callable[[store.Run, Any], object]
) -> None:
    run.save(1, TREE).result()

    for wrong in ("60s", True, float("nan"), timedelta.max):
        with pytest.raises(store.InvalidRequestError, match="expected a timedelta or"):
            call(run, wrong)
    call(run, 3600)
    call(run, timedelta(hours=1))


def test_durations_of_a_store_are_timedeltas_or_seconds(client: store.Client) -> None:
    assert [] == list(client.collect("nothing", grace=3600.5, dry_run=True))
    assert [] == list(client.collect("nothing", grace=timedelta(hours=1)))
    for timeout in (20, 20.5, timedelta(seconds=20)):
        with store.connect("memory://", timeout=timeout) as other:
            assert other.info().version


def test_a_run_has_defaults_for_its_saves(client: store.Client) -> None:
    name = "tests/defaults"
    queued = client.run(name, save=store.SaveOptions(if_busy="refuse"))
    plain = client.run(name)
    goes_on = threading.Event()

    assert plain is client.run(name)
    assert plain is not queued
    first = plain.save(1, TREE, progress=lambda _: goes_on.wait(60))
    with pytest.raises(store.ConflictError, match="still in progress"):
        queued.save(2, TREE)  # both have one queue of saves
    second = queued.save(2, TREE, if_busy="queue")
    goes_on.set()

    assert [1, 2] == [first.result().step, second.result().step]


WRONG: dict[str, Callable[[Any], object]] = {
    "processes": lambda _: store.Distributed(processes="some"),  # type: ignore[arg-type]
    "spread": lambda _: store.Distributed(spread="yes"),  # type: ignore[arg-type]
    "lease": lambda _: store.Distributed(lease=0),
    "long lease": lambda _: store.Distributed(lease=timedelta(days=31)),
    "snapshot": lambda _: store.SaveOptions(snapshot="disk"),  # type: ignore[arg-type]
    "if_busy": lambda _: store.SaveOptions(if_busy=None),  # type: ignore[arg-type]
    "distributed save": lambda run: run.save(1, TREE, distributed="all"),
    "distributed restore": lambda run: run.restore(1, distributed="this"),
    "distributed open": lambda run: run.open(1, distributed=None),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_options_of_another_type_are_rejected(
    run: store.Run, call: Callable[[Any], object]
) -> None:
    with pytest.raises(store.InvalidRequestError, match=r"expected .*, got "):
        call(run)


def test_a_lease_in_seconds_is_the_same_value() -> None:
    assert store.Distributed(lease=600) == store.Distributed()
    assert store.Distributed(lease=1.5).lease == timedelta(seconds=1.5)


def test_an_option_that_does_not_exist_is_a_type_error(run: store.Run) -> None:
    run.save(1, TREE).result()
    caller: Any = run

    for call in (caller.restore, run.open().restore):
        with pytest.raises(TypeError, match="unexpected keyword argument 'slect'"):
            call(slect="x")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'processes'"):
        caller.save(2, TREE, processes="this")
