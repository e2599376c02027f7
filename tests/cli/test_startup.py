"""Short commands import what they need, and little else; ``benchmarks startup`` has
the seconds."""

import os
import subprocess
import sys

import numpy as np
import pytest

import storesvc_client as store
from storesvc_client.cli.group import COMMANDS
from tests.support.command_line import imported_by_storectl, imported_modules
from tests.support.server_process import ServerProcess

JAX = {"flax", "jax", "jaxlib", "optax", "orbax"}
SERVER = {"storesvc.server.app", "storesvc.store", "tensorstore"}
SLOW = {"crc32c", "ml_dtypes", "numpy", "rich", "tqdm"}
"""Modules that a list of checkpoints does not import."""


@pytest.fixture
def listed(server: ServerProcess, run: store.Run) -> store.Run:
    """A run with a checkpoint."""
    run.save(7, {"x": np.ones(3)}).result()
    return run


def commands_of(modules: set[str]) -> set[str]:
    """Returns the modules of commands among modules."""
    return {
        module
        for module in COMMANDS.values()
        if f"storesvc_client.cli.commands.{module}" in modules
    }


def test_help_imports_nothing_that_connects_to_a_store() -> None:
    modules = imported_by_storectl("--help")

    assert set() == modules & (JAX | SERVER | SLOW | {"asyncio", "grpc", "google"})


def test_a_command_imports_no_other() -> None:
    assert {COMMANDS["ls"]} == commands_of(imported_by_storectl("ls", "--help"))
    assert set(COMMANDS.values()) == commands_of(imported_by_storectl("--help"))


@pytest.mark.parametrize("path", ["runs", "checkpoints"])
def test_a_list_from_a_server_imports_no_numpy(
    path: str, server_address: str, listed: store.Run
) -> None:
    arguments = ["tests"] if path == "runs" else [listed.name]

    modules = imported_by_storectl("-s", server_address, "ls", *arguments)

    assert "grpc" in modules
    assert set() == modules & (JAX | SERVER | SLOW)


@pytest.mark.slow
def test_a_list_of_leaves_needs_numpy_and_no_server(
    server_address: str, listed: store.Run
) -> None:
    modules = imported_by_storectl("-s", server_address, "ls", f"{listed.name}@7")

    assert "numpy" in modules
    assert set() == modules & (JAX | SERVER | {"rich"})


@pytest.mark.slow
def test_a_list_of_files_imports_no_jax_and_no_tables(
    server: ServerProcess, listed: store.Run
) -> None:
    modules = imported_by_storectl("-s", server.root.as_uri(), "ls", listed.name)

    assert modules >= SERVER
    assert set() == modules & (JAX | {"rich"})


def test_a_client_imports_no_numpy_before_it_saves_or_restores() -> None:
    modules = imported_modules(
        "import storesvc_client as store\nstore.Client, store.Run, store.connect"
    )

    assert set() == modules & (JAX | SERVER | SLOW)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [None, "3"])
def test_commands_that_storectl_starts_do_not_inherit_library_settings(
    threads: str | None, server: ServerProcess, listed: store.Run
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    if threads:
        environment["OPENBLAS_NUM_THREADS"] = threads
    run = subprocess.run(
        [
            *(sys.executable, "-m", "storesvc_client.cli"),
            *("-s", server.root.as_uri(), "hold", f"{listed.name}@7", "--"),
            *(
                sys.executable,
                "-c",
                "import os; print(os.environ.get(*os.sys.argv[1:]))",
            ),
            "OPENBLAS_NUM_THREADS",
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    assert f"{threads}\n" == run.stdout
