"""Restores past their deadline end, and report the missing data."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from tests.support.in_process_server import InProcessServer


@pytest.fixture(params=["streamed", "direct"])
def run(request: pytest.FixtureRequest, serve: Callable[..., InProcessServer]) -> Any:
    server = serve()
    direct = server.root.as_uri() if request.param == "direct" else None
    with store.connect(server.address, direct=direct) as client:
        run = client.run("tests/deadline")
        run.save(1, {"w": np.arange(1 << 22), "b": np.arange(1 << 20)}).result()
        yield run


def test_a_restore_past_its_deadline_lists_its_missing_data_files(run: Any) -> None:
    with pytest.raises(
        store.UnavailableError, match=r"chunks of \d+ data files are missing: \S+/"
    ):
        run.open(1).restore(deadline=timedelta(microseconds=1))


def test_a_restore_past_its_deadline_in_the_manifest_reports_it(run: Any) -> None:
    with pytest.raises(
        store.UnavailableError,
        match=r"deadline@1: expected its manifest within 1e-06 s, but it is missing",
    ):
        run.restore(1, deadline=timedelta(microseconds=1))


def test_a_restore_within_its_deadline_succeeds(run: Any) -> None:
    found = run.restore(1, deadline=timedelta(minutes=5))

    assert np.array_equal(np.arange(1 << 22), found["w"])


def test_an_invalid_deadline_is_rejected(run: Any) -> None:
    for deadline in (0, -1.5, timedelta(0), timedelta(seconds=-1), "1s"):
        with pytest.raises(store.InvalidRequestError, match="deadline="):
            run.restore(1, deadline=deadline)
