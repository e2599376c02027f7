"""Runs storectl, as ``python -m storesvc_client.cli`` and as the installed script."""

import codecs
import gc
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Final, NoReturn

COMPLETION: Final = "_STORECTL_COMPLETE"
"""Environment variable of a shell that completes; click derives its name."""


_PLAIN: Final = str.maketrans("├└│─…→", "|`|-~>")
"""Signs that stand for signs of our tables if an encoding lacks them."""


def _prepare_streams() -> None:
    """Lets every text be printed: signs that an encoding lacks are replaced. A closed
    stdout is an error once something is printed, a closed stderr is not."""

    def replace(error: UnicodeError) -> tuple[str | bytes, int]:
        assert isinstance(error, UnicodeEncodeError)
        text = error.object[error.start : error.end].translate(_PLAIN)
        return text.encode("ascii", "backslashreplace").decode(), error.end

    codecs.register_error("storectl", replace)
    for name, flags in ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY):
        if getattr(sys, name) is None:
            stream = open(os.open(os.devnull, flags), "w")  # noqa: PTH123, SIM115 - until the exit
            setattr(sys, name, stream)
        getattr(sys, name).reconfigure(errors="storectl")


def run() -> None:
    """Runs storectl and exits."""
    _prepare_streams()
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
            from storesvc_client.cli.completion import prepare

            prepare(instruction)
        main(prog_name="storectl")
    except OSError as e:
        if e.filename is not None:
            raise
        with suppress(OSError):
            sys.stdout.close()  # or the interpreter reports what it still holds
        with suppress(OSError):
            sys.stderr.write(f"storectl: cannot write the output: {e.strerror}\n")
        sys.exit(1)
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
