"""The space that runs use: from records and file tables, and as storectl shows it."""

import json
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import storesvc_client as store
from storesvc_client.cli import main
from tests.support.contract import Writer, frame
from tests.support.server_process import ServerProcess

CHUNK_BYTES = 4
"""Bytes of the checksum of each chunk."""


def tree(version: int) -> dict[str, Any]:
    return {
        "frozen": np.arange(300_000, dtype=np.float32),
        "head": np.full(1000, version, np.int32),
    }


FROZEN, HEAD = 1_200_000 + CHUNK_BYTES, 4000 + CHUNK_BYTES


def storectl(address: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["--store", address, *arguments])


def shown(result: Result) -> Any:
    assert 0 == result.exit_code, result.output
    return json.loads(result.stdout)


@pytest.fixture
def saved(client: store.Client) -> store.Run:
    """A run of three checkpoints that share a leaf; they are too large for one call."""
    run = client.run(f"usage-{uuid.uuid4().hex[:8]}/run")
    for step in range(3):
        run.save(step, tree(step)).result()
    return run


def test_shared_bytes_are_counted_once(saved: store.Run) -> None:
    usage = saved.usage()

    assert (3, 0, 0) == (
        usage.checkpoint_count,
        usage.deleted_checkpoint_count,
        usage.upload_count,
    )
    assert 3 * (1_200_000 + 4000) == usage.logical_bytes
    assert 3 * (FROZEN + HEAD) == usage.stored_bytes
    assert FROZEN + 3 * HEAD == usage.distinct_bytes
    assert usage.file_count >= 3


def test_deleted_checkpoints_count_until_they_are_purged(
    client: store.Client, saved: store.Run
) -> None:
    saved.delete(0, purge_delay=timedelta(0))
    usage = saved.usage()
    assert (2, 1) == (usage.checkpoint_count, usage.deleted_checkpoint_count)
    assert 3 * (FROZEN + HEAD) == usage.stored_bytes

    list(client.collect(saved.name, grace=timedelta(0)))

    usage = saved.usage()
    assert (2, 0) == (usage.checkpoint_count, usage.deleted_checkpoint_count)
    assert 2 * (FROZEN + HEAD) == usage.stored_bytes
    assert FROZEN + 2 * HEAD == usage.distinct_bytes


def test_an_upload_under_way_is_counted_as_one(
    saved: store.Run, server: ServerProcess
) -> None:
    writer = Writer(server.address, saved.name, 9)
    writer.begin()
    writer.write(frame(0))

    assert 1 == saved.usage().upload_count


@pytest.mark.slow
def test_usage_survives_a_restart_of_the_server(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    with store.connect(server.address) as client:
        run = client.run("usage/restarted")
        run.save(1, {"x": np.arange(10)}).result()
        server.kill()
        with ThreadPoolExecutor(1) as aside:
            usage = aside.submit(run.usage)
            time.sleep(0.2)
            server.start()

            assert 1 == usage.result(60).checkpoint_count


def test_a_run_that_there_is_not_takes_nothing(client: store.Client) -> None:
    with pytest.raises(store.NotFoundError, match="usage/none"):
        client.run("usage/none").usage()


def test_du_of_a_run_tells_of_each_checkpoint(
    saved: store.Run, server_address: str
) -> None:
    document = shown(storectl(server_address, "du", saved.name, "--json"))

    assert FROZEN + 3 * HEAD == document["distinct_bytes"]
    rows = [
        (row["step"], row["stored_bytes"], row["own_bytes"], row["shared_bytes"])
        for row in document["checkpoints"]
    ]
    assert [
        (2, FROZEN + HEAD, HEAD, FROZEN),
        (1, FROZEN + HEAD, HEAD, FROZEN),
        (0, FROZEN + HEAD, FROZEN + HEAD, 0),
    ] == rows
    text = storectl(server_address, "du", saved.name).stdout
    assert ["distinct", f"{(FROZEN + 3 * HEAD) / (1 << 20):.1f}", "MiB"] in map(
        str.split, text.splitlines()
    )
    assert ["STEP", "LOGICAL", "STORED", "OWN", "SHARED"] in map(
        str.split, text.splitlines()
    )


@pytest.mark.parametrize("path", [(), ("namespace",)])
def test_du_of_many_runs_has_a_row_for_each(
    saved: store.Run, server_address: str, path: Sequence[str]
) -> None:
    namespace = saved.name.partition("/")[0]
    arguments = [namespace for _ in path]

    rows = shown(storectl(server_address, "du", *arguments, "--json"))

    assert saved.name in [row["run"] for row in rows]
    assert saved.name in storectl(server_address, "du", *arguments).stdout


def test_du_of_a_checkpoint_tells_what_is_its_own(
    saved: store.Run, server_address: str
) -> None:
    document = shown(storectl(server_address, "du", f"{saved.name}@latest", "--json"))

    assert (2, HEAD) == (document["step"], document["own_bytes"])
    result = storectl(server_address, "du", f"{saved.name}@latest:head")
    assert 2 == result.exit_code
    assert "as a whole" in result.output


def test_gc_collects_what_it_said_it_would(
    saved: store.Run, server_address: str
) -> None:
    saved.delete(0, purge_delay=timedelta(0))
    arguments = ("gc", saved.name, "--grace", "0s", "--json")

    (dry,) = shown(storectl(server_address, *arguments, "--dry-run"))
    assert 3 == len(list(saved.checkpoints())) + 1
    (done,) = shown(storectl(server_address, *arguments))

    assert (1, 0) == (dry["purged_checkpoint_count"], dry["deleted_object_count"])
    assert dry["garbage_object_count"] == done["deleted_object_count"] > 0
    assert {**done, "deleted_object_count": 0} == dry
    table = storectl(server_address, "gc", saved.name).stdout.splitlines()
    assert ["RUN", "ABORTED", "DELETED", "PURGED", "GARBAGE", "REMOVED", "LEFT"] == (
        table[0].split()
    )
    assert [saved.name, "0", "0", "0", "0", "0", "-"] == table[1].split()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a/b@3",), "expected a namespace or a run"),
        (("--grace", "soon"), "expected a number and a unit"),
        (("--grace", "-1h"), "grace"),
        (("absent/nothing",), "absent/nothing"),
    ],
)
def test_gc_rejects_what_it_cannot_mean(
    server_address: str, arguments: Sequence[str], said: str
) -> None:
    result = storectl(server_address, "gc", *arguments)

    assert result.exit_code in (1, 2)
    assert said in result.output
