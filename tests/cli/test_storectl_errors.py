"""storectl reports errors: as JSON, at Ctrl-C, and without log lines of libraries."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import storesvc_client as store
from storesvc_client.cli.group import COMMANDS
from tests.support.command_line import COMMAND, invoke, run_process


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store on disk with one checkpoint."""
    with store.connect((tmp_path / "store").as_uri()) as client:
        client.run("prod/tiny").save(1, {"w": np.ones(3)}).result()
    return tmp_path / "store"


# --- options anywhere -------------------------------------------------------------


def test_the_store_may_be_named_before_or_after_a_command(root: Path) -> None:
    before = invoke("-s", str(root), "ls")
    behind = invoke("ls", "-s", str(root))

    assert (0, before.output) == (behind.exit_code, behind.output)


def test_a_store_named_after_a_command_overrides_one_before(root: Path) -> None:
    assert 0 == invoke("-s", "127.0.0.1:1", "ls", "prod", "-s", str(root)).exit_code


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_accepts_the_store_after_it(command: str) -> None:
    result = invoke(command, "-s", "memory://", "--help")

    assert (0, True) == (result.exit_code, "Examples" in result.output)


def test_options_after_a_held_command_belong_to_it(root: Path) -> None:
    held = [sys.executable, "-c", "import sys; sys.exit(len(sys.argv))", "-s", "x"]

    assert 3 == invoke("hold", "prod/tiny@1", "-s", str(root), "--", *held).exit_code


def test_certificates_in_the_environment_are_ignored_for_a_root_after_the_command(
    root: Path, tmp_path: Path
) -> None:
    pem = tmp_path / "ca.pem"
    pem.write_text("")

    result = invoke("ls", "-s", str(root), STORECTL_CA=str(pem))

    assert 0 == result.exit_code


# --- JSON -------------------------------------------------------------------------


def test_an_error_is_json_where_json_is_asked_for(root: Path) -> None:
    result = invoke("stat", "prod/tiny@7", "--json", "-s", str(root))

    error = json.loads(result.stderr)["error"]
    assert (1, "", "NotFoundError", "CHECKPOINT_NOT_FOUND") == (
        *(result.exit_code, result.stdout),
        *(error["kind"], error["reason"]),
    )
    assert "prod/tiny@7" in error["message"]


@pytest.mark.parametrize(
    "line", [["ls", "Not/A/Run"], ["--timeout", "x", "ls"], ["-s", "memory://", "ls"]]
)
def test_wrong_usage_is_json_where_json_is_asked_for(line: list[str]) -> None:
    result = invoke(*line, "--json")

    assert (2, "BadParameter") == (
        result.exit_code,
        json.loads(result.stderr)["error"]["kind"],
    )


def test_each_error_of_several_is_a_line_of_json(root: Path) -> None:
    result = invoke("rm", "prod/tiny@7", "prod/tiny@8", "--json", "-s", str(root))

    messages = [json.loads(line)["error"] for line in result.stderr.splitlines()]
    assert ["CHECKPOINT_NOT_FOUND"] * 2 == [each["reason"] for each in messages]


@pytest.mark.slow
def test_an_error_is_a_sentence_where_a_held_command_is_asked_for_json() -> None:
    result = invoke(
        "-s", "127.0.0.1:1", "--timeout", "1", "hold", "a/b@1", "--", "--json"
    )

    assert result.stderr.startswith("storectl: ")


# --- processes --------------------------------------------------------------------


def test_ctrl_c_during_imports_is_a_sentence_and_exit_code_130(tmp_path: Path) -> None:
    # A module that storectl imports, found first; Ctrl-C comes while it is imported.
    (tmp_path / "click.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )

    process = run_process("ls", PYTHONPATH=str(tmp_path))

    assert (130, "storectl: interrupted\n") == (process.returncode, process.stderr)


def test_ctrl_c_during_the_imports_of_a_command_is_exit_code_130(
    root: Path, tmp_path: Path
) -> None:
    (tmp_path / "grpc.py").write_text("import time\nprint(flush=True)\ntime.sleep(60)")
    process = subprocess.Popen(
        [*COMMAND, "ls", "-s", str(root)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.1)

    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate()

    assert (130, "storectl: interrupted\n") == (process.returncode, stderr)


@pytest.mark.slow
def test_no_line_of_a_native_library_precedes_the_error(tmp_path: Path) -> None:
    # TensorStore's AWS SDK logs that these files are missing.
    missing = {
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "key",
    }
    line = ["-s", "s3://bucket/x?endpoint=http://127.0.0.1:1", "--timeout", "1", "ls"]

    def stderr(*options: str) -> str:
        return run_process(*options, *line, **missing).stderr

    quiet = stderr()
    assert quiet.startswith("storectl: s3://bucket/x")
    assert 1 == quiet.count("\n")
    assert "AWS_ERROR_FILE_INVALID_PATH" in stderr("--verbose")


def run_with(
    redirection: str, address: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command whose streams a shell redirects."""
    words = shlex.join([*COMMAND, *arguments])
    return subprocess.run(
        f"{words} {redirection}",
        shell=True,
        env=os.environ | {"STORECTL_STORE": address} | environment,
        capture_output=True,
        text=True,
        check=False,
        errors="replace",
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", ["ls", "stat", "tree", "--help"])
@pytest.mark.parametrize(
    ("redirection", "cause"),
    [(">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")],
)
def test_output_that_cannot_be_written_is_an_error_of_one_line(
    redirection: str, cause: str, command: str, run: store.Run, server_address: str
) -> None:
    run.save(1, {"x": 1}).result()
    path = [] if command == "--help" else [f"{run.name}@latest"]

    ran = run_with(redirection, server_address, command, *path)

    expected = f"storectl: cannot write the output: {cause}\n"
    assert (1, expected) == (ran.returncode, ran.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8", "koi8-r"])
def test_a_tree_is_drawn_in_every_encoding(
    encoding: str, run: store.Run, server_address: str
) -> None:
    run.save(1, {"a": {"x": 1}, "b": {"x": 1}}).result()

    path = f"{run.name}@latest"
    ran = run_with("", server_address, "tree", path, PYTHONIOENCODING=encoding)

    assert (0, "") == (ran.returncode, ran.stderr)
    assert encoding != "latin-1" or "`-- " in ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpc_proxy", "https_proxy", "http_proxy"])
def test_a_proxy_is_named_and_not_used_for_this_machine(
    name: str, run: store.Run, server_address: str
) -> None:
    run.save(1, {"x": 1}).result()
    proxy = "http://127.0.0.1:9"

    near = run_with("", server_address, "ls", run.name, **{name: proxy})
    options = ["-s", "ckpt.example:7070", "--insecure", "--timeout", "5"]
    far = run_with("", server_address, *options, "ls", **{name: proxy})

    assert (0, "") == (near.returncode, near.stderr)
    assert f"through the proxy {proxy} of {name}; no_proxy=ckpt.example avoids it" in (
        far.stderr
    )
