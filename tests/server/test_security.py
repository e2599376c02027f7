"""A server process starts only with a security that its configuration states."""

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import storesvc_client as store
from tests.support.certificates import Authority
from tests.support.server_process import EndedError, ServerProcess

POLICY = '[[bindings]]\nrole = "{role}"\nruns = ["**"]\nwho = ["local"]\n'


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers; those that end are stopped, too."""
    made: list[ServerProcess] = []

    def start(*arguments: str) -> ServerProcess:
        server = ServerProcess(tmp_path / "store", tmp_path, *arguments)
        made.append(server)
        server.start()
        return server

    yield start
    for server in made:
        server.stop()


@pytest.fixture
def tls(tmp_path: Path) -> list[str]:
    """Returns the options of a server with a certificate."""
    authority = Authority(tmp_path)
    pair = authority.issue("server", "localhost", "127.0.0.1")
    return ["--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)]


@pytest.mark.slow
def test_others_are_served_only_with_a_policy_or_a_role(
    serve: Callable[..., ServerProcess], tls: list[str]
) -> None:
    others = ["--host", "0.0.0.0"]
    with pytest.raises(EndedError, match="expected a loopback address or TLS"):
        serve(*others)
    with pytest.raises(EndedError, match="expected a loopback address or a policy"):
        serve(*others, *tls)
    with pytest.raises(EndedError, match="expected a loopback address or TLS"):
        serve(*others, "--anonymous", "reader")

    assert serve(*others, *tls, "--anonymous", "reader").is_running


@pytest.mark.slow
def test_plaintext_to_others_is_served_if_it_is_asked_for(
    serve: Callable[..., ServerProcess],
) -> None:
    assert serve("--host", "0.0.0.0", "--insecure").is_running


@pytest.mark.slow
def test_a_policy_with_an_error_ends_the_start_with_its_place(
    serve: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY.format(role="king"))

    with pytest.raises(
        EndedError, match=r"bindings\[0\]\.role: expected one of reader"
    ):
        serve("--policy", str(policy))


def test_an_anonymous_role_limits_everyone(serve: Callable[..., ServerProcess]) -> None:
    server = serve("--anonymous", "reader")
    with store.connect(server.address) as client:
        assert client.runs() is not None
        assert client.test_permissions("prod", ["runs.list", "uploads.begin"]) == [
            "runs.list"
        ]
        with pytest.raises(store.PermissionDeniedError, match=r"uploads\.begin"):
            client.run("prod/llama").save(1, {"w": 1}).result()


@pytest.mark.slow
def test_a_changed_policy_applies_to_the_next_calls(
    serve: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY.format(role="reader"))
    server = serve("--policy", str(policy))
    with store.connect(server.address) as client:
        assert not client.test_permissions("prod", ["uploads.begin"])
        policy.write_text(POLICY.format(role="writer"))
        for _ in range(10**4):
            if client.test_permissions("prod", ["uploads.begin"]):
                break
        assert client.test_permissions("prod", ["uploads.begin"])
        assert "reloaded the policy" in server.log


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["policy", "certificate", "key"])
def test_a_fifo_instead_of_a_file_stops_no_server(
    serve: Callable[..., ServerProcess], tls: list[str], tmp_path: Path, kind: str
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY.format(role="writer"))
    server = serve(*tls, "--policy", str(policy))
    file = {"policy": policy, "certificate": Path(tls[1]), "key": Path(tls[3])}[kind]
    kept = file.rename(file.with_suffix(".kept"))
    os.mkfifo(file)
    ca = tmp_path / "authority.pem"
    for step in range(2):
        time.sleep(1.1)  # the server looks again
        with store.connect(server.address, ca=ca, timeout=5) as client:
            client.run("prod/a").save(step, {"w": 1}).result(timeout=5)
    assert "keeping the previous" in server.log
    assert "expected a regular file, got another kind" in server.log

    server.stop()
    with pytest.raises(EndedError, match="expected a regular file, got another kind"):
        server.start()
    kept.rename(file)
    server.start()


@pytest.mark.slow
def test_a_client_certificate_without_a_uri_name_is_no_identity(
    serve: Callable[..., ServerProcess], tls: list[str], tmp_path: Path
) -> None:
    authority = Authority(tmp_path, "clients")
    policy = tmp_path / "policy.toml"
    policy.write_text(
        '[[bindings]]\nrole="writer"\nruns=["**"]\nwho=["spiffe://td/ns/train/*"]\n'
    )
    server = serve(
        *tls, "--tls-client-ca", str(authority.certificate), "--policy", str(policy)
    )
    good = authority.issue("good", uris=["spiffe://td/ns/train/sa/job"])
    none = authority.issue("none")
    two = authority.issue("two", uris=["spiffe://td/a", "spiffe://td/b"])
    ca = tmp_path / "authority.pem"

    other = tmp_path / "other.toml"
    pem = authority.certificate.read_text()
    domains = f'[trust_domains]\nanother = """{pem}"""\n'
    other.write_text(policy.read_text() + domains)
    elsewhere = serve(
        *tls, "--tls-client-ca", str(authority.certificate), "--policy", str(other)
    )
    with pytest.raises(store.UnauthenticatedError, match="of the trust domain td"):
        store.connect(
            elsewhere.address, ca=ca, cert=good.certificate, key=good.key
        ).close()
    with store.connect(
        server.address, ca=ca, cert=good.certificate, key=good.key
    ) as client:
        identity = client.identity()
        assert identity.principal == "spiffe://td/ns/train/sa/job"
        assert identity.authentication == "certificate"
        client.run("prod/llama").save(1, {"w": 1}).result()
        assert client.run("prod/llama").latest().principal == identity.principal
    group = authority.issue("group", uris=["group:admins"])
    for pair, count in ((none, 0), (two, 2), (group, 1)):
        with pytest.raises(store.UnauthenticatedError, match=f"got {count}"):
            store.connect(server.address, ca=ca, cert=pair.certificate, key=pair.key)


@pytest.mark.slow
def test_callers_of_this_machine_have_no_rights_where_others_connect(
    serve: Callable[..., ServerProcess], tls: list[str], tmp_path: Path
) -> None:
    """Sidecars, proxies and port-forwards call from a loopback address."""
    policy = tmp_path / "policy.toml"
    others = ["--host", "0.0.0.0", *tls, "--policy", str(policy)]
    policy.write_text(POLICY.format(role="manager"))
    with pytest.raises(EndedError, match=r"who\[0\]: expected.*got 'local'"):
        serve(*others)
    policy.write_text(POLICY.format(role="manager").replace("local", "*"))
    server = serve(*others)
    ca = tmp_path / "authority.pem"
    with store.connect(at_localhost(server), ca=ca) as client:
        assert client.info().version  # as a probe asks
        for call in (client.identity, client.run("prod/r").steps):
            with pytest.raises(store.UnauthenticatedError, match="has no identity"):
                call()

        policy.write_text(POLICY.format(role="manager"))
        deadline = time.monotonic() + 60
        while "keeping the previous policy" not in server.log:
            assert time.monotonic() < deadline
            client.info()


def at_localhost(server: ServerProcess) -> str:
    """Returns the address of a server by a name of its certificate."""
    return f"localhost:{server.address.rpartition(':')[2]}"


@pytest.mark.slow
def test_a_unix_socket_serves_its_user_alone(
    serve: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    socket = tmp_path / "own" / "socket"
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY.format(role="writer"))
    server = serve("--unix", str(socket), "--policy", str(policy))
    assert server.address == f"unix:{socket}"
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    with store.connect(f"unix:{socket}") as client:
        assert client.identity().principal == "local"
        client.run("prod/r").save(1, {"w": 1}).result()
    shown = subprocess.run(
        [sys.executable, "-m", "storesvc_client.cli", "-s", server.address, "ls"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "prod/r" in shown.stdout

    with pytest.raises(EndedError, match="it is in use"):
        serve("--unix", str(socket))
    socket.parent.chmod(0o755)
    with pytest.raises(EndedError, match=r"only this user may enter.*mkdir -m 700"):
        serve("--unix", str(socket))
    with pytest.raises(EndedError, match="--unix goes with neither"):
        serve("--unix", str(socket), "--host", "0.0.0.0")


@pytest.mark.slow
def test_a_server_for_every_user_of_the_machine_says_so(
    serve: Callable[..., ServerProcess],
) -> None:
    assert "every user of this machine may call it" in serve().log
