"""storectl against a real server: output, files and errors."""

import json
import math
import re
import shlex
import subprocess
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import storesvc_client as store
from storesvc_client.cli.group import COMMANDS
from tests.support.command_line import (
    COMMAND,
    document,
    imported_by_storectl,
    invoke,
    on_a_terminal,
    printed,
    refusal,
    storectl,
    table,
)

FLOATS = np.array([[1.5, np.nan], [-2.5, 4.0]], np.float32)


def tiny_state() -> dict[str, Any]:
    block = {"kernel": np.ones((4, 8), np.float32), "bias": np.zeros(8, np.float32)}
    return {
        "params": {
            "blocks": [block, block, block],
            "embed": {"embedding": FLOATS},
            "half": jnp.arange(4, dtype=jnp.bfloat16),
        },
        "odd": {
            "empty": np.zeros((0, 3), np.float32),
            "flags": np.array([True, False, True, True]),
            "small": jnp.arange(4, dtype=jnp.int4),
            "waves": np.array([1 + 2j, 3 - 2j]),
        },
        "rngs": {"dropout": jax.random.key(0, impl="threefry2x32")},
        "step": 20,
    }


@pytest.fixture(scope="module")
def address(server_address: str) -> str:
    """The address of a server that holds runs of three namespaces."""
    mesh = jax.make_mesh((2, 4), ("dp", "fsdp"))
    over_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    rows = jax.device_put(np.ones((8, 6), np.float32), over_rows)
    labels = {"note": "\x1b[2J \u202egone"}
    with store.connect(server_address) as client:
        tiny = client.run("prod/tiny")
        tiny.save(10, {"w": FLOATS}, metrics={"loss": 2.75})
        tiny.save(20, tiny_state(), metrics={"loss": 2.5}, labels={"commit": "4f2a"})
        client.run("test/other").save(0, {"w": FLOATS})
        client.run("edge/hostile").save(1, {"w": FLOATS}, labels=labels)
        client.run("edge/one-leaf").save(1, FLOATS)
        client.run("edge/sharded").save(1, {"rows": rows})
    return server_address


# --- ls ---------------------------------------------------------------------------


def test_ls_lists_the_runs_with_their_latest_steps(address: str) -> None:
    header, *rows = table(printed(address, "ls"))

    assert ["RUN", "LATEST", "CREATED", "AGE"] == header
    assert [["prod/tiny", "20"], ["test/other", "0"]] == [row[:2] for row in rows[3:]]


def test_ls_of_a_namespace_lists_its_runs_only(address: str) -> None:
    assert ["test/other"] == [run["name"] for run in document(address, "ls", "test")]


def test_ls_of_a_run_lists_its_checkpoints_newest_first(address: str) -> None:
    header, newest, oldest = table(printed(address, "ls", "prod/tiny"))

    assert [
        *("STEP", "COMMITTED", "AGE", "SIZE", "LEAVES"),
        *("TAGS", "PINNED", "loss", "LABELS"),
    ] == header
    assert ["20", "2.5", "commit=4f2a"] == [newest[0], *newest[-2:]]
    assert ["10", "16 B", "1", "-", "-", "2.75", "-"] == [oldest[0], *oldest[3:]]
    assert re.fullmatch("[0-9]+[sm]", newest[2])


def test_ls_of_a_checkpoint_lists_its_leaves(address: str) -> None:
    header, *rows = table(printed(address, "ls", "prod/tiny@latest"))

    assert ["KEY", "DTYPE", "SHAPE", "SIZE", "CHUNKS"] == header
    assert ["params/embed/embedding", "float32", "[2,2]", "16 B", "1"] in rows
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)


def test_ls_takes_a_glob_of_leaves(address: str) -> None:
    leaves = document(address, "ls", "prod/tiny@20:params/**/bias")

    assert [f"params/blocks/{at}/bias" for at in range(3)] == [
        leaf["key"] for leaf in leaves
    ]


def test_a_limit_that_omits_items_says_so_on_stderr(address: str) -> None:
    result = storectl(address, "ls", "prod/tiny", "--limit", "1", "--json")

    assert [20] == [checkpoint["step"] for checkpoint in json.loads(result.stdout)]
    assert "storectl: 1 checkpoint shown, there are more\n" == result.stderr


def test_a_limit_that_omits_nothing_is_silent(address: str) -> None:
    assert "" == storectl(address, "ls", "prod/tiny", "--limit", "2").stderr


def test_json_has_sizes_in_bytes_and_times_in_utc(address: str) -> None:
    (checkpoint,) = document(address, "ls", "prod/tiny", "--limit", "1")

    assert {"loss": 2.5} == checkpoint["metrics"]
    assert {"commit": "4f2a"} == checkpoint["labels"]
    assert isinstance(checkpoint["size_bytes"], int)
    assert checkpoint["commit_time"].endswith("Z")
    assert datetime.fromisoformat(checkpoint["commit_time"]).year >= 2024


def test_a_label_cannot_control_a_terminal(address: str) -> None:
    assert r"note='\x1b[2J \u202egone'" in printed(address, "ls", "edge/hostile")


def test_a_tree_that_is_one_leaf_has_an_empty_key(address: str) -> None:
    _, row = table(printed(address, "ls", "edge/one-leaf@1:"))

    assert ["''", "float32", "[2,2]"] == row[:3]


# --- tree and stat ----------------------------------------------------------------


def test_tree_draws_the_leaves_and_neighbours_that_are_alike_once(address: str) -> None:
    text = printed(address, "tree", "prod/tiny@latest:params/**")

    assert [
        "prod/tiny@20             8 leaves          504 B",
        "└── params               8 leaves          504 B",
        "    ├── blocks           6 leaves          480 B",
        "    │   └── {0..2}       3 x 2 leaves  3 x 160 B",
        "    │       ├── bias     float32[8]         32 B",
        "    │       └── kernel   float32[4,8]      128 B",
        "    ├── embed/embedding  float32[2,2]       16 B",
        "    └── half             bfloat16[4]         8 B",
    ] == text.splitlines()


def test_tree_draws_no_more_than_depth_levels(address: str) -> None:
    _, *rows = table(printed(address, "tree", "prod/tiny@20", "--depth", "1"))

    assert ["├── odd", "├── params", "├── rngs/dropout", "└── step"] == [
        row[0] for row in rows
    ]


def test_tree_as_json_holds_every_leaf(address: str) -> None:
    top = document(address, "tree", "prod/tiny@20:params/blocks/**")

    (params,) = top["children"]
    assert (6, ["0", "1", "2"]) == (
        top["leaf_count"],
        [child["name"] for child in params["children"]],
    )
    assert "params/blocks/0/bias" == params["children"][0]["children"][0]["key"]


def test_stat_of_a_checkpoint_shows_its_details(
    address: str, client: store.Client
) -> None:
    stat = document(address, "stat", "prod/tiny@latest")
    text = printed(address, "stat", "prod/tiny@latest")

    checkpoint = client.run("prod/tiny").latest()
    assert (20, checkpoint.uid) == (stat["step"], stat["uid"])
    assert 1 == stat["kinds"]["prng_key"]
    assert 1 == stat["dtypes"]["bfloat16"]
    assert text.startswith("prod/tiny@20\n")
    assert f"leaves     {checkpoint.leaf_count}\n" in text
    assert "loss=2.5" in text


def test_stat_of_a_leaf_shows_its_grid_and_sharding(address: str) -> None:
    text = printed(address, "stat", "edge/sharded@latest:rows")
    leaf = document(address, "stat", "edge/sharded@latest:rows")

    assert text.startswith("edge/sharded@1:rows\n")
    assert ["saved on", "dp=2 fsdp=4"] in table(text)
    assert ["sharding", "P('fsdp')"] in table(text)
    assert ["dp", "fsdp"] == leaf["sharding"]["axis_names"]
    chunks = math.prod(leaf["chunk_grid"])
    assert leaf["chunk_count"] == chunks


def test_stat_of_prng_keys_names_their_implementation(address: str) -> None:
    text = printed(address, "stat", "prod/tiny@20:rngs/dropout")

    assert ["kind", "prng key"] in table(text)
    assert ["dtype", "key<threefry2x32>"] in table(text)
    assert ["stored as", "uint32[2]"] in table(text)


# --- refusals ---------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ls", "tree", "stat"])
def test_a_step_that_is_not_there_is_one_sentence(address: str, command: str) -> None:
    assert "prod/tiny" in refusal(address, command, "prod/tiny@15")


def test_verbose_shows_where_an_error_arose(address: str) -> None:
    result = storectl(address, "--verbose", "stat", "prod/tiny@15")

    assert isinstance(result.exception, store.StoreError)


@pytest.mark.slow
def test_a_server_that_is_not_there_is_one_sentence_with_its_address() -> None:
    result = storectl("127.0.0.1:1", "--timeout", "2", "ls")

    assert 1 == result.exit_code
    assert re.fullmatch(r"storectl: .*127\.0\.0\.1:1\b.*\n", result.stderr)


@pytest.mark.parametrize(
    "line",
    [
        *("-s memory:// ls", "ls prod/llama\\ 3", "tree prod/llama", "nonsense"),
        *(
            "stat orbax:/prod",
            "get prod/llama@latest",
            "get prod/llama@latest:x --force",
        ),
        f"serve --root file:///x --tls-key {__file__}",
    ],
)
def test_contradictory_arguments_are_wrong_usage(line: str) -> None:
    result = invoke(*shlex.split(line))

    assert (2, "") == (result.exit_code, result.stdout)


# --- processes --------------------------------------------------------------------


def test_help_imports_nothing_that_is_slow() -> None:
    slow = {"google.protobuf", "grpc", "jax", "numpy", "rich"}

    assert set() == slow & imported_by_storectl("--help")


def test_reading_a_store_imports_no_jax(address: str) -> None:
    modules = imported_by_storectl("-s", address, "get", "prod/tiny@20:**")

    assert set() == modules & {"flax", "jax", "jaxlib", "optax", "tensorstore"}


def test_every_command_shows_examples() -> None:
    for name in COMMANDS:
        assert f"Examples:\n    storectl {name}" in invoke(name, "--help").stdout


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error(address: str) -> None:
    arguments = ["-s", address, "get", "prod/tiny@20:**", "--json"]
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout
    assert process.stderr

    process.stdout.close()

    assert b"" == process.stderr.read()
    process.stderr.close()
    process.wait()


@pytest.mark.slow
def test_a_narrow_terminal_shows_the_common_beginning_of_keys_once(
    address: str,
) -> None:
    command = "ls", "prod/tiny@20:params/b*/**", "--expand"
    text = on_a_terminal("-s", address, *command, columns=50)

    lines = [line.rstrip() for line in text.splitlines()]
    assert 8 == len(lines)
    assert max(map(len, lines)) <= 50
    assert "KEY below params/blocks/" == lines[0]
    assert ["0/bias", "float32"] == lines[2].split()[:2]


@pytest.mark.slow
def test_a_dumb_terminal_shows_no_empty_line_after_quick_work(address: str) -> None:
    text = on_a_terminal("-s", address, "get", "prod/tiny@20:step", term="dumb")

    assert 2 == len(text.splitlines())


@pytest.mark.slow
def test_a_terminal_shows_bold_headers_and_no_progress_of_quick_work(
    address: str,
) -> None:
    text = on_a_terminal(
        "-s", address, "get", "prod/tiny@20:step", columns=80, term="xterm"
    )

    assert ["\x1b[1mKEY   DTYPE  SHAPE  MIN  MAX  MEAN  NAN\x1b[0m", 2] == [
        text.splitlines()[0],
        len(text.splitlines()),
    ]


def test_serve_serves_until_it_is_asked_to_stop(
    start_server: Callable[[], Any],
) -> None:
    server = start_server()

    assert [] == document(server.address, "ls")
    assert 0 == server.stop()


def test_serve_rejects_other_machines_without_tls(tmp_path: Path) -> None:
    root = f"file://{tmp_path / 'store'}"

    result = invoke("serve", "--root", root, "--host", "0.0.0.0")

    assert 1 == result.exit_code
    assert "expected a loopback address or TLS" in result.stderr
    assert [] == list(tmp_path.iterdir())


def test_a_store_of_files_needs_no_server(tmp_path: Path) -> None:
    target = f"file://{tmp_path}"
    with store.connect(target) as client:
        client.run("prod/tiny").save(3, {"w": FLOATS}).result()

    assert ["prod/tiny"] == [run["name"] for run in document(target, "ls")]


def test_reading_a_directory_without_a_store_creates_none(tmp_path: Path) -> None:
    root = tmp_path / "mistyped"

    assert f"{root} holds no store" in refusal(root.as_uri(), "ls")
    assert not root.exists()
