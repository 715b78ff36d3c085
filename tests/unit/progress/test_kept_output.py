"""A terminal keeps its output at Ctrl-C while lines are redrawn, and only then."""

import io
import os
import pty
import sys
import termios

import pytest

from penstock.progress.kept_output import KeptOutput


def keeps_output(descriptor):
    return bool(termios.tcgetattr(descriptor)[3] & termios.NOFLSH)


def in_a_terminal(child):
    """Call a function in a process with a terminal of its own; return what it has written."""
    process, terminal = pty.fork()
    if process == 0:
        try:
            child()
        finally:
            sys.stdout.flush()
            os._exit(0)
    written = b""
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # the process has ended
            break
        if not piece:
            break
        written += piece
    os.waitpid(process, 0)
    os.close(terminal)
    return written.decode().split()


def test_output_is_kept_between_begin_and_end():
    def child():
        kept = KeptOutput()
        os.write(1, b"%d " % keeps_output(1))
        kept.begin(sys.__stdout__)
        kept.begin(sys.__stdout__)
        os.write(1, b"%d " % keeps_output(1))
        kept.end()
        os.write(1, b"%d " % keeps_output(1))

    assert in_a_terminal(child) == ["0", "1", "0"]


def test_flag_that_was_set_before_stays():
    def child():
        attributes = termios.tcgetattr(1)
        attributes[3] |= termios.NOFLSH
        termios.tcsetattr(1, termios.TCSANOW, attributes)
        kept = KeptOutput()
        kept.begin(sys.__stdout__)
        os.write(1, b"%d " % keeps_output(1))
        kept.end()
        os.write(1, b"%d " % keeps_output(1))

    assert in_a_terminal(child) == ["1", "1"]


def test_process_in_the_background_leaves_the_terminal_as_it_is():
    def child():
        if os.fork() == 0:
            os.setpgid(0, 0)  # not the group in the foreground
            kept = KeptOutput()
            kept.begin(sys.__stdout__)
            os.write(1, b"%d " % keeps_output(1))
            os._exit(0)
        _, status = os.wait()
        os.write(1, b"%d " % status)

    assert in_a_terminal(child) == ["0", "0"]


@pytest.mark.parametrize("closed", [False, True])
def test_files_are_left_alone(tmp_path, closed):
    with (tmp_path / "log").open("w") as file:
        if closed:
            file.close()
        for stream in (file, io.StringIO()):
            kept = KeptOutput()
            kept.begin(stream)
            assert kept._changed is None
            kept.end()
