"""A server in a separate process, as operators run it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import storesvc_client as store

START_SECONDS = 30


class EndedError(Exception):
    """The server ended before it accepted calls."""


RESTRICTED: Final = "STORESVC_TEST_RESTRICTED"
"""Environment variable: servers of tests have a policy, quotas and an audit log; with
the value "tokens" also TLS, and only callers with a token."""

_ISSUER: Final = """
[[issuers]]
name = "tests"
issuer = "https://issuer.example"
audiences = ["storesvc"]
jwks_file = "{keys}"
principal = "user:{{sub}}"
"""

_POLICY: Final = """
[[bindings]]
role = "admin"
runs = ["**"]
who = ["{who}"]

[[quotas]]
namespaces = ["*"]
streams = 100000
requests_per_second = 1000000

[quotas_per_principal]
streams = 100000
requests_per_second = 1000000
"""


class _Options(NamedTuple):
    """Options of a server, and what its clients connect with."""

    server: Sequence[str] = ()
    ca: Path | None = None
    token: str | None = None


def _restricted(arguments: tuple[str, ...], directory: Path) -> _Options:
    """Returns the options of a server that restricts its callers, if requested."""
    if RESTRICTED not in os.environ or "--policy" in arguments:
        return _Options()
    policy = directory / "policy-of-all.toml"
    log = [] if "--audit-log" in arguments else ["--audit-log", f"{directory}/audit"]
    options = ["--policy", str(policy), *log]
    if os.environ[RESTRICTED] != "tokens":
        policy.write_text(_POLICY.format(who="local"))
        return _Options(options)
    from tests.support.certificates import Authority
    from tests.support.tokens import keys_document, signed

    keys, authority = directory / "keys.json", Authority(directory)
    pair = authority.issue("server", "localhost", "127.0.0.1")
    keys.write_text(keys_document())
    policy.write_text(_ISSUER.format(keys=keys) + _POLICY.format(who="user:tests"))
    options += ["--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)]
    return _Options(options, authority.certificate, signed("tests"))


class ServerProcess:
    """``storectl serve`` of one root, on the same port across kills and restarts."""

    def __init__(
        self, root: Path, directory: Path, *arguments: str, uri: str = ""
    ) -> None:
        """Makes a server that is not started.

        Args:
            root: Directory of its store.
            directory: Directory of its log.
            arguments: Additional arguments of its command.
            uri: Root of its store if it is not a directory on this machine.
        """
        self.root = root
        self._uri = uri or root.as_uri()
        self._ready = directory / "ready"
        self._log = directory / "server.log"
        self._restricted = _restricted(arguments, directory)
        self._arguments = (*arguments, *self._restricted.server)
        self.environment: dict[str, str] = {}
        """Additional environment variables; they apply from the next start on."""
        self._port = "0"
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""

    @property
    def pid(self) -> int:
        """ID of the process."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it still runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """Output of the process."""
        return self._log.read_text()

    def connect(self) -> "store.Client":
        """Returns a client of it, with the credentials that it requires."""
        needed = self._restricted
        return store.connect(self.address, ca=needed.ca, token=needed.token)

    def start(self) -> None:
        """Starts it and waits until it accepts calls.

        Raises:
            EndedError: It ended before.
        """
        self.launch()
        self.await_ready()

    def launch(self) -> None:
        """Starts it."""
        self._ready.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "storesvc_client.cli", "serve"),
                    *("--root", self._uri, "--port", self._port),
                    *("--ready-file", str(self._ready), *self._arguments),
                ],
                stdout=log,
                stderr=log,
                env=os.environ | self.environment,
            )

    def await_ready(self) -> None:
        """Waits until it accepts calls.

        Raises:
            EndedError: It ended before.
        """
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while not self._ready.exists():
            if self._process.poll() is not None:
                raise EndedError(self.log)
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)
        self.address = self._ready.read_text().strip()
        self._port = self.address.rpartition(":")[2]

    def wait(self) -> int:
        """Waits until it has ended, and returns its exit code."""
        assert self._process is not None
        return self._process.wait(START_SECONDS)

    def kill(self) -> None:
        """Kills it with SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """Stops it with SIGTERM, and returns its exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        assert self._process is not None
        # does nothing if it has already ended
        self._process.send_signal(number)
        return self.wait()
