"""Ctrl-C while modules are imported: `KeyboardInterrupt` is raised after the import.

Inside an import the exception would be lost: code of NumPy and PyTorch, in C or in an `except`
clause, clears it, and the command would run on, or fail with another error.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_RETRY_SECONDS = 0.002  # between two imports there may be little time
# Erases the lines of a live view with the echoed ^C, and shows the cursor that the view has hidden.
_LEAVE_TERMINAL = b"\r\x1b[J\x1b[?25h"
_outermost: FrameType | None = None  # of the block: an import around it does not count


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT raise `KeyboardInterrupt` inside the block, but not inside an import.

    If the block does not handle the exception, the process exits with 130. After the block SIGINT
    ends the process without an exception: it is about to end, and Python would print a traceback.
    An ignored SIGINT, as in a background job, stays ignored.
    """
    global _outermost
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    _outermost = sys._getframe(2)  # of the `with` statement, above contextlib's
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        is_postponed = _stop_retrying()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _outermost = None
        if is_postponed:
            raise SystemExit(128 + signal.SIGINT) from None


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal: raise `KeyboardInterrupt`, or call the handler of SIGINT after the import
    that is under way.

    A second signal during the import ends the process at once, since an import may take seconds.
    """
    if not _is_importing(frame):
        raise KeyboardInterrupt
    if signal.getsignal(signal.SIGALRM) is _retry:
        _exit(128 + number)
    signal.signal(signal.SIGALRM, _retry)
    signal.siginterrupt(signal.SIGALRM, False)  # or calls of C code in the import would fail
    signal.setitimer(signal.ITIMER_REAL, _RETRY_SECONDS, _RETRY_SECONDS)


def _exit(code: int) -> None:
    """End the process now; leave the terminal as it was before a live view."""
    for descriptor in (1, 2):
        if os.isatty(descriptor):
            os.write(descriptor, _LEAVE_TERMINAL)
            break
    os._exit(code)


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
    while frame is not None and frame is not _outermost:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
