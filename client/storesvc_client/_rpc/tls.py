"""The certificates of a client, and why they, or those of a server, are refused.

Calls use what the files hold when they begin: a channel is dialled anew once they have
changed (see ``certificate_renewal``). Files that do not fit each other, as between the
renaming of one and of the next, are passed over until they change again.
"""

import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc

from storesvc_client._rpc.target import Target
from storesvc_client.errors import InvalidRequestError

State: TypeAlias = tuple[tuple[int, int, int] | None, ...]
"""Of each file, what changes with it."""

_ASK_SECONDS = 5.0
"""How long a server may take to refuse a connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """What a client trusts, and shows, in PEM."""

    ca: Path | None
    """Authorities to trust; None: those of the system."""
    cert: Path | None
    """Its own certificate, for servers that ask for one."""
    key: Path | None

    def __post_init__(self) -> None:
        """Checks the files.

        Raises:
            InvalidRequestError: One is missing, or they cannot be used.
        """
        if (self.cert is None) != (self.key is None):
            given, missing = ("cert", "key") if self.cert else ("key", "cert")
            raise InvalidRequestError(
                f"{given}: expected {missing}= with it, as a certificate is of use "
                f"only with its key; got {self.cert or self.key} alone"
            )
        self.context()

    def state(self) -> State:
        """Returns what tells that the files have changed."""
        return tuple(map(_state, self._files().values()))

    def credentials(self) -> grpc.ChannelCredentials:
        """Returns what gRPC wants.

        Raises:
            InvalidRequestError: The files cannot be used.
        """
        self.context()
        data = {name: _read(name, file) for name, file in self._files().items()}
        return grpc.ssl_channel_credentials(
            data.get("ca"), data.get("key"), data.get("cert")
        )

    def context(self) -> ssl.SSLContext:
        """Returns what Python's own TLS wants.

        Raises:
            InvalidRequestError: The files cannot be used.
        """
        for name, file in self._files().items():
            _read(name, file)  # what ssl says of one that is absent does not name it
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except OSError as e:  # ssl.SSLError is one
            raise InvalidRequestError(
                f"ca: {self.ca} holds no certificate in PEM ({_cause(e)})"
            ) from e
        context.set_alpn_protocols(["h2"])
        if self.cert and self.key:
            try:
                # without a password, it would be asked for at the terminal
                context.load_cert_chain(self.cert, self.key, password="")
            except (OSError, ValueError) as e:
                raise InvalidRequestError(
                    f"cert: {self.cert} and {self.key} are no certificate and its key "
                    f"without a password, in PEM ({_cause(e)})"
                ) from e
        return context

    def _files(self) -> dict[str, Path]:
        files = {"ca": self.ca, "cert": self.cert, "key": self.key}
        return {name: file for name, file in files.items() if file is not None}


def refusal(target: Target, tls: Tls | None) -> str | None:
    """Returns why a server and a client do not come together, where it is for their
    certificates, or as one has none; asks the server, as gRPC does not always say.

    Raises:
        InvalidRequestError: The client's files cannot be used any more.
    """
    host, port = target.hosts[0]
    if tls is None:
        if not _speaks_tls(host, port):
            return None
        return (
            f"store {target.text}: {host}:{port} wants TLS: expected ca, a file with "
            "its authorities, without insecure, got plaintext"
        )
    context = tls.context()
    try:
        with (
            socket.create_connection((host, port), _ASK_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as connection,
        ):
            # A server that speaks HTTP/2 begins with its settings. One that refuses a
            # certificate does so after the handshake.
            if connection.recv(1):
                return None
    except ssl.SSLCertVerificationError as e:
        trusted = "the system's authorities" if tls.ca is None else f"ca {tls.ca}"
        return (
            f"store {target.text}: the certificate of {host}:{port} is refused, with "
            f"{trusted}: {e.verify_message.rstrip('.')}"
        )
    except ssl.SSLError as e:
        if "ALERT" not in (e.reason or ""):
            return (
                f"store {target.text}: {host}:{port} does not speak TLS ({_cause(e)}); "
                "give it a certificate, or insecure in place of ca, cert and key"
            )
    except ConnectionResetError:
        pass
    except OSError:  # it is not there, or slow
        return None
    if tls.cert is None:
        return (
            f"store {target.text}: {host}:{port} wants a certificate of the client: "
            "expected cert and key, got none"
        )
    return (
        f"store {target.text}: {host}:{port} refuses the certificate {tls.cert}; it is "
        "of another authority than the server trusts, or expired"
    )


def _speaks_tls(host: str, port: int) -> bool:
    """Whether a server does; it is told nothing, and not believed either."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, port), _ASK_SECONDS) as plain,
            context.wrap_socket(plain),
        ):
            return True
    except OSError:  # it is not there, or slow, or speaks something else
        return False


def _read(name: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as e:
        raise InvalidRequestError(f"{name}: cannot read {file}: {e.strerror}") from e


def _state(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _cause(e: Exception) -> str:
    return (isinstance(e, ssl.SSLError) and e.reason) or str(e)
