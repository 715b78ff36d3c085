"""The `penstock` command in this process: what it prints and how it ends, without a new start.

Starting a process takes seconds of imports. Tests of the process itself (signals, terminals, limits
of the system, what is imported) start one.
"""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from penstock.cli import main


@dataclass(frozen=True)
class Done:
    """How a command ended, with the names of `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


def penstock(*arguments: object, cwd: Path | None = None) -> Done:
    """Type `penstock` and the arguments in a folder; what it prints goes to no terminal."""
    stdout, stderr = io.StringIO(), io.StringIO()
    code: object = 0
    with (
        mock.patch.object(sys, "argv", ["penstock", *map(str, arguments)]),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        contextlib.chdir(cwd or Path.cwd()),
    ):
        try:
            main()
        except SystemExit as ended:
            code = 0 if ended.code is None else ended.code
    assert isinstance(code, int), f"it ended with {code!r}"
    return Done(code, stdout.getvalue(), stderr.getvalue())
