"""Names and descriptions of the works and the contenders.

Does not import jax, so that the process that lists names or waits for the rounds starts
fast.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

FLOORS: Final = ("memcpy", "files", "grpc")
"""One copy of the state, its bytes in plain files (fsync included), its bytes through
gRPC with nothing packed."""

_WAYS: Final = ("embedded", "embedded-none", "direct-none", "streamed-none")

LOCAL: Final = (
    *("embedded", "embedded-none", "embedded-none-new", "direct", "direct-none"),
    *("streamed", "streamed-none", "streamed-none-tls"),
)
"""This store with an embedded server, direct to the files of a server, through a
server. Saves copy the state and return, as by default, or copy nothing on the host
("none", ``snapshot="none"``); the benchmark waits until they are durable. They are on
the last checkpoint, or on none ("new", ``base=None``)."""

OURS: Final = (*LOCAL, "bucket")
"""The above, and this store on a bucket, direct."""

PEERS: Final = ("orbax", "orbax-raw", "jax", "safetensors", "torch", "easydel")
"""Orbax with its defaults, and with zarr3 without compression; jax's serialization;
safetensors; torch's distributed checkpoints; EasyDeL's checkpoints."""

FAR: Final = ("bucket", "orbax-bucket", "orbax-raw-bucket")
"""On a bucket with a long latency: this store, and Orbax with both settings."""

CONTENDERS: Final = (*FLOORS, *OURS, *PEERS, *FAR[1:])

STATES: Final = ("lm", "half", "middle", "tiny", "many", "moe", "uneven")
"""Names of the states that ``states.py`` makes."""

_SOME: Final = ("files", "grpc", *_WAYS, "orbax", "orbax-raw")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A work of the benchmark."""

    says: str
    """One line of description."""
    state: str = "lm"
    """Name of its state."""
    contenders: tuple[str, ...] = (*FLOORS, *_WAYS, *PEERS)
    """Contenders that run by default."""
    rounds: int | None = None
    """Most rounds, for a work that repeats itself within a round; None: no limit."""


WORKS: Final[Mapping[str, Work]] = {
    "lm": Work(says="1.6 GB of a language model and its optimizer: save, restore"),
    "reshard": Work(
        says="lm, saved fsdp-8 and restored tp-4 x dp-2",
        contenders=("files", *_WAYS, "orbax", "orbax-raw", "jax"),
    ),
    "whole": Work(
        says="lm, saved fsdp-8 and restored on one device",
        contenders=("files", *_WAYS, "orbax", "orbax-raw", "jax"),
    ),
    "many": Work(
        says="50,000 small leaves",
        state="many",
        contenders=("files", *_WAYS, "orbax"),  # minutes a round; each peer adds some
    ),
    "moe": Work(
        says="1 GB of expert tensors [E, d, h] in bfloat16",
        state="moe",
        contenders=_SOME,
    ),
    "uneven": Work(
        says="1 GB of leaves that eight devices do not divide, of KiB and of 200 MB",
        state="uneven",
        contenders=_SOME,
    ),
    "lora": Work(
        says="a second save of lm, with 99 % of its leaves as they were",
        contenders=("embedded", "streamed", "orbax"),
    ),
    "params": Work(
        says="of a whole training state only graphstate/**, cast to bfloat16",
        contenders=("embedded", "streamed"),
    ),
    "growth": Work(
        says="memory over 50 saves and restores in one process",
        state="middle",
        contenders=("embedded", "streamed"),
        rounds=1,
    ),
    "fanout": Work(
        says="32 clients that restore at once from one server",
        contenders=("streamed",),
        rounds=1,
    ),
    "gcs": Work(
        says="half a GB on an emulated bucket 30 ms away, 50 MB/s a connection",
        state="half",
        contenders=FAR,
    ),
    "lists": Work(
        says="1,000 checkpoints listed, on that bucket",
        state="tiny",
        contenders=("bucket",),
    ),
    "tiny": Work(says="4 MB: whether the benchmark itself works", state="tiny"),
}
"""Works by name."""
