"""The image of the server: what is installed in it, and that it serves."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.conftest import gcs_root, s3_root
from tests.deploy.dockerfiles import Dockerfile, Rehearsal
from tests.fake_gcs import FakeGcs
from tests.fake_s3 import FakeS3
from tests.repo.test_deploy_guide import lines

ROOT = Path(__file__).parents[2]
DOCKERFILE = Dockerfile(ROOT / "deploy" / "Dockerfile")
STAGE = "server"
PATIENCE_SECONDS = 60.0

UNWRITABLE = [
    *("unshare", "--mount", "--propagation", "private", "--", "sh", "-euc"),
    *('mount -o remount,bind,ro / && exec "$@"', "sh"),
]
"""Runs what follows where no file can be written."""


@pytest.fixture(scope="module")
def installed() -> Iterator[Path]:
    """The /opt/storesvc of the image, installed by its own RUN lines."""
    (copy,) = DOCKERFILE.stages[STAGE].list_prefixes("COPY")
    source, path, target = copy.words
    assert path == target  # a virtual environment cannot be moved
    # pytest's own folders are closed to the image's user
    with tempfile.TemporaryDirectory(prefix="storesvc-image-") as folder:
        place = Path(folder)
        place.chmod(0o755)
        rehearsal = Rehearsal(DOCKERFILE, context=ROOT, place=place)
        rehearsal.run(STAGE)
        stage = source.removeprefix("--from=")
        yield rehearsal.root_of(stage) / path.removeprefix("/")


@pytest.fixture
def entrypoint(installed: Path) -> list[str]:
    """Returns the command of the image."""
    program, *arguments = DOCKERFILE.last("ENTRYPOINT", stage=STAGE).words
    return [str(installed / "bin" / program), *arguments]


@pytest.fixture(params=["gs", "s3"])
def served(request: pytest.FixtureRequest) -> tuple[str, dict[str, str]]:
    """The root of a store in a bucket of each kind, and the environment for it."""
    if request.param == "gs":
        gcs: FakeGcs = request.getfixturevalue("gcs")
        return gcs_root(), {
            "TENSORSTORE_GCS_HTTP_URL": gcs.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "any",
        }
    s3: FakeS3 = request.getfixturevalue("s3")
    return s3_root(s3), {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}


@pytest.fixture
def address(entrypoint: list[str], served: tuple[str, dict[str, str]]) -> Iterator[str]:
    """A server as the image runs it; it is stopped as the image is."""
    root, environment = served
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    process = subprocess.Popen(
        [*contained(), *entrypoint, "--root", root, "--port", str(port)],
        cwd="/",
        env={"PATH": os.environ["PATH"], **environment},
    )
    try:
        yield f"127.0.0.1:{port}"
        stop = DOCKERFILE.last("STOPSIGNAL", stage=STAGE).arguments
        process.send_signal(signal.Signals[stop])
        assert 0 == process.wait(PATIENCE_SECONDS)
    finally:
        process.kill()
        process.wait()


def contained() -> list[str]:
    """A prefix that runs a command as the image's user, without writable files."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("to drop privileges needs root, and setpriv of util-linux")
    user, group = DOCKERFILE.last("USER", stage=STAGE).arguments.split(":")
    return [
        *UNWRITABLE,
        *("setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups"),
        *("--no-new-privs", "--inh-caps=-all", "--bounding-set=-all", "--"),
    ]


def test_files_copied_into_images_are_in_the_build_context() -> None:
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    let_in = tuple(line[1:] for line in ignored if line.startswith("!"))
    copies = [
        c for stage in DOCKERFILE.stages.values() for c in stage.list_prefixes("COPY")
    ]
    sources = [
        source
        for copy in copies
        if not copy.arguments.startswith("--from=")
        for source in copy.words[:-1]
    ]

    assert "*" in ignored
    assert sources
    assert [] == [source for source in sources if not source.startswith(let_in)]


@pytest.mark.parametrize("stage", ["server", "training", "emulator"])
def test_its_labels_say_what_it_was_built_from(stage: str) -> None:
    label = DOCKERFILE.last("LABEL", stage=stage)
    found = dict(word.split("=", 1) for word in shlex.split(label.arguments))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {
        instruction.arguments
        for part in DOCKERFILE.line_of(stage)
        for instruction in part.list_prefixes("ARG")
    }

    prefix = "org.opencontainers.image."
    assert {
        f"{prefix}title": project["name"],
        f"{prefix}licenses": project["license"],
        f"{prefix}version": "$VERSION",
        f"{prefix}revision": "$REVISION",
        f"{prefix}created": "$CREATED",
        f"{prefix}base.name": "$PYTHON_IMAGE",
    } == found
    assert declared == {
        value.removeprefix("$") for value in found.values() if value.startswith("$")
    }


def test_the_guide_builds_images_with_all_labels_a_pinned_base_and_an_sbom() -> None:
    base = DOCKERFILE.defaults["PYTHON_IMAGE"]
    builds = [line for line in lines() if line.startswith("docker buildx build ")]

    assert 2 == len(builds)
    for line in builds:
        arguments = dict(re.findall(r"--build-arg (\w+)=(\S+)", line))
        assert {"PYTHON_IMAGE", "VERSION", "REVISION", "CREATED"} == arguments.keys()
        assert f"{base}@$(cat" == arguments["PYTHON_IMAGE"]
        assert {"--sbom=true", "--provenance=mode=max", "--push"} <= {*line.split()}
    assert any(f"imagetools inspect {base} " in line for line in lines())


def test_it_holds_the_packages_of_its_lock_as_the_sbom_lists_them(
    installed: Path,
) -> None:
    lock = (ROOT / "requirements" / f"{STAGE}.lock").read_text()
    locked = re.findall(r"^([\w.-]+)(?:\[[\w,]+\])?==(\S+)", lock, re.MULTILINE)
    (packages,) = installed.glob("lib/python3.*/site-packages")

    found = {
        (re.sub(r"[-_.]+", "-", one.name).lower(), one.version)
        for one in distributions(path=[str(packages)])
    }

    assert found >= {*locked}
    assert {"storesvc"} == {name for name, _ in found - {*locked}}


def test_its_command_passes_the_options_of_a_server(entrypoint: list[str]) -> None:
    shown = subprocess.run(
        [*entrypoint, "--help"], env={}, capture_output=True, text=True, check=True
    )

    assert "storectl serve [OPTIONS]" in shown.stdout


def test_it_holds_neither_jax_nor_what_installs(installed: Path) -> None:
    (packages,) = installed.glob("lib/python3.*/site-packages")
    found = {path.name for path in packages.iterdir()}

    assert {"storesvc", "storesvc_client", "storesvc_proto", "tensorstore"} <= found
    assert set() == found & {"flax", "hatchling", "jax", "pip", "pytest", "setuptools"}


def test_it_serves_a_bucket_as_a_user_who_can_write_nothing(
    address: str, installed: Path
) -> None:
    with grpc.insecure_channel(address) as channel:
        asked = HealthStub(channel).Check(  # type: ignore[attr-defined]  # its stubs lack it
            health_pb2.HealthCheckRequest(),
            timeout=PATIENCE_SECONDS,
            wait_for_ready=True,
        )
    pinged = subprocess.run(
        [installed / "bin" / "storectl", "--store", address, "ping"],
        env={},
        capture_output=True,
        text=True,
        check=True,
    )

    assert health_pb2.HealthCheckResponse.SERVING == asked.status
    assert pinged.stdout.startswith(f"{address}: store ")
