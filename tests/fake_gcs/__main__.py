"""``python -m tests.fake_gcs``: an emulator for other processes.

Prints its URL as the first line, once it listens.
"""

import argparse
import asyncio
import math
from contextlib import suppress

from tests.fake_gcs.emulator import FakeGcs
from tests.fake_gcs.server import listening, url_of
from tests.fake_gcs.tokens import Tokens


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fake_gcs",
        description="Serves a Google Cloud Storage in memory.",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--bucket", action="append", default=[], dest="buckets")
    parser.add_argument("--token", help="the bearer token that requests have to show")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds a request")
    parser.add_argument(
        "--mbps", type=float, default=math.inf, help="megabits a second, each direction"
    )
    parser.add_argument(
        "--stream-mbps", type=float, default=math.inf, help="of each connection"
    )
    parser.add_argument(
        "--seconds-between-writes",
        type=float,
        default=0.0,
        help="of one object's name; more are refused with 429",
    )
    return parser


def main() -> None:
    """Serves until it is interrupted."""
    options = _parser().parse_args()
    gcs = FakeGcs(
        buckets=options.buckets,
        tokens=Tokens(options.token) if options.token else None,
        latency_seconds=options.latency,
        bytes_per_second=options.mbps * 1e6 / 8,
        stream_bytes_per_second=options.stream_mbps * 1e6 / 8,
        seconds_between_writes=options.seconds_between_writes,
    )
    with listening(options.host, options.port) as listener:
        print(url_of(listener), flush=True)
        with suppress(KeyboardInterrupt):
            asyncio.run(gcs.serve(listener))


if __name__ == "__main__":
    main()
