"""``python -m tests.bench NAME [OPTION ...]``: runs one benchmark.

The names of works, such as ``lm``, are those of ``tests.bench.speed``.
"""

import sys
from importlib import import_module
from typing import Final

from tests.bench.speed import __main__ as speed

OTHERS: Final = ("catalogue", "flips", "inspections", "memory", "trees")


def main() -> None:
    """Runs it."""
    match sys.argv[1:]:
        case [name, *_] if name in speed.WORKS:
            speed.main()
        case [name, *options] if name in OTHERS:
            sys.argv = [f"python -m tests.bench {name}", *options]
            import_module(f"tests.bench.{name}").main()
        case _:
            names = ", ".join([*speed.WORKS, *OTHERS])
            sys.exit(f"usage: python -m tests.bench NAME [OPTION ...], of {names}")


if __name__ == "__main__":
    main()
