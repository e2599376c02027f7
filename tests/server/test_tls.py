"""TLS: permitted clients, errors in one sentence, and files that change."""

import os
import shutil
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from storesvc_client._rpc import retry
from tests.support.certificates import Authority, Pair
from tests.support.server_process import EndedError, ServerProcess
from tests.support.sockets import sockets

LOOPBACK = ("localhost", "127.0.0.1")
YESTERDAY = datetime.now(UTC) - timedelta(days=1)


class Setting:
    """A server that requires client certificates, with files that tests may replace."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory)
        self.other = Authority(directory, "other")
        self.good = self.authority.issue("good", *LOOPBACK)
        self.client = self.authority.issue("client")
        self.served = Pair(
            certificate=directory / "served.pem", key=directory / "served.key"
        )
        self.served.replace(self.good)
        self.clients_ca = Path(
            shutil.copy(self.authority.certificate, directory / "clients-ca.pem")
        )
        home = directory / "server"
        home.mkdir()
        self.server = ServerProcess(
            home / "store",
            home,
            *("--tls-cert", str(self.served.certificate)),
            *("--tls-key", str(self.served.key)),
            *("--tls-client-ca", str(self.clients_ca)),
        )
        self.server.start()

    def connect(self, target: str = "", **changes: Any) -> store.Client:
        """Connects as a permitted client, with some options changed."""
        options: dict[str, Any] = {
            "ca": self.authority.certificate,
            "cert": self.client.certificate,
            "key": self.client.key,
        }
        return store.connect(target or self.server.address, **{**options, **changes})


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    setting = Setting(tmp_path_factory.mktemp("tls"))
    yield setting
    setting.server.kill()


@pytest.fixture
def setting(shared: Setting) -> Iterator[Setting]:
    """The server of the module; its files are put back after the test."""
    yield shared
    shared.served.replace(shared.good)
    shutil.copy(shared.authority.certificate, shared.clients_ca)


@pytest.fixture
def _endless_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets retries go on for long, so that a retried permanent error hangs the test."""
    monkeypatch.setattr(retry, "PATIENCE_SECONDS", 10_000)


def test_mutual_tls_serves_clients_with_trusted_certificates(setting: Setting) -> None:
    with setting.connect() as client:
        run = client.run("tests/tls")
        run.save(0, {"x": 1}).result()

        assert {"x": 1} == run.restore()


@pytest.mark.slow
def test_a_server_may_accept_clients_without_certificates(
    setting: Setting, start_server: Callable[..., ServerProcess]
) -> None:
    server = start_server(
        *("--tls-cert", str(setting.good.certificate)),
        *("--tls-key", str(setting.good.key)),
    )

    with store.connect(server.address, ca=setting.authority.certificate) as client:
        assert client.info().store_uid


@pytest.mark.slow
@pytest.mark.usefixtures("_endless_patience")
def test_a_plaintext_client_of_a_tls_server_fails_at_once(setting: Setting) -> None:
    address = setting.server.address
    with pytest.raises(store.UnavailableError) as shown:
        store.connect(address)
    assert (
        f"store {address}: {address} requires TLS: expected ca, a file with its "
        "authorities, without insecure, got plaintext"
    ) == str(shown.value)


@pytest.mark.slow
@pytest.mark.usefixtures("_endless_patience")
def test_an_untrusted_certificate_fails_at_once(setting: Setting) -> None:
    address = setting.server.address
    alien = setting.other.issue("alien")
    old = setting.authority.issue("old", until=YESTERDAY)
    refused = rf"store {address}: {address} rejects the certificate .*"
    for changes, match in (
        (
            {"ca": setting.other.certificate},
            rf"certificate of {address} is not trusted by ca .*other.pem: unable to",
        ),
        (
            {"cert": None, "key": None},
            "a client certificate: expected cert and key, got none",
        ),
        ({"cert": alien.certificate, "key": alien.key}, refused + "alien.pem"),
        ({"cert": old.certificate, "key": old.key}, refused + "old.pem"),
    ):
        with pytest.raises(store.UnavailableError, match=match):
            setting.connect(**changes)


@pytest.mark.slow
@pytest.mark.usefixtures("_endless_patience")
def test_a_server_is_rejected_until_its_certificate_is_right(setting: Setting) -> None:
    for name, hosts, until, match in (
        ("expired", LOOPBACK, YESTERDAY, "certificate has expired"),
        ("elsewhere", ["ckpt.example"], None, "not valid for '127.0.0.1'"),
    ):
        setting.served.replace(setting.authority.issue(name, *hosts, until=until))
        with pytest.raises(store.UnavailableError, match=match):
            setting.connect()
    setting.served.replace(setting.good)

    with setting.connect() as client:
        assert client.info().store_uid


@pytest.mark.slow
@pytest.mark.usefixtures("_endless_patience")
def test_every_server_of_a_list_is_verified_by_the_first_name(setting: Setting) -> None:
    setting.served.replace(setting.authority.issue("named", "localhost"))
    numbered = setting.server.address
    named = numbered.replace("127.0.0.1", "localhost")

    with setting.connect(f"{named},{numbered}") as client:
        assert client.info().store_uid
    with pytest.raises(store.UnavailableError, match=r"not valid for '127\.0\.0\.1'"):
        setting.connect(f"{numbered},{named}")


@pytest.mark.slow
@pytest.mark.usefixtures("_endless_patience")
def test_a_tls_client_of_a_plaintext_server_fails_at_once(
    setting: Setting, server_address: str
) -> None:
    expected = r"does not speak TLS \(WRONG_VERSION_NUMBER\); start it with a cert"
    with pytest.raises(store.UnavailableError, match=expected):
        store.connect(server_address, ca=setting.authority.certificate)


def test_clients_connect_while_a_server_rotates_its_certificate(
    setting: Setting,
) -> None:
    seen = set()
    has_ended = threading.Event()
    failed: list[Exception] = []

    def keep_connecting() -> None:
        while not has_ended.is_set():
            try:
                setting.connect().close()
            except store.StoreError as e:
                failed.append(e)

    thread = threading.Thread(target=keep_connecting)
    thread.start()
    for number in range(5):
        pair = setting.authority.issue(f"pair-{number}", *LOOPBACK)
        setting.served.replace(pair)
        seen.add(_presented(setting))
        assert pair.certificate.read_text().strip() == _presented(setting)
    has_ended.set()
    thread.join()

    assert [] == failed
    assert 5 == len(seen)


def _presented(setting: Setting) -> str:
    """Returns the certificate that the server presents to a new connection."""
    host, _, port = setting.server.address.rpartition(":")
    return ssl.get_server_certificate((host, int(port))).strip()


def test_a_half_finished_rotation_changes_nothing(setting: Setting) -> None:
    before = _presented(setting)
    pair = setting.authority.issue("half", *LOOPBACK)
    shutil.copy(pair.certificate, setting.served.certificate)

    assert before == _presented(setting)
    with setting.connect() as client:
        assert client.info().store_uid
    assert "keeping the previous certificates" in setting.server.log
    shutil.copy(pair.key, setting.served.key)
    assert pair.certificate.read_text().strip() == _presented(setting)


@pytest.mark.slow
def test_a_client_uses_its_rotated_files(setting: Setting, tmp_path: Path) -> None:
    ours = Pair(certificate=tmp_path / "our.pem", key=tmp_path / "our.key")
    trusted = Path(shutil.copy(setting.authority.certificate, tmp_path / "ca.pem"))
    ours.replace(setting.client)
    tree = {str(i): np.full(1 << 20, i, np.float32) for i in range(4)}
    options: dict[str, Any] = {"ca": trusted, "cert": ours.certificate, "key": ours.key}
    with setting.connect(**options) as client:
        run = client.run("tests/changing")
        run.save(0, tree).result()
        leaves = run.open(0).read(tree)
        assert (next(leaves)[1] == 0).all()

        # now both sides know another authority only
        setting.served.replace(setting.other.issue("their", *LOOPBACK))
        shutil.copy(setting.other.certificate, setting.clients_ca)
        shutil.copy(setting.other.certificate, trusted)
        ours.replace(setting.other.issue("ours"))
        setting.server.kill()  # ends the existing connections
        setting.server.start()

        for i, (_, array) in enumerate(leaves, start=1):
            assert (array == i).all()
        assert 0 == run.latest().step
        run.save(1, {"x": 1}).result()


def test_streams_survive_a_rotation_and_then_their_sockets_close(
    setting: Setting, tmp_path: Path
) -> None:
    ours = Pair(certificate=tmp_path / "our.pem", key=tmp_path / "our.key")
    ours.replace(setting.client)
    port = setting.server.address.rpartition(":")[2]
    with setting.connect(cert=ours.certificate, key=ours.key) as client:
        run = client.run("tests/outlasting")
        watch = run.watch()
        before = sockets(port)

        ours.replace(setting.authority.issue("again"))
        run.save(0, {"x": 1}).result()
        assert 0 == next(watch).step
        assert sockets(port) > before
        watch.close()

        deadline = time.monotonic() + 30
        while sockets(port) & before:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert 0 == run.latest().step


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"key": None}, r"cert: expected key= with it, .*client.pem alone"),
        ({"cert": None}, r"key: expected cert= with it, .*client.key alone"),
        (
            {"key": "other.key"},
            r"cert: expected .*client.pem and .*other.key to be a certi.*MATCH",
        ),
        (
            {"key": "authority.pem"},
            r"client.pem and .*authority.pem to be a certificate",
        ),
        ({"cert": "absent.pem"}, r"cert: cannot read .*absent.pem: No such file"),
        ({"ca": "absent.pem"}, r"ca: cannot read .*absent.pem: No such file"),
        (
            {"ca": "client.key"},
            r"ca: expected a PEM certificate in .*client.key, found none",
        ),
        ({"insecure": True}, r"expected insecure or certificates, got both"),
    ],
)
def test_unusable_files_are_rejected_before_any_request(
    setting: Setting, changes: dict[str, Any], match: str
) -> None:
    setting.authority.issue("other-client", file="other")
    directory = setting.client.key.parent
    located: dict[str, Any] = {
        k: directory / v if isinstance(v, str) else v for k, v in changes.items()
    }

    with pytest.raises(store.InvalidRequestError, match=match):
        setting.connect(**located)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("certificate", "key", "client_ca", "match"),
    [
        ("good.pem", "client.key", "authority.pem", "got .*good.pem and .*client.key"),
        ("good.key", "good.key", "authority.pem", "expected a certificate and its key"),
        (
            "good.pem",
            "good.key",
            "good.key",
            "expected certificates in PEM, got .*.key",
        ),
    ],
)
def test_a_server_rejects_unusable_files(
    setting: Setting,
    tmp_path: Path,
    certificate: str,
    key: str,
    client_ca: str,
    match: str,
) -> None:
    directory = setting.good.key.parent
    files = {"cert": certificate, "key": key, "client-ca": client_ca}
    arguments = [
        argument
        for option, file in files.items()
        for argument in (f"--tls-{option}", str(directory / file))
    ]

    with pytest.raises(EndedError, match=match) as caught:
        ServerProcess(tmp_path / "store", tmp_path, *arguments).start()
    assert "Traceback" not in str(caught.value)


@pytest.mark.slow
def test_storectl_reads_its_certificates_from_the_environment(setting: Setting) -> None:
    environment = {
        "STORECTL_STORE": setting.server.address,
        "STORECTL_CA": str(setting.authority.certificate),
        "STORECTL_CERT": str(setting.client.certificate),
        "STORECTL_KEY": str(setting.client.key),
    }

    assert 0 == _listed(environment)[0]
    del environment["STORECTL_CERT"], environment["STORECTL_KEY"]
    code, shown = _listed(environment)
    assert 1 == code
    assert shown.startswith(f"storectl: store {setting.server.address}: ")
    assert "requires a client certificate: expected cert and key" in shown
    assert 1 == shown.count("\n")


def _listed(environment: dict[str, str]) -> tuple[int, str]:
    """Returns the exit code and the error output of ``storectl ls``."""
    ran = subprocess.run(
        [sys.executable, "-m", "storesvc_client.cli", "ls"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.returncode, ran.stderr
