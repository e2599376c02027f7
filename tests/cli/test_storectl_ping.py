"""storectl ping: the command of probes."""

import signal
import socket
import subprocess
from pathlib import Path

import pytest

import storesvc
import storesvc_client as store
from tests.support.command_line import COMMAND, document, printed, refusal
from tests.support.server_process import ServerProcess


def test_ping_prints_what_a_server_serves(server: ServerProcess) -> None:
    answer = document(server.address, "ping")

    assert {"store_uid", "version"} == answer.keys()
    assert storesvc.__version__ == answer["version"]
    assert (
        f"{server.address}: store {answer['store_uid']}, storesvc {answer['version']}\n"
        == printed(server.address, "ping")
    )


@pytest.mark.slow
def test_a_server_that_is_gone_is_reported_in_a_sentence() -> None:
    assert "store 127.0.0.1:1 cannot be reached" in refusal("127.0.0.1:1", "ping")


def test_certificates_in_the_environment_are_for_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, file = (tmp_path / "store").as_uri(), tmp_path / "ca.pem"
    file.touch()
    store.connect(root).close()
    monkeypatch.setenv("STORECTL_CA", str(file))

    assert document(root, "ping")["store_uid"]
    assert "got ca=; omit them" in refusal(root, "--ca", str(file), "ping")


@pytest.mark.slow
def test_ctrl_c_ends_a_command_in_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        command = [*COMMAND, "-s", address, "ping"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            connection, _ = silent.accept()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        connection.close()

    assert (130, "storectl: interrupted\n") == (process.returncode, errors)
