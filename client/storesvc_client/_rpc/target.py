"""Targets: the servers that a client calls.

A name may have several addresses, one for each replica, like a headless service in
Kubernetes. gRPC resolves it, and again when a server is lost. A list names the replicas
one by one; its names are resolved once, when a channel is created.
"""

import ipaddress
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import urlsplit

from storesvc.storage.location import is_this_machine
from storesvc_client.errors import InvalidRequestError, UnavailableError

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
        """Parses a target.

        Raises:
            InvalidRequestError: It names no server.
        """
        if text.startswith(_UNIX) and text != _UNIX:
            return cls(text, ())
        scheme = next(filter(text.startswith, _SCHEMES), "")
        hosts = tuple(map(_split, text.removeprefix(scheme).split(",")))
        if None in hosts:
            url = urlsplit(text)
            hint = f"; did you mean {url.netloc}?" if url.scheme in _URLS else ""
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
