"""Keeps what a terminal has not shown yet when Ctrl-C is pressed."""

import os
import termios
from typing import TextIO

_LOCAL_MODES = 3  # index in the attributes of a terminal


class KeptOutput:
    """From `begin` to `end`, a signal from the keyboard discards no output of a terminal.

    By default a terminal discards it (`NOFLSH` of termios). A drawing would then be cut, and the
    cursor be in another line than the next drawing assumes. A process in the background leaves the
    terminal as it is: the change would stop the process.
    """

    def __init__(self) -> None:
        self._changed: TextIO | None = None

    def begin(self, file: TextIO) -> None:
        """Let a terminal keep its output, if the file is one; without effect until `end` if it
        does already."""
        if self._changed is None and _set(file, is_kept=True):
            self._changed = file

    def end(self) -> None:
        """Undo the change of `begin`."""
        if self._changed is not None:
            _set(self._changed, is_kept=False)
            self._changed = None


def _set(file: TextIO, is_kept: bool) -> bool:
    """Return whether the terminal has been changed."""
    try:
        descriptor = file.fileno()
        if os.tcgetpgrp(descriptor) != os.getpgrp():
            return False
        attributes = termios.tcgetattr(descriptor)
        if bool(attributes[_LOCAL_MODES] & termios.NOFLSH) == is_kept:
            return False
        attributes[_LOCAL_MODES] ^= termios.NOFLSH
        termios.tcsetattr(descriptor, termios.TCSANOW, attributes)
    except (AttributeError, OSError, ValueError, termios.error):  # no terminal, or it is gone
        return False
    return True
