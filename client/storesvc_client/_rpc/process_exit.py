"""Ends at the exit of the interpreter what a process began: saves in the background and
embedded servers.

Python ends a process in this order: the main thread has ended; the other threads that
are no daemons are joined; exit handlers run, in which Python starts no thread (since
3.12) and TensorStore answers no call. So all ends before the exit handlers:

1. `_await_main`, before the join: waits for the saves that are running. If other
   threads continue, which may save more, step 2 runs in a thread that waits for them.
2. `_end`: rejects further saves, waits for those that are running, and closes the
   embedded servers.
3. `_report`: each save that failed, and whose result was not asked for, is reported and
   makes the exit code 1.

Python 3.12.0 and 3.12.1 start no thread once the main thread has ended, so that a save
in the background could not end: there, `_start_thread` asks the system for one.

A forked child has none of the threads, and begins with nothing to end.
"""

import atexit
import ctypes
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, Final

from storesvc_client.errors import InvalidRequestError

_NOTICE_SECONDS: Final = 3.0
"""Time after which the exit says what it waits for."""

_running: dict[Future[Any], str] = {}
"""Saves that are running, or failed without a caller that asked; with their names."""
_closings: dict[Callable[[], None], None] = {}
_inherited: list[object] = []
"""Objects that a forked child neither uses nor frees, as it lacks their threads."""
_is_over = False


def await_at_exit(future: "Future[Any]", name: str) -> None:
    """Lets the exit wait for work, such as "the save of prod/llama@100", and report its
    error until ``forget``."""
    _running[future] = name
    future.add_done_callback(_note_end)


def forget(future: "Future[Any]") -> None:
    """Leaves the result of work to its caller."""
    _running.pop(future, None)


def _note_end(future: "Future[Any]") -> None:
    if future.exception() is None:
        forget(future)


def close_at_exit(close: Callable[[], None]) -> None:
    """Lets the exit call a function once all saves have ended."""
    _closings[close] = None


def note_close(close: Callable[[], None]) -> None:
    """Notes that a function of ``close_at_exit`` was called before the exit."""
    _closings.pop(close, None)


def check_not_over(place: str) -> None:
    """Rejects a save once no thread can run it to its end."""
    if _is_over:
        if not threading.current_thread().daemon:
            _fail()
        raise InvalidRequestError(
            f"{place}: expected a save before the interpreter runs its exit handlers, "
            "when it can start no thread for it; save at the end of the script, such "
            "as in the finally: of a try"
        )


def check_process(place: str, process: int) -> None:
    """Rejects a use of a client in a process that did not connect it."""
    if process != os.getpid():
        raise InvalidRequestError(
            f"{place}: expected a client of this process, got one of process {process},"
            " whose threads this fork of it lacks; start the process by "
            "multiprocessing.get_context('spawn'), and connect in it"
        )


def _await_main() -> None:
    if (3, 12, 0) <= sys.version_info[:3] < (3, 12, 2):
        vars(threading)["_start_new_thread"] = _start_thread
    _await_running()
    own = threading.current_thread()
    others = [t for t in threading.enumerate() if t is not own and not t.daemon]
    if others:
        threading.Thread(target=_end, args=others).start()
        return
    _end()
    process = sys.modules.get("multiprocessing.process")
    if hasattr(sys, _FAILED) and process and process.parent_process():
        raise SystemExit(1)  # a forked worker ends without freeing its modules


def _end(*threads: threading.Thread) -> None:
    global _is_over  # noqa: PLW0603 - a process ends once
    for thread in threads:
        thread.join()
    _is_over = True
    _await_running()
    for close in list(_closings):
        try:
            close()
        except Exception as e:  # noqa: BLE001 - no caller is left to catch it
            _fail(f"{e}")
        except KeyboardInterrupt:
            _fail("the exit was interrupted while it closed a store")
    _report()


def _report() -> None:
    for future, name in list(_running.items()):
        forget(future)
        if not future.done():
            _fail(f"{name} was abandoned; a save of the same step resumes it")
        elif (error := future.exception()) is not None:
            _fail(f"{name} failed: {error}")


def _await_running() -> None:
    """Waits for the saves that are running; Ctrl-C abandons them."""
    running = {future: name for future, name in _running.items() if not future.done()}
    try:
        if late := wait(running, _NOTICE_SECONDS).not_done:
            names = [running[future] for future in running if future in late]
            more = f" and {len(names) - 1} more" if names[1:] else ""
            _say(f"the exit waits for {names[0]}{more}; Ctrl-C abandons it")
            wait(late)
    except KeyboardInterrupt:
        _report()


_SystemThread: Final = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_kept: list[object] = []
"""Functions that threads of the system run, which do not refer to them."""


def _start_thread(function: Callable[..., object], args: tuple[object, ...]) -> None:
    """Runs a function in a thread of the system, as ``_thread.start_new_thread`` does
    in other releases of Python: https://github.com/python/cpython/issues/113964."""

    def run(_: object) -> None:
        function(*args)

    _kept.append(_SystemThread(run))
    made = ctypes.c_void_p()
    error = ctypes.CDLL(None).pthread_create(ctypes.byref(made), None, _kept[-1], None)
    if error:
        raise RuntimeError(f"can't start a thread: {os.strerror(error)}")


def _say(text: str) -> None:
    with suppress(Exception):  # stderr may be closed, or None
        print(f"storesvc_client: {text}", file=sys.stderr, flush=True)


_FAILED: Final = "_storesvc_failed"


class _Failed:
    """Ends the process with exit code 1 when the interpreter frees it, which is after
    all exit handlers. Nothing else can change the exit code of a script that ended."""

    def __del__(self, end: Callable[[int], None] = os._exit) -> None:
        end(1)


def _fail(text: str = "") -> None:
    """Reports what was not finished, and makes the exit code 1."""
    if text:
        _say(text)
    if not hasattr(sys, _FAILED):
        setattr(sys, _FAILED, _Failed())  # of the modules, `sys` is freed almost last


def _begin_child() -> None:
    """Ends nothing of the parent in a forked child."""
    global _running, _closings, _is_over
    _inherited.append((_running, _closings))
    _running, _closings, _is_over = {}, {}, False


os.register_at_fork(after_in_child=_begin_child)
with suppress(RuntimeError):  # imported while the interpreter ends
    atexit.register(_report)  # what Ctrl-C during the join has left
    threading._register_atexit(_await_main)  # type: ignore[attr-defined]  # noqa: SLF001 - there is no public hook before the join
