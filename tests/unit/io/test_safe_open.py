"""Whole files are read only where a plain file of a sensible length is."""

import os

import pytest

from penstock.io.safe_open import NotPlainError, open_own, read_plain

pytestmark = pytest.mark.timeout(20)  # to hang is to fail


def test_file_is_read_whole_also_through_a_link(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        assert read_plain(tmp_path / name, 5) == b"12345"


def test_a_longer_file_is_not_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"123456")
    with pytest.raises(NotPlainError, match="it has 6 bytes, at most 5 are allowed"):
        read_plain(path, 5)


@pytest.mark.parametrize("what", ["a FIFO", "a folder", "a device"])
def test_a_path_that_is_not_a_file_is_named(tmp_path, what):
    path = tmp_path / "place"
    {"a FIFO": os.mkfifo, "a folder": os.mkdir, "a device": lambda p: p.symlink_to("/dev/zero")}[
        what
    ](path)
    with pytest.raises(NotPlainError, match=f"expected a file, got {what}"):
        read_plain(path, 5)
    if what != "a device":
        with pytest.raises(NotPlainError, match=f"got {what}; move it away"):
            open_own(path, os.O_RDWR)


def test_files_to_change_are_not_opened_through_a_link(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(NotPlainError, match="got a link"):
        open_own(tmp_path / "link", os.O_RDWR)
    os.close(open_own(tmp_path / "file", os.O_RDWR))
    with pytest.raises(FileNotFoundError):
        open_own(tmp_path / "other", os.O_RDWR)
