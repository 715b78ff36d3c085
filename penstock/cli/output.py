"""Standard output and error of a run: a failure to write them must not end the run.

A pipe may lose its reader (`penstock train ... | head`, a dropped ssh), and a log may be on a full
disk. Neither may raise an error in the middle of a step, where every print would have to handle it.
Below `print`, `rich` and warnings, the bytes therefore go through `_Descriptor`, which never
raises.
"""

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

OnLoss = Callable[[OSError], None]


class _Descriptor(io.RawIOBase):
    """Writes to a descriptor; data that cannot be written is dropped, and the next write tries
    again.

    If the reader of a pipe has ended, later data goes to standard error.
    """

    def __init__(self, descriptor: int, on_loss: OnLoss) -> None:
        self._descriptor, self._on_loss = descriptor, on_loss
        self._failed: set[int | None] = set()

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:
                writable = select.poll()
                writable.register(self._descriptor, select.POLLOUT)
                writable.poll()
            except OSError as error:
                if not self._goes_on_elsewhere(error):
                    break
        return size

    def _goes_on_elsewhere(self, error: OSError) -> bool:
        is_new = error.errno not in self._failed
        self._failed.add(error.errno)
        moves = error.errno == errno.EPIPE and self._descriptor != 2
        if moves:
            self._descriptor = 2
        if is_new:
            self._on_loss(error)
        return moves


@contextlib.contextmanager
def surviving_loss(on_loss: OnLoss) -> Iterator[None]:
    """Make `sys.stdout` and `sys.stderr` never fail inside the block.

    `on_loss` is called once for each kind of error of standard output. Streams that do not belong
    to the process (in a test) are unchanged.
    """
    before = sys.stdout, sys.stderr
    try:
        sys.stdout = _guard_stream(sys.stdout, on_loss)
        sys.stderr = _guard_stream(sys.stderr, lambda error: None)
        yield
    finally:
        sys.stdout, sys.stderr = before


def write_error(text: str) -> None:
    """Write to standard error at once, past every view; do nothing if it is closed."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))


def open_closed_streams() -> None:
    """Redirect closed standard streams (`2>&-`) to the null device.

    The next opened file would otherwise take the free descriptor, and a message for standard error
    would be written into the store.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            leave([descriptor])
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def settle() -> None:
    """Flush standard output and error; data that cannot be written is dropped.

    Python would otherwise try again at exit, and change the exit code.
    """
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except OSError:
            leave([descriptor])
            with contextlib.suppress(OSError):
                stream.flush()


def leave(descriptors: Sequence[int]) -> None:
    """Redirect these descriptors to the null device, since a write to them would fail."""
    null_device = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(null_device, descriptor)
        os.set_inheritable(descriptor, True)  # also one that was closed, and so is `null_device`
    if null_device not in descriptors:
        os.close(null_device)


def _guard_stream(stream: TextIO, on_loss: OnLoss) -> TextIO:
    try:
        descriptor = stream.fileno()
        stream.flush()
    except (OSError, ValueError, AttributeError):  # no descriptor, or pending data is lost
        return stream
    errors = stream.errors or "strict"
    return io.TextIOWrapper(
        io.BufferedWriter(_Descriptor(descriptor, on_loss)),
        encoding=stream.encoding,
        # A character that the locale lacks is written as an escape.
        errors="backslashreplace" if errors == "strict" else errors,
        line_buffering=True,
        write_through=True,
    )
