"""Whether a compilation says something: a program from the cache would not repeat it."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_LOGS_ONCE = ("torch._logging._internal", "transformers.utils.logging")
"""Modules whose `warning_once` remembers, in a cache of functools, what it has said."""


@dataclass
class Noticed:
    """Whether anything was said, as a warning of Python or of a library's log."""

    anything: bool = False


@contextmanager
def noticing() -> Iterator[Noticed]:
    """Watch what code within says; warnings and logs go where they always go.

    Messages that are shown once per process are shown again, if they were shown before.
    """
    noticed = Noticed()
    show, make_record = warnings.showwarning, logging.getLogRecordFactory()
    warns_always = torch.is_warn_always_enabled()

    def note_warning(*arguments: Any, **options: Any) -> None:
        noticed.anything = True
        show(*arguments, **options)

    def note_record(*arguments: Any, **options: Any) -> logging.LogRecord:
        record = make_record(*arguments, **options)
        noticed.anything = noticed.anything or record.levelno >= logging.WARNING
        return record

    _forget_messages()
    torch.set_warn_always(True)  # each time to Python, which decides how often it shows a warning
    warnings.showwarning = note_warning
    logging.setLogRecordFactory(note_record)
    try:
        yield noticed
    finally:
        warnings.showwarning = show
        logging.setLogRecordFactory(make_record)
        torch.set_warn_always(warns_always)


def _forget_messages() -> None:
    """Make Python, PyTorch and transformers forget which messages they have shown."""
    with warnings.catch_warnings():  # its end makes every module's registry of warnings invalid
        vars(warnings).get("onceregistry", {}).clear()  # of CPython, for the action "once"
    for name in _LOGS_ONCE:
        warn_once = getattr(sys.modules.get(name), "warning_once", None)
        if warn_once is not None:
            warn_once.cache_clear()
