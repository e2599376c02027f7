"""Sockets of this machine, as the kernel lists them."""

import socket
from pathlib import Path


def free_port() -> int:
    """Returns a port that no process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def sockets(port: str) -> set[str]:
    """Returns the inodes of the sockets that are connected to a local port."""
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    rows = [row.split() for table in tables for row in table.read_text().splitlines()]
    end = f":{int(port):04X}"
    return {row[9] for row in rows if row[2].endswith(end) and row[3] == "01"}
