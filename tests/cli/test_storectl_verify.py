"""storectl verify: what it prints, and how it ends."""

import json

import pytest

import storesvc_client as store
from tests.support.command_line import storectl
from tests.support.saved_checkpoint import Saved


def test_storectl_verify_reports_an_intact_checkpoint(
    server_address: str, run: store.Run, saved: Saved
) -> None:
    del saved
    result = storectl(server_address, "verify", f"{run.name}@latest")

    assert (0, "") == (result.exit_code, result.stderr)
    assert f"{run.name}@3: 5 chunks, 4.9 KiB, all as saved\n" == result.stdout


def test_storectl_verify_names_leaf_and_chunk_and_ends_with_1(
    server_address: str, run: store.Run, saved: Saved
) -> None:
    saved.change(4, lambda stored: stored.reverse())
    saved.change(1, lambda stored: stored.reverse())

    result = storectl(server_address, "verify", f"{run.name}@3")

    one, other = result.stdout.splitlines()
    assert 1 == result.exit_code
    assert one.startswith("leaf 'x' chunk 1: expected")
    assert other.startswith("leaf 'x' chunk 4: expected")
    assert result.stderr.startswith(f"storectl: {run.name}@3 is damaged in 2 places;")


def test_storectl_verify_prints_json(
    server_address: str, run: store.Run, saved: Saved
) -> None:
    path = f"{run.name}@3"
    whole = json.loads(storectl(server_address, "verify", path, "--json").stdout)
    assert whole["ok"]
    assert [5, []] == [whole["chunk_count"], whole["damages"]]
    saved.change(4, lambda stored: stored.reverse())

    result = storectl(server_address, "verify", path, "--json")

    document = json.loads(result.stdout)
    assert 1 == result.exit_code
    assert not document["ok"]
    (damage,) = document["damages"]
    assert ["x", [4], "checksum"] == [damage[k] for k in ("key", "index", "kind")]


@pytest.mark.parametrize("path", ["prod", "prod/run", "prod/run@3:params/**"])
def test_storectl_verify_takes_whole_checkpoints_only(path: str) -> None:
    result = storectl("127.0.0.1:1", "verify", path)

    assert 2 == result.exit_code
    assert "expected a checkpoint" in result.stderr
