"""TLS certificates of a server, reloaded when their files change.

gRPC requests the certificates at each handshake, so a new connection uses the current
files; open connections continue. Files that do not match each other, such as between
two renames during a rotation, are ignored: the previous certificates stay in use until
the files change again.
"""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from storesvc.errors import InvalidFieldError
from storesvc.storage.config_files import FileCheck, FileState, file_state, read_file

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Paths of a server's certificate files in PEM format."""

    certificate: Path
    """The server's certificate, followed by the intermediate certificates."""
    key: Path
    client_ca: Path | None = None
    """Authorities that must have issued client certificates; None: clients need
    none."""

    def credentials(self) -> grpc.ServerCredentials:
        """Returns gRPC credentials that reload the files.

        Raises:
            InvalidFieldError: The files are unusable.
        """
        current = _Current(self)
        return grpc.dynamic_ssl_server_credentials(
            current.configuration,
            current.fetch,  # type: ignore[arg-type]  # the stubs forbid None
            require_client_authentication=self.client_ca is not None,
        )

    def state(self) -> tuple[FileState | None, ...]:
        """Returns a value that changes whenever the files change."""
        return tuple(map(file_state, self._files()))

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Reads and validates the files.

        Raises:
            InvalidFieldError: The files are unusable.
        """
        self._check()
        certificate, key, *client_ca = (read_file(file) for file in self._files())
        return grpc.ssl_server_certificate_configuration(
            [(key, certificate)], client_ca[0] if client_ca else None
        )

    def _files(self) -> tuple[Path, ...]:
        files = (self.certificate, self.key)
        return files if self.client_ca is None else (*files, self.client_ca)

    def _check(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for file in self._files():
            try:  # ssl's own error does not name the file
                read_file(file)
            except OSError as e:
                raise InvalidFieldError(f"TLS: cannot read {file}: {e.strerror}") from e
        try:
            # Without a password argument, OpenSSL would prompt for one.
            context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError) as e:  # ssl.SSLError is an OSError
            raise InvalidFieldError(
                "TLS: expected a certificate and its key without a password, in PEM, "
                f"got {self.certificate} and {self.key} ({_cause(e)})"
            ) from e
        if self.client_ca is None:
            return
        try:
            context.load_verify_locations(self.client_ca)
        except OSError as e:
            raise InvalidFieldError(
                f"TLS: expected certificates in PEM, got {self.client_ca} ({_cause(e)})"
            ) from e


class _Current:
    """The certificates that were read last."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._state = tls.state()
        self.configuration = tls.read()
        self._changed: grpc.ServerCertificateConfiguration | None = None
        self._check = FileCheck(self._reload, what=f"TLS {tls.certificate}")

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns the certificates if they changed and are usable, else None.

        gRPC calls it in its own threads, one at a time.
        """
        self._check.run()
        found, self._changed = self._changed, None
        return found

    def _reload(self) -> None:
        state = self._tls.state()
        if state == self._state:
            return
        self._state = state
        try:
            self._changed = self._tls.read()
        except (InvalidFieldError, OSError) as e:
            _log.warning("keeping the previous certificates: %s", e)
        else:
            _log.info("reloaded the certificates: %s", self._tls.certificate)


def _cause(e: Exception) -> str:
    return (isinstance(e, ssl.SSLError) and e.reason) or str(e)
