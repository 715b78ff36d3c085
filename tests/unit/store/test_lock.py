"""The lock of a folder: one writer, whatever processes the writer has forked."""

import os
import signal

import pytest

from penstock.errors import StorageError
from penstock.store.lock import FolderLock


@pytest.fixture
def forked():
    """Makes children of this process that wait until they are killed."""
    children = []

    def fork(first=lambda: None):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            first()
            os.write(writer, b"!")
            signal.pause()
            os._exit(1)
        children.append(child)
        os.read(reader, 1)
        os.close(reader)
        os.close(writer)
        return child

    yield fork
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_lock_ends_when_it_is_released_although_a_forked_child_lives(tmp_path, forked):
    lock = FolderLock(tmp_path, "run.dir")
    forked()
    lock.release()
    again = FolderLock(tmp_path, "run.dir")
    again.release()
    again.release()


def test_forked_child_does_not_release_the_lock_of_its_parent(tmp_path, forked):
    lock = FolderLock(tmp_path, "run.dir")
    forked(lock.release)
    with pytest.raises(StorageError) as caught:
        FolderLock(tmp_path, "run.dir")
    assert str(caught.value) == (
        f"{tmp_path} is in use by process {os.getpid()}; wait until it ends, or stop it"
    )
    lock.release()


def test_holder_that_has_ended_is_said_to_have_ended(tmp_path, forked):
    lock = FolderLock(tmp_path, "run.dir")
    ended = os.fork()
    if ended == 0:
        os._exit(0)
    os.waitpid(ended, 0)
    (tmp_path / "LOCK").write_text(f"process {ended}\n")
    with pytest.raises(StorageError) as caught:
        FolderLock(tmp_path, "run.dir")
    assert str(caught.value) == (
        f"{tmp_path} is in use: process {ended} took the lock and has ended, or is on another "
        "host; a process that it forked may have it, so stop that one"
    )
    lock.release()
