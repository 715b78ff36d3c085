"""Ctrl-C while the command imports its modules: the command ends with 130, without a traceback."""

import subprocess
import sys

import pytest

# The command, with signals to itself when a module is imported.
INTERRUPTED = """
import os, signal, sys

name, signals, handler = sys.argv[1], int(sys.argv[2]), sys.argv[3]
del sys.argv[1:4]
if handler == "ignored":
    signal.signal(signal.SIGINT, signal.SIG_IGN)

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
def test_signal_during_an_import_ends_the_command_after_the_import(
    command, tmp_path, module, arguments
):
    done = command(module, *arguments)
    assert (done.returncode, done.stderr) == (130, "the import goes on\n")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_second_signal_during_an_import_ends_the_command_at_once(command):
    done = command("typer", "--help", signals=2)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ignored_signal_stays_ignored_during_an_import(command):
    done = command("typer", "--version", handler="ignored")
    assert (done.returncode, done.stderr) == (0, "the import goes on\n")
    assert done.stdout.startswith("penstock ")
