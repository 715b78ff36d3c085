"""Lines at the bottom of a terminal that are redrawn in place, below printed text.

Between two drawings the cursor is at the start of the first redrawn line. So erasing the lines
means erasing everything below the cursor, however the terminal has wrapped the lines after a change
of its width. An echoed `^C` is overwritten by the next drawing.
"""

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TextIO, cast

from rich.console import Console, RenderableType

from penstock.progress.kept_output import KeptOutput

_SECONDS = 0.25  # between two drawings
_WIDTH = 80
_ERASE = "\r\x1b[J"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
# A line must not wrap if the terminal has become narrower since its width was read.
_CUT_LINES, _WRAP_LINES = "\x1b[?7l", "\x1b[?7h"


class RedrawnLines:
    """Draws the lines that `render` returns four times a second; a context manager.

    Within the context, text that this process prints to a terminal goes above the lines.
    """

    def __init__(self, console: Console, render: Callable[[], RenderableType]) -> None:
        self._console = console
        self._render = render
        self._lock = threading.RLock()
        self._height = 0  # lines on the terminal
        self._is_shown = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._around = contextlib.ExitStack()
        self._kept_output = KeptOutput()

    def open(self) -> None:
        """Show the lines, and redraw them until `close`."""
        self._around.enter_context(self._printing_above())
        self._around.enter_context(self._pausing())
        self._ended.clear()
        self._show()
        thread = threading.Thread(target=self._redraw, name="penstock view", daemon=True)
        thread.start()
        self._thread = thread

    def close(self) -> None:
        """Stop redrawing; the last drawing stays on the terminal."""
        self._stop_drawing()
        with self._around:
            self._leave()

    def erase(self) -> None:
        """Stop redrawing, and remove the lines from the terminal."""
        self._stop_drawing()
        with self._around, self._lock:
            self._release(_ERASE)

    def draw(self) -> None:
        """Redraw the lines."""
        self.print("")

    def print(self, text: str) -> None:
        """Write text that ends with a newline above the lines, or directly if none are shown."""
        with self._lock:
            if not self._is_shown:
                self._write(text)
                return
            self._kept_output.begin(
                self._file
            )  # again: the process may have been in the background
            lines = self._lines()[: max(self._console.height - 1, 1)]
            self._height = len(lines)
            self._write(f"{_ERASE}{text}{_CUT_LINES}" + "\r\n".join(lines) + _WRAP_LINES + self._up)

    @property
    def _up(self) -> str:
        return f"\r\x1b[{self._height - 1}A" if self._height > 1 else "\r"

    def _lines(self) -> list[str]:
        """Return the lines with their styles."""
        # A separate file, because the console's file may be closed, or redirected to print above.
        drawing = Console(
            file=io.StringIO(),
            force_terminal=True,
            color_system=self._console.color_system,  # type: ignore[arg-type]
            width=min(self._console.width, _WIDTH),
        )
        drawing.print(self._render())
        return cast(io.StringIO, drawing.file).getvalue().splitlines()

    def _show(self) -> None:
        with self._lock:
            self._is_shown = True
            self._write(_HIDE_CURSOR)
            self.draw()

    def _stop_drawing(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _leave(self) -> None:
        """Draw all lines for the last time, if they are shown, and put the cursor below them."""
        with self._lock:
            last = _ERASE
            try:
                if self._is_shown:
                    last += _CUT_LINES + "\r\n".join(self._lines()) + _WRAP_LINES + "\r\n"
            finally:
                self._release(last)

    def _release(self, last: str) -> None:
        """Write the last text of the lines, and leave the terminal as it was."""
        self._write(last + _SHOW_CURSOR)
        self._is_shown = False
        self._kept_output.end()

    @property
    def _file(self) -> TextIO:
        # Bypass the stand-in of stdout, which would print above the lines.
        return cast(TextIO, getattr(self._console.file, "rich_proxied_file", self._console.file))

    def _write(self, text: str) -> None:
        try:
            self._file.write(text)
            self._file.flush()
        except OSError:
            self._ended.set()  # the terminal is gone; SIGHUP ends the run, and saves it

    def _redraw(self) -> None:
        while not self._ended.wait(_SECONDS):
            self.draw()

    @contextlib.contextmanager
    def _printing_above(self) -> Iterator[None]:
        """Print text for the terminal above the lines."""
        streams = sys.stdout, sys.stderr
        above = [_Above(self, stream) if stream.isatty() else None for stream in streams]
        sys.stdout, sys.stderr = (
            stream if stand_in is None else cast(TextIO, stand_in)
            for stream, stand_in in zip(streams, above, strict=True)
        )
        try:
            yield
        finally:
            sys.stdout, sys.stderr = streams
            for stand_in in above:
                if stand_in is not None:
                    stand_in.end()

    @contextlib.contextmanager
    def _pausing(self) -> Iterator[None]:
        """On Ctrl-Z keep the lines for the shell; draw new lines when the process continues."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may set signal handlers
            return

        def pause(number: int, frame: FrameType | None) -> None:
            was_shown = self._is_shown
            self._leave()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)  # the process stops here
            signal.signal(number, pause)
            if was_shown:
                self._show()

        previous = signal.signal(signal.SIGTSTP, pause)
        try:
            yield
        finally:
            signal.signal(signal.SIGTSTP, previous)


class _Above(io.TextIOBase):
    """A stand-in for stdout or stderr: prints whole lines above the redrawn lines."""

    def __init__(self, lines: RedrawnLines, stream: TextIO) -> None:
        self._lines = lines
        self._held = ""
        self.rich_proxied_file = stream  # a console with this attribute writes to the stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the terminal."""
        return self.rich_proxied_file.encoding

    def isatty(self) -> bool:
        """Return True: the underlying stream is a terminal."""
        return True

    def fileno(self) -> int:
        """Return the terminal's descriptor."""
        return self.rich_proxied_file.fileno()

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Print whole lines; keep an unfinished line."""
        *whole, self._held = (self._held + text).split("\n")
        if whole:
            self._lines.print("".join(f"{line}\n" for line in whole))
        return len(text)

    def end(self) -> None:
        """Write an unfinished line."""
        self.rich_proxied_file.write(self._held)
        self._held = ""
