"""Ctrl-C while the command imports its modules: the command ends with 130, without a traceback."""

import subprocess
import sys

import pytest

# The command, with signals to itself when a module is imported.
INTERRUPTED = """
import os, signal, sys

name, signals, handler = sys.argv[1], int(sys.argv[2]), sys.argv[3]
del sys.argv[1:4]
# A shell ignores the signal for what runs in its background, such as this suite.
as_wanted = {"ignored": signal.SIG_IGN, "default": signal.default_int_handler}
signal.signal(signal.SIGINT, as_wanted[handler])

class Interrupting:
    def find_spec(self, wanted, path=None, target=None):
        if wanted == name:
            sys.meta_path.remove(self)
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGINT)
            print("the import goes on", file=sys.stderr)

sys.meta_path.insert(0, Interrupting())
from penstock.__main__ import main
main()
"""


@pytest.fixture
def command(tmp_path):
    (tmp_path / "a.txt").write_text("some words")

    def run(module, *arguments, signals=1, handler="default"):
        return subprocess.run(
            [sys.executable, "-c", INTERRUPTED, module, str(signals), handler, *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=120,
            check=False,
        )

    return run


BUILD = ("data", "build", "--input", "a.txt", "--tokenizer", "bytes", "--out", "set")


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("typer", ["--help"]),
        ("penstock.cli.data", ["--help"]),
        ("numpy._core.fromnumeric", BUILD),
        ("numpy.dtypes", BUILD),
        ("numpy.lib", BUILD),
        ("torch._C", ["program", "tiny"]),
    ],
)
def test_signal_during_an_import_ends_the_command_after_the_import(command, module, arguments):
    done = command(module, *arguments)
    assert done.returncode == 130
    # The command may have begun before the exception is raised.
    assert done.stderr in ("the import goes on\n", "the import goes on\ntokenising 10 B\n")


def test_second_signal_during_an_import_ends_the_command_at_once(command):
    done = command("typer", "--help", signals=2)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ignored_signal_stays_ignored_during_an_import(command):
    done = command("typer", "--version", handler="ignored")
    assert (done.returncode, done.stderr) == (0, "the import goes on\n")
    assert done.stdout.startswith("penstock ")


def test_signal_after_the_last_import_but_within_it_is_not_lost(tmp_path):
    """The command ends while its signal waits for the end of an import."""
    (tmp_path / "slow.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    code = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from penstock import interruption
interruption._RETRY_SECONDS = 60
with interruption.interruptible():
    import slow
print("the block has ended as if nothing had happened")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_second_signal_of_a_run_is_raised_after_an_import(tmp_path):
    signals = "import os, signal\nfor _ in range(2): os.kill(os.getpid(), signal.SIGTERM)\n"
    (tmp_path / "slow.py").write_text(signals + "finished = True\n")
    code = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from penstock.cli.train import GracefulStop
from penstock.interruption import interruptible
stop, reasons = GracefulStop(lambda text: None), []
with interruptible(), stop.handling(reasons.append):
    try:
        import slow
        while True:
            pass
    except KeyboardInterrupt:
        print(slow.finished, reasons)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True ['SIGTERM']\n", "")


def test_interrupted_demo_ends_without_a_traceback(command, tmp_path):
    demo = INTERRUPTED.replace(
        "from penstock.__main__ import main\nmain()",
        ("import runpy\nrunpy.run_module('penstock.demo', run_name='__main__', alter_sys=True)"),
    )
    done = subprocess.run(
        [sys.executable, "-c", demo, "rich.console", "1", "default"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (130, "the import goes on\n")
