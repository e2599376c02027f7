"""TLS of a client: its targets, its certificates, a channel that reloads them, and the
reasons why client or server reject them.

A target is the servers that a client calls. A name may have several addresses, one for
each replica, like a headless service in Kubernetes. gRPC resolves it, and again when a
server is lost. A list names the replicas one by one; its names are resolved once, when
a channel is created.

A gRPC channel keeps the certificates it was created with, and stubs keep their channel.
``RenewedChannel`` connects again when a call starts and the files have changed. Calls
in flight stay on the channel they started on, which closes after the last of them.
Files that do not match each other, for example between the renaming of the certificate
and of its key, are ignored until they change again.
"""

import ipaddress
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeAlias
from urllib.parse import urlsplit

import grpc

from storesvc.storage.location import is_this_machine
from storesvc_client.errors import InvalidRequestError, UnavailableError

_log = logging.getLogger("storesvc_client")

_UNIX: Final = "unix:"
_SCHEMES: Final = ("dns:///", "ipv4:", "ipv6:", _UNIX)
"""Prefixes of gRPC targets: a name, a list of addresses, or a socket."""

_URLS: Final = ("http", "https", "grpc", "grpcs")
"""Schemes that others give to the address of a server."""


def is_root(target: str) -> bool:
    """Returns whether a target is the root of a store rather than its servers."""
    scheme, separator, _ = target.partition("://")
    return bool(separator) and scheme not in _URLS and not target.startswith(_SCHEMES)


@dataclass(frozen=True, slots=True)
class Target:
    """The servers of one store."""

    text: str
    """The target as given, for messages."""
    hosts: tuple[tuple[str, int], ...]
    """Host and port of each server; empty for a Unix socket."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a target."""
        if text.startswith(_UNIX) and text != _UNIX:
            return cls(text, ())
        scheme = next(filter(text.startswith, _SCHEMES), "")
        hosts = tuple(map(_split, text.removeprefix(scheme).split(",")))
        if None in hosts:
            url = urlsplit(text)
            has_port = url.netloc.rpartition(":")[2].isdigit()
            place = url.netloc if has_port else f"{url.netloc}:7070"
            hint = f"; did you mean {place}?" if url.scheme in _URLS else ""
            raise InvalidRequestError(
                f"store {text!r}: expected HOST:PORT, several with commas between, "
                "unix:PATH, file:///PATH, gs://BUCKET/PREFIX, s3://BUCKET/PREFIX or "
                f"memory://{hint}"
            )
        return cls(text, tuple(filter(None, hosts)))

    @property
    def is_loopback(self) -> bool:
        """True if the servers are on this machine."""
        return all(is_this_machine(host) for host, _ in self.hosts)

    @property
    def is_list(self) -> bool:
        """True if it names several servers."""
        return len(self.hosts) > 1

    def address(self) -> str:
        """Returns the target for gRPC; resolves the names of a list.

        Raises:
            UnavailableError: A name of a list has no address.
        """
        if not self.hosts:
            return self.text
        if not self.is_list:
            ((host, port),) = self.hosts
            return f"dns:///[{host}]:{port}" if ":" in host else f"dns:///{host}:{port}"
        found = [address for host in self.hosts for address in self._look_up(*host)]
        if all(address.version == 4 for address, _ in found):
            return "ipv4:" + ",".join(f"{address}:{port}" for address, port in found)
        # gRPC lists have one address family; IPv6 can express IPv4 addresses
        wide = (
            (f"::ffff:{address}" if address.version == 4 else address, port)
            for address, port in found
        )
        return "ipv6:" + ",".join(f"[{address}]:{port}" for address, port in wide)

    def _look_up(
        self, host: str, port: int
    ) -> Iterator[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
        try:
            rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as e:
            raise UnavailableError(
                f"store {self.text}: cannot resolve {host} ({e.strerror}); check "
                "the name"
            ) from e
        for *_, where in rows:
            yield ipaddress.ip_address(where[0]), port


def _split(text: str) -> tuple[str, int] | None:
    try:
        url = urlsplit(f"//{text}")
        if url.hostname and url.port and url.netloc == text and not url.username:
            return url.hostname, url.port
    except ValueError:
        pass
    return None


State: TypeAlias = tuple[tuple[int, int, int] | None, ...]
"""Mtime, inode and size of each file; None for an absent one."""

_CONNECT_SECONDS = 5.0
"""Timeout of a test connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """The certificate files of a client, in PEM format."""

    ca: Path | None
    """Trusted authorities; None trusts the system's authorities."""
    cert: Path | None
    """Client certificate, for servers that require one."""
    key: Path | None

    def __post_init__(self) -> None:
        """Checks the files."""
        if (self.cert is None) != (self.key is None):
            given, missing = ("cert", "key") if self.cert else ("key", "cert")
            raise InvalidRequestError(
                f"{given}: expected {missing}= with it, because a certificate needs "
                f"its key; got {self.cert or self.key} alone"
            )
        self.context()

    def state(self) -> State:
        """Returns a value that changes when a file changes."""
        return tuple(map(_state, self._files().values()))

    def credentials(self) -> grpc.ChannelCredentials:
        """Returns the files as credentials for gRPC."""
        self.context()
        data = {name: _read(name, file) for name, file in self._files().items()}
        return grpc.ssl_channel_credentials(
            data.get("ca"), data.get("key"), data.get("cert")
        )

    def context(self) -> ssl.SSLContext:
        """Returns the files as a context of Python's ssl module."""
        for name, file in self._files().items():
            _read(name, file)  # its error names the file, unlike that of ssl
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except OSError as e:  # includes ssl.SSLError
            raise InvalidRequestError(
                f"ca: expected a PEM certificate in {self.ca}, found none ({_cause(e)})"
            ) from e
        # As strict as gRPC: from Python 3.13 on, the default also rejects certificates
        # without an authority key identifier.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        context.set_alpn_protocols(["h2"])
        if self.cert and self.key:
            try:
                # an empty password prevents a prompt at the terminal
                context.load_cert_chain(self.cert, self.key, password="")
            except (OSError, ValueError) as e:
                raise InvalidRequestError(
                    f"cert: expected {self.cert} and {self.key} to be a certificate "
                    f"and its key in PEM without a password ({_cause(e)})"
                ) from e
        return context

    def _files(self) -> dict[str, Path]:
        files = {"ca": self.ca, "cert": self.cert, "key": self.key}
        return {name: file for name, file in files.items() if file is not None}


def refusal(target: Target, tls: Tls | None) -> str | None:
    """Returns why TLS between client and server fails, or None if it does not.

    Connects to the server, because gRPC does not always report the reason.

    Raises:
        InvalidRequestError: The client's files cannot be used any more.
    """
    host, port = target.hosts[0]
    if tls is None:
        if not _speaks_tls(host, port):
            return None
        return (
            f"store {target.text}: {host}:{port} requires TLS: expected ca, a file "
            "with its authorities, without insecure, got plaintext"
        )
    context = tls.context()
    try:
        with (
            socket.create_connection((host, port), _CONNECT_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as connection,
        ):
            # An HTTP/2 server starts with its settings (RFC 9113, 3.4). A server that
            # rejects the client certificate does so after the TLS 1.3 handshake.
            if connection.recv(1):
                return None
    except ssl.SSLCertVerificationError as e:
        trusted = "the system's authorities" if tls.ca is None else f"ca {tls.ca}"
        return (
            f"store {target.text}: the certificate of {host}:{port} is not trusted by "
            f"{trusted}: {e.verify_message.rstrip('.')}"
        )
    except ssl.SSLError as e:
        if "ALERT" not in (e.reason or ""):
            return (
                f"store {target.text}: {host}:{port} does not speak TLS ({_cause(e)}); "
                "start it with a certificate, or pass insecure instead of ca, cert "
                "and key"
            )
    except ConnectionResetError:
        pass
    except OSError:  # the server is unavailable or slow
        return None
    if tls.cert is None:
        return (
            f"store {target.text}: {host}:{port} requires a client certificate: "
            "expected cert and key, got none"
        )
    return (
        f"store {target.text}: {host}:{port} rejects the certificate {tls.cert}; it "
        "has expired, or its authority is not trusted by the server"
    )


def _speaks_tls(host: str, port: int) -> bool:
    """Returns whether a server completes a TLS handshake; verifies no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, port), _CONNECT_SECONDS) as plain,
            context.wrap_socket(plain),
        ):
            return True
    except OSError:  # unavailable, slow, or another protocol
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


class ForwardingChannel(grpc.Channel):
    """Delegates to another channel. A subclass says how it makes a call."""

    _channel: grpc.Channel

    def _method(self, kind: str, arguments: Any, options: Any) -> Callable[..., Any]:
        raise NotImplementedError

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """Returns a callable; unlike gRPC's, it has no methods such as ``future``."""
        return self._method("unary_unary", arguments, options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._method("unary_stream", arguments, options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._method("stream_unary", arguments, options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._method("stream_stream", arguments, options)

    def subscribe(
        self,
        callback: Callable[[grpc.ChannelConnectivity], None],
        try_to_connect: bool = False,  # noqa: FBT001, FBT002 - gRPC's signature
    ) -> None:
        self._channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        self._channel.unsubscribe(callback)

    def close(self) -> None:
        self._channel.close()


class RenewedChannel(ForwardingChannel):
    """Delegates calls to the newest of a series of channels to one target."""

    def __init__(
        self, tls: Tls, dial: Callable[[grpc.ChannelCredentials], grpc.Channel]
    ) -> None:
        self._tls = tls
        self._dial = dial
        self._renewing = threading.Lock()
        self._is_open = True
        self._state = tls.state()
        self._channel = dial(tls.credentials())

    def subscribe(
        self,
        callback: Callable[[grpc.ChannelConnectivity], None],
        try_to_connect: bool = False,  # noqa: FBT001, FBT002 - gRPC's signature
    ) -> None:
        """Subscribes to the current channel only."""
        self._current().subscribe(callback, try_to_connect)

    def close(self) -> None:
        """Closes the current channel and cancels its calls."""
        with self._renewing:
            self._is_open = False
            self._channel.close()

    def _method(self, kind: str, arguments: Any, options: Any) -> Callable[..., Any]:
        def call(*request: Any, **how: Any) -> Any:
            method = getattr(self._current(), kind)(*arguments, **options)
            return method(*request, **how)

        return call

    def _current(self) -> grpc.Channel:
        with self._renewing:
            state = self._tls.state()
            if state != self._state and self._is_open:
                try:
                    credentials = self._tls.credentials()
                except InvalidRequestError as e:
                    _log.warning("certificates not reloaded, old ones stay: %s", e)
                else:
                    # gRPC closes the old channel once no call refers to it.
                    self._channel = self._dial(credentials)
                self._state = state
            return self._channel
