"""The certificates of a server, read again whenever their files change.

gRPC asks for them at each handshake, so a new connection gets what the files hold then;
those that are open go on. Files that do not fit each other, as between the renaming of
one and of the next, are passed over: what was read before counts until they change
again.
"""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc

from storesvc.errors import InvalidFieldError

_log = logging.getLogger(__name__)

_State: TypeAlias = tuple[tuple[int, int, int] | None, ...]
"""Of each file, what changes with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Where a server's certificates lie, in PEM."""

    certificate: Path
    """Its own, and those that lead to its authority."""
    key: Path
    client_ca: Path | None = None
    """Authorities whose certificates clients must have; None: clients need none."""

    def credentials(self) -> grpc.ServerCredentials:
        """Returns what gRPC wants.

        Raises:
            InvalidFieldError: The files cannot be used.
        """
        current = _Current(self)
        return grpc.dynamic_ssl_server_credentials(
            current.configuration,
            current.fetch,  # type: ignore[arg-type]  # its stubs forbid the None
            require_client_authentication=self.client_ca is not None,
        )

    def state(self) -> _State:
        """Returns what tells that the files have changed."""
        return tuple(_state(file) for file in self._files())

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Returns what the files hold.

        Raises:
            InvalidFieldError: They cannot be used.
        """
        self._check()
        certificate, key, *client_ca = (file.read_bytes() for file in self._files())
        return grpc.ssl_server_certificate_configuration(
            [(key, certificate)], client_ca[0] if client_ca else None
        )

    def _files(self) -> tuple[Path, ...]:
        files = (self.certificate, self.key)
        return files if self.client_ca is None else (*files, self.client_ca)

    def _check(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for file in self._files():
            try:  # what ssl says of one that is absent does not name it
                file.read_bytes()
            except OSError as e:
                raise InvalidFieldError(f"TLS: cannot read {file}: {e.strerror}") from e
        try:
            # without a password, it would be asked for at the terminal
            context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError) as e:  # ssl.SSLError is an OSError
            raise InvalidFieldError(
                f"TLS: {self.certificate} and {self.key} are no certificate and its "
                f"key without a password, in PEM ({_cause(e)})"
            ) from e
        if self.client_ca is None:
            return
        try:
            context.load_verify_locations(self.client_ca)
        except OSError as e:
            raise InvalidFieldError(
                f"TLS: {self.client_ca} holds no certificate in PEM ({_cause(e)})"
            ) from e


class _Current:
    """What was read last."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._state = tls.state()
        self.configuration = tls.read()

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns what the files hold, where that is new and can be used.

        gRPC calls it in threads of its own, one at a time.
        """
        state = self._tls.state()
        if state == self._state:
            return None
        self._state = state
        try:
            configuration = self._tls.read()
        except (InvalidFieldError, OSError) as e:
            _log.warning("the certificates stay those that were read before: %s", e)
            return None
        _log.info("certificates read again: %s", self._tls.certificate)
        return configuration


def _state(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _cause(e: Exception) -> str:
    return (isinstance(e, ssl.SSLError) and e.reason) or str(e)
