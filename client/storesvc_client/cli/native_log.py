"""Log lines of native libraries, kept off the terminal.

gRPC, TensorStore and the AWS SDK inside it write to file descriptor 2 by themselves, in
a format of their own, and have no switch for it in Python. While a store is opened such
lines would come before the one sentence that says what is wrong.
"""

import os
import re
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from typing import IO, Final

_LINE: Final = re.compile(
    rb"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w./-]+:\d+\] |WARNING: All log messages "
    rb"before absl::InitializeLog"
)
"""How a line of Abseil's log begins."""

_STDERR: Final = 2


@contextmanager
def native_log_hidden(*, shown: bool) -> Generator[None]:
    """Drops the log lines that native libraries write inside; passes on all else.

    What Python writes to ``sys.stderr`` inside comes out at once; what others write to
    file descriptor 2 and is no log line, at the end.

    Args:
        shown: Drops nothing, as ``--verbose`` asks.
    """
    if shown or not _is_stderr(sys.stderr):
        yield
        return
    ours, python_stderr = os.dup(_STDERR), sys.stderr
    try:
        with (
            open(ours, "w", buffering=1, closefd=False) as direct,
            tempfile.TemporaryFile() as caught,
        ):
            os.dup2(caught.fileno(), _STDERR)
            sys.stderr = direct
            try:
                yield
            finally:
                sys.stderr = python_stderr
                os.dup2(ours, _STDERR)
                caught.seek(0)
                for line in caught:
                    if not _LINE.match(line):
                        os.write(_STDERR, line)
    finally:
        os.close(ours)


def _is_stderr(stream: IO[str]) -> bool:
    try:
        return stream.fileno() == _STDERR
    except (AttributeError, OSError):  # a stream of a test, or none
        return False
