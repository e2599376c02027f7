"""Hides log lines of native libraries from the terminal.

gRPC, TensorStore and its AWS SDK write directly to file descriptor 2, in their own
format, and cannot be configured from Python. While a store is opened, such lines would
precede the one-line error message.
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
"""Beginning of a line of Abseil's log."""

_STDERR: Final = 2


@contextmanager
def native_log_hidden(*, shown: bool) -> Generator[None]:
    """Drops log lines that native libraries write inside the block; forwards the rest.

    Output of Python to ``sys.stderr`` appears at once; other output to file descriptor
    2 that is not a log line appears at the end of the block.

    Args:
        shown: Whether to drop nothing, for ``--verbose``.
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
