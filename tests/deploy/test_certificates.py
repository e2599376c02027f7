"""The guide's certificates: servers and clients use them as in the manifests."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.manifests import (
    DEPLOY,
    Object,
    arguments_of,
    policy_of,
    rendered,
    server_of,
)
from tests.repo.test_deploy_guide import step_with
from tests.support.server_process import ServerProcess

STORECTL = [sys.executable, "-m", "storesvc_client.cli"]


def printed(output: str) -> str:
    """Returns the output without the spaces that versions of openssl differ in."""
    return re.sub(r" ?= ?", "=", output)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the guide's commands have made certificates, and printed what it shows."""
    place = tmp_path_factory.mktemp("tls")
    step = step_with("openssl")
    ran = subprocess.run(
        ["sh", "-euc", "\n".join(step.lines)],
        cwd=place,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert printed(step.output) == printed(ran.stdout)
    return place


@pytest.fixture(scope="module")
def overlay() -> list[Object]:
    """The objects of one that operators start from."""
    return rendered("gke")


@pytest.fixture
def server(
    overlay: list[Object], folder: Path, tmp_path: Path
) -> Iterator[ServerProcess]:
    """A server with the arguments of its container, but for its root."""
    arguments = [
        re.sub("=/(tls|policy|audit)/", f"={folder}/", argument)
        for argument in arguments_of(overlay)
        if not argument.startswith("--root=")
    ]
    (folder / "policy.toml").write_text(policy_of(overlay))
    process = ServerProcess(tmp_path / "store", tmp_path, *arguments)
    process.start()
    yield process
    process.kill()


def test_a_server_answers_a_client_with_its_authority_alone(
    overlay: list[Object], folder: Path, server: ServerProcess
) -> None:
    (container,) = server_of(overlay)["spec"]["template"]["spec"]["containers"]
    port = server.address.rpartition(":")[2]
    variables = {
        entry["name"]: entry["value"]
        .replace("/tls/", f"{folder}/")
        .replace("7070", port)
        for entry in container["env"]
    }

    def pinged(*without: str) -> int:
        shown = {n: v for n, v in variables.items() if n not in without}
        return subprocess.run(
            [*STORECTL, "--timeout=5", "ping"],
            env=os.environ | shown,
            stdout=subprocess.DEVNULL,
            check=False,
        ).returncode

    assert 0 == pinged()
    assert 1 == pinged("STORECTL_CA")


def test_the_names_of_the_certificate_are_those_that_clients_ask_for(
    folder: Path,
) -> None:
    shown = subprocess.run(
        ["openssl", "x509", "-in", folder / "tls.crt", "-noout", "-text"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    text = (DEPLOY / "README.md").read_text()

    assert "DNS:storesvc.storesvc.svc, DNS:localhost" in shown.stdout
    assert "dns:///storesvc.storesvc.svc:7070" in text
