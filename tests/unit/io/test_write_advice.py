"""What is advised about a refused write depends on who refuses it."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys

import pytest

from penstock.io import write_advice

FREE = "free some space"


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, FREE),
        (errno.EDQUOT, FREE),
        (errno.EROFS, "make the folder writable or choose another folder"),
        (errno.EACCES, "make the folder writable or choose another folder"),
        (errno.EIO, "check the disk"),
        (errno.ENOENT, "choose another folder"),
        (errno.ELOOP, "choose another folder"),
    ],
)
def test_advice_suits_the_error(number, advice):
    assert write_advice(OSError(number, os.strerror(number)), FREE) == advice


def test_error_that_is_none_of_the_system_gets_the_advice_for_a_full_disk():
    assert write_advice(None, FREE) == write_advice(ValueError("no"), FREE) == FREE


WRITE = """
import resource, sys
from penstock.io import write_advice
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
try:
    with open(sys.argv[1], "wb", buffering=0) as file:
        file.write(bytes(8192))
        file.write(bytes(8192))
except OSError as error:
    print(write_advice(error, "free some space"))
"""


def test_limit_of_a_files_size_is_named_with_its_value(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WRITE, tmp_path / "file"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == (
        "raise the limit of 8,192 bytes for a file of this process (ulimit -f)\n"
    )


def test_file_system_with_a_limit_of_its_own_is_named(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert write_advice(OSError(errno.EFBIG, "File too large"), FREE) == (
        "its file system holds no file of this size; choose a folder on another one"
    )
