"""Runs storectl, as ``python -m storesvc_client.cli`` and as the installed script."""

import gc
import signal
import sys
from types import FrameType
from typing import NoReturn


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
