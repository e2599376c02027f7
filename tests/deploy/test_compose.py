"""compose.yaml: its files exist, and its services work together."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml

import storesvc_client as store
from tests.deploy.dockerfiles import Dockerfile
from tests.deploy.manifests import DEPLOY
from tests.support.scraped import scraped
from tests.support.sockets import free_port
from tests.support.storectl_lines import check_line

COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
DOCKERFILE = Dockerfile(DEPLOY / "Dockerfile")
PROGRAMS = {
    "storectl": [sys.executable, "-m", "storesvc_client.cli"],
    "python": [sys.executable],
}
"""Replaces the paths of the image."""


def words_of(service: dict[str, Any]) -> list[str]:
    """Returns the command of the container of a service."""
    entrypoint = DOCKERFILE.last("ENTRYPOINT", stage=service["build"]["target"])
    return [*entrypoint.words, *service["command"]]


def test_files_that_it_builds_and_networks_that_it_joins_exist() -> None:
    assert {"name", "services", "networks"} == {
        key for key in COMPOSE if not key.startswith("x-")
    }
    for service in SERVICES.values():
        context = DEPLOY / service["build"]["context"]
        assert (context / service["build"]["dockerfile"]).samefile(
            DEPLOY / "Dockerfile"
        )
        assert service["build"]["target"] in DOCKERFILE.stages
        assert set(service["networks"]) <= COMPOSE["networks"].keys()
        assert set(service.get("depends_on", ())) <= SERVICES.keys()


def test_plaintext_services_are_on_internal_networks() -> None:
    assert all(
        network == {"internal": True} for network in COMPOSE["networks"].values()
    )
    assert all("ports" not in service for service in SERVICES.values())


@pytest.mark.parametrize("name", SERVICES)
def test_storectl_takes_what_a_container_runs_it_with(name: str) -> None:
    program, *words = words_of(SERVICES[name])
    kind, *probe = SERVICES[name].get("healthcheck", {"test": ["NONE"]})["test"]

    assert program in PROGRAMS
    if program == "storectl":
        check_line(words)
    if kind == "CMD":
        assert "storectl" == probe[0]
        check_line(probe[1:])


class Containers:
    """The containers of this file as processes of this machine."""

    def __init__(self) -> None:
        gcs, server = free_port(), free_port()
        self._places = {
            "gcs:9000": f"127.0.0.1:{gcs}",
            "--port=9000": f"--port={gcs}",
            "server:7070": f"127.0.0.1:{server}",
            "--host=0.0.0.0": "--host=127.0.0.1",
        }
        self.server_port = server

    @contextmanager
    def running(self, name: str, *more: str) -> Iterator["subprocess.Popen[str]"]:
        """Runs one; it is gone when the block ends."""
        service = SERVICES[name]
        program, *words = map(self._here, words_of(service))
        variables = service.get("environment", {})
        process = subprocess.Popen(
            [*PROGRAMS[program], *words, *more],
            env=os.environ | {n: self._here(v) for n, v in variables.items()},
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()

    def is_healthy(self, name: str, *options: str) -> bool:
        """Returns the output of the health check of a service."""
        _, program, *words = SERVICES[name]["healthcheck"]["test"]
        command = [*PROGRAMS[program], *options, *words]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def _here(self, text: str) -> str:
        for there, here in self._places.items():
            text = text.replace(there, here)
        return text


def check_metrics(port: int, metrics: int) -> None:
    """Checks that a server counted the checkpoints that it has, and their bytes."""
    with store.connect(f"127.0.0.1:{port}") as client:
        found = [
            one for run in client.runs() for one in client.run(run.name).checkpoints()
        ]
    samples = scraped(f"http://127.0.0.1:{metrics}/metrics")
    own_bytes = sum(one.own_bytes for one in found)
    stored_bytes = sum(one.stored_bytes for one in found)
    assert found
    assert samples("storesvc_commits_total") == len(found)
    assert samples("storesvc_committed_bytes_total", source="sent") == own_bytes
    assert (
        samples("storesvc_committed_bytes_total", source="reused")
        == stored_bytes - own_bytes
    )


def test_the_demo_holds_as_its_containers_run_it() -> None:
    containers = Containers()
    port, metrics = containers.server_port, free_port()
    options = (f"--port={port}", f"--metrics-port={metrics}")
    with (
        containers.running("gcs") as gcs,
        containers.running("server", *options) as server,
    ):
        assert gcs.stdout
        assert gcs.stdout.readline().startswith("http://")
        while not containers.is_healthy("server", f"--store=127.0.0.1:{port}"):
            assert server.poll() is None
        with containers.running("demo") as demo:
            output, _ = demo.communicate()
        check_metrics(port, metrics)

    assert 0 == demo.returncode, output
    assert "Every claim held" in output
