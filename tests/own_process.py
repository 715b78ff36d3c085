"""Forks of the test's process: what happens in one is seen by no other test, and sees none."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable


def fork() -> int:
    """Fork; Python's advice against it where there are threads is heard: the child uses none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def in_a_process_of_its_own(act: Callable[[], None]) -> None:
    """Act in a fork, and fail with what fails there.

    Its memory and its descriptors are changed by `act` alone: no other thread came along.
    """
    said, says = os.pipe()
    if (child := fork()) == 0:
        try:
            act()
        except BaseException:
            os.write(says, traceback.format_exc()[-4000:].encode())
        finally:
            os._exit(0)
    os.close(says)
    with open(said, "rb") as listens:
        error = listens.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    assert not error, error
    assert status == 0
