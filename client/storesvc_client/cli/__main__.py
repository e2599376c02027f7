"""``python -m storesvc_client.cli`` is storectl, and so is the script of that name."""

import gc
import signal
import sys
from types import FrameType
from typing import NoReturn


def run() -> None:
    """Runs storectl, and ends the process."""
    is_interrupted = False

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        nonlocal is_interrupted
        is_interrupted = True
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGINT, interrupt)
    try:
        # inside, so that Ctrl-C during the imports ends in a sentence, too
        from storesvc_client.cli.group import main

        main(prog_name="storectl")
    except (KeyboardInterrupt, ImportError):
        # native modules turn an interrupt of their imports into an ImportError
        if not is_interrupted:
            raise
        sys.stderr.write("storectl: interrupted\n")
        sys.exit(130)
    finally:
        # The interpreter's last look for garbage would go through every module: a
        # tenth of what a short command takes, for memory that is given back anyway.
        gc.freeze()


if __name__ == "__main__":
    run()
