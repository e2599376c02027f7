"""The installed package matches pyproject.toml and the locks."""

import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest

import storesvc_client
import storesvc_proto.v1
from storesvc_proto.v1 import errors_pb2_grpc

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
IMAGES = {"server": {"server", "gcs"}, "training": {"server", "gcs", "jax"}}
"""The locks of the images in deploy/, and the extras in each."""

each_lock = pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)


def lock_of(name: str) -> Path:
    return ROOT / "requirements" / f"{name}.lock"


def pins(lock: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(), flags=re.MULTILINE))


def pinned(lock: Path) -> set[str]:
    return set(pins(lock))


def normalized(requirement: str) -> str:
    """The bare name of a requirement, spelt as in a lock."""
    (name,) = re.findall(r"^[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", name).lower()


def required(extras: set[str]) -> set[str]:
    """The names of what the package needs with some extras."""
    found = set()
    for requirement in requires("storesvc") or ():
        extra = re.search(r"extra == [\"'](\w+)[\"']", requirement)
        if extra is None or extra[1] in extras:
            found.add(normalized(requirement))
    return found


def test_the_floor_of_grpcio_is_the_generators_version() -> None:
    floor = errors_pb2_grpc.GRPC_GENERATED_VERSION.removesuffix(".0")

    assert f"grpcio>={floor}" in (requires("storesvc") or ())


def test_the_floor_of_protobuf_is_the_generated_codes_version() -> None:
    (folder,) = storesvc_proto.v1.__path__
    floors = {
        floor
        for file in Path(folder).glob("*_pb2.py")
        for floor in re.findall(
            r"# Protobuf Python Version: ([\d.]+)", file.read_text()
        )
    }

    (floor,) = floors
    assert f"protobuf>={floor}" in (requires("storesvc") or ())


@each_lock
def test_a_lock_names_no_registry_and_no_folder(lock: Path) -> None:
    # Neither an address nor a path can be written without one.
    assert "/" not in lock.read_text()


@each_lock
def test_a_lock_pins_by_hash(lock: Path) -> None:
    entries = re.split(r"\n(?=[\w.-]+==)", lock.read_text())[1:]

    assert entries
    assert [] == [e for e in entries if "--hash=sha256:" not in e]


@pytest.mark.parametrize("name", ["dev", "easydel"])
def test_the_lock_of_an_environment_pins_every_dependency(name: str) -> None:
    everything = {normalized(r) for r in requires("storesvc") or ()}

    assert everything <= pinned(lock_of(name))


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_what_its_extras_need_as_the_tests_ran_with_it(image: str) -> None:
    found, tested = pins(lock_of(image)), pins(lock_of("dev"))
    needed = required(IMAGES[image])

    assert needed <= found.keys()
    assert set() == (required({"jax"}) - needed) & found.keys()
    assert found.items() <= tested.items()


def test_the_lock_with_easydel_leaves_torch_out() -> None:
    easydel = pinned(lock_of("easydel"))

    assert "easydel" in easydel
    assert set() == {name for name in easydel if re.match("torch|nvidia", name)}


@pytest.mark.parametrize("command", [[], ["--help"], ["ls", "--help"]])
def test_the_client_starts_on_a_base_install_and_without_jax(
    command: list[str],
) -> None:
    program = (
        "import sys, storesvc_client\n"
        f"command = {command}\n"
        "if command:\n"
        "    from storesvc_client.cli import main\n"
        "    main(command, standalone_mode=False)\n"
        "print(*sys.modules)"
    )

    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    modules = set(run.stdout.splitlines()[-1].split())
    assert "storesvc_client" in modules
    assert set() == modules & {"tensorstore"}  # [server]
    assert set() == modules & {"flax", "jax", "jaxlib", "optax", "orbax"}  # [jax]


def test_storectl_is_installed() -> None:
    storectl = Path(sys.executable).with_name("storectl")

    run = subprocess.run(
        [storectl, "--help"], capture_output=True, text=True, check=True
    )

    assert "Usage: storectl" in run.stdout


def test_the_clients_public_names_are_those_it_shows() -> None:
    assert sorted(vars(storesvc_client)["__all__"]) == dir(storesvc_client)
    for name in dir(storesvc_client):
        assert name == getattr(storesvc_client, name).__name__


def test_private_names_are_no_attributes_of_the_client() -> None:
    with pytest.raises(AttributeError, match="no attribute 'grpc'"):
        _ = storesvc_client.grpc  # type: ignore[attr-defined]  # there is none


def test_loggers_have_no_private_name() -> None:
    (client,) = map(Path, storesvc_client.__path__)
    modules = [path.relative_to(client) for path in client.rglob("*.py")]
    private = [path for path in modules if any(p.startswith("_") for p in path.parts)]

    assert len(private) > 100
    for path in private:
        assert "getLogger(__name__)" not in (client / path).read_text(), path
