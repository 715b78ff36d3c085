"""Whether a compilation says something: a program from the cache would not repeat it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Noticed(logging.Handler):
    """Whether anything was said, as a warning of Python or of a library's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.anything = False

    def emit(self, record: logging.LogRecord) -> None:
        """Note a record of a log, which goes its own way as well."""
        self.anything = True


@contextmanager
def noticing() -> Iterator[Noticed]:
    """Watch what code within says; warnings and logs go where they always go."""
    noticed = Noticed()
    loggers = [logging.getLogger(name) for name in ("", "transformers", "torch")]
    show = warnings.showwarning

    def note(*arguments: Any, **options: Any) -> None:
        noticed.anything = True
        show(*arguments, **options)

    for logger in loggers:
        logger.addHandler(noticed)
    warnings.showwarning = note
    try:
        yield noticed
    finally:
        warnings.showwarning = show
        for logger in loggers:
            logger.removeHandler(noticed)
