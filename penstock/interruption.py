"""Ctrl-C while modules are imported: `KeyboardInterrupt` is raised after the import.

Inside an import the exception would be lost: code of NumPy and PyTorch, in C or in an `except`
clause, clears it, and the command would run on, or fail with another error.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_RETRY_SECONDS = 0.002  # between two imports there may be little time


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT raise `KeyboardInterrupt` inside the block, but not inside an import.

    After the block SIGINT ends the process without an exception: the process is about to end, and
    Python would print a traceback. An ignored SIGINT, as in a background job, stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if _stop_retrying():
            raise KeyboardInterrupt


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal: raise `KeyboardInterrupt`, or call the handler of SIGINT after the import
    that is under way.

    A second signal during the import ends the process at once, since an import may take seconds.
    """
    if not _is_importing(frame):
        raise KeyboardInterrupt
    if signal.getsignal(signal.SIGALRM) is _retry:
        os._exit(128 + number)
    signal.signal(signal.SIGALRM, _retry)
    signal.setitimer(signal.ITIMER_REAL, _RETRY_SECONDS, _RETRY_SECONDS)


def _retry(number: int, frame: FrameType | None) -> None:
    if not _is_importing(frame) and _stop_retrying():
        signal.raise_signal(signal.SIGINT)


def _stop_retrying() -> bool:
    """Return whether a signal was postponed, and forget the signal."""
    if signal.getsignal(signal.SIGALRM) is not _retry:
        return False
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)  # one may be under way
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return True


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
