"""Whether a compilation says something: a program from the cache would not repeat it."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Noticed:
    """Whether anything was said, as a warning of Python or of a library's log."""

    anything: bool = False


@contextmanager
def noticing() -> Iterator[Noticed]:
    """Watch what code within says; warnings and logs go where they always go."""
    noticed = Noticed()
    show, make_record = warnings.showwarning, logging.getLogRecordFactory()

    def note_warning(*arguments: Any, **options: Any) -> None:
        noticed.anything = True
        show(*arguments, **options)

    def note_record(*arguments: Any, **options: Any) -> logging.LogRecord:
        record = make_record(*arguments, **options)
        noticed.anything = noticed.anything or record.levelno >= logging.WARNING
        return record

    warnings.showwarning = note_warning
    logging.setLogRecordFactory(note_record)
    try:
        yield noticed
    finally:
        warnings.showwarning = show
        logging.setLogRecordFactory(make_record)
