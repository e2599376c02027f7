"""Runs storectl, as ``python -m storesvc_client.cli`` and as the installed script."""

import gc
import os
import signal
import sys
from types import FrameType
from typing import Final, NoReturn

COMPLETION: Final = "_STORECTL_COMPLETE"
"""Environment variable of a shell that completes; click derives its name."""


def run() -> None:
    """Runs storectl and exits."""
    is_interrupted = False

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        nonlocal is_interrupted
        is_interrupted = True
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGINT, interrupt)
    try:
        # inside the try, so that Ctrl-C during the imports prints one line, too
        from storesvc_client.cli.group import main

        if instruction := os.environ.get(COMPLETION):
            from storesvc_client.cli.completion_shells import prepare

            prepare(instruction)
        main(prog_name="storectl")
    except (KeyboardInterrupt, ImportError):
        # native modules turn an interrupt of their imports into an ImportError
        if not is_interrupted:
            raise
        sys.stderr.write("storectl: interrupted\n")
        sys.exit(130)
    finally:
        # The last collection of the interpreter would traverse every module: a tenth of
        # the time of a short command, for memory that the exit frees anyway.
        gc.freeze()


if __name__ == "__main__":
    run()
