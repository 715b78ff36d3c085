"""Python commands without the start of Python: a fork of a process that has imported everything.

Importing PyTorch, transformers and Numba, and the first compilation in a process, take several
seconds of processor time. `run` and `Popen` are those of `subprocess` for a command that begins
with `sys.executable`: the command runs in a fork of one process of this test session, the warm
process, which has imported and compiled before. The fork is a child process of the test. Tests of
the start itself, of imports, of memory or of the environment use `subprocess`.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import io
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_SET_CHILD_SUBREAPER = 36  # prctl(2)
_FIRST_FREE = 200  # descriptors below are for what a command was given
_LIBC = ctypes.CDLL(None, use_errno=True)


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen` of a Python command: `-c CODE`, `-m MODULE` or a script.

    Args:
        is_terminal: whether the standard input becomes the controlling terminal.
        closed: the standard streams (0, 1, 2) that are closed when the command starts.
        limits: limits of the process by their numbers in `resource`, soft and hard alike.
    """

    def __init__(
        self,
        args: list[Any],
        *,
        is_terminal: bool = False,
        closed: Sequence[int] = (),
        limits: Mapping[int, int] | None = None,
        **options: Any,
    ) -> None:
        assert args[0] == sys.executable, args
        assert str(args[1]) in ("-c", "-m") or not str(args[1]).startswith("-"), args
        self._is_terminal = is_terminal
        self._closed, self._limits = list(closed), list((limits or {}).items())
        super().__init__(args, **options)

    def _execute_child(self, args, *others):  # type: ignore[no-untyped-def]
        names = (
            "executable preexec_fn close_fds pass_fds cwd env startupinfo creationflags shell "
            "p2cread p2cwrite c2pread c2pwrite errread errwrite restore_signals gid gids uid umask "
            "start_new_session process_group"
        )
        given = dict(zip(names.split(), others, strict=True))
        assert given["preexec_fn"] is None, "a function cannot be sent to the warm process"
        ends = [(given["p2cread"], 0), (given["c2pwrite"], 1), (given["errwrite"], 2)]
        streams = {target: target if end == -1 else end for end, target in ends}
        streams.update({number: number for number in given["pass_fds"]})
        order = {
            "args": [os.fspath(arg) for arg in args[1:]],
            "cwd": os.fspath(given["cwd"] or os.getcwd()),
            "env": dict(os.environ if given["env"] is None else given["env"]),
            "targets": list(streams),
            "new_session": given["start_new_session"],
            "is_terminal": self._is_terminal,
            "closed": self._closed,
            "limits": self._limits,
        }
        self.pid = _warm_process().start(order, list(streams.values()))
        self._child_created = True
        devnull = getattr(self, "_devnull", None)
        for end, other in (
            (given["p2cread"], given["p2cwrite"]),
            (given["c2pwrite"], given["c2pread"]),
            (given["errwrite"], given["errread"]),
        ):
            if end != -1 and other != -1 and end != devnull:
                os.close(end)
        if devnull is not None:
            os.close(devnull)
        self._closed_child_pipe_fds = True


def run(
    args: list[Any],
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess:  # type: ignore[type-arg]
    """`subprocess.run` of a Python command."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options["stdout"] = options["stderr"] = subprocess.PIPE
    with Popen(args, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


class _Warm:
    """The warm process, as the test's process sees it."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._one_at_a_time = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, Path(__file__).resolve(), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def end(self) -> None:
        """Let go of the process, which then ends, and wait for that."""
        self._control.close()
        self._process.wait()

    def start(self, order: dict[str, Any], files: list[int]) -> int:
        """Let a fork run what is ordered, with these descriptors; return its process ID."""
        with self._one_at_a_time:
            _LIBC.prctl(
                _SET_CHILD_SUBREAPER, 1, 0, 0, 0
            )  # the fork becomes a child of this process
            try:
                body = json.dumps(order).encode()
                socket.send_fds(self._control, [len(body).to_bytes(8, "little")], files)
                self._control.sendall(body)
                said = self._control.recv(8)
            finally:
                _LIBC.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        assert said, "the warm process has ended"
        return int.from_bytes(said, "little")


_ONLY: list[_Warm] = []


def _warm_process() -> _Warm:
    if not _ONLY:
        _ONLY.append(_Warm())
    return _ONLY[0]


def end() -> None:
    """End the warm process, if there is one."""
    while _ONLY:
        _ONLY.pop().end()


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for every order; return the order in the fork, and None when nobody orders any more."""
    while True:
        head, files, _, _ = socket.recv_fds(control, 8, 64)
        if not head:
            return None
        body = b""
        size = int.from_bytes(head, "little")
        while len(body) < size:
            body += control.recv(size - len(body))
        order = json.loads(body)
        reads, writes = os.pipe()
        if (between := os.fork()) == 0:
            # The second fork loses its parent at once and is given to the test's process.
            pid = os.fork()
            if pid == 0:
                _become(order, files)
                return order
            os.write(writes, pid.to_bytes(8, "little"))
            os._exit(0)
        os.waitpid(between, 0)
        pid_of_child = os.read(reads, 8)
        for file in (reads, writes, *files):
            os.close(file)
        control.sendall(pid_of_child)


def _become(order: dict[str, Any], files: list[int]) -> None:
    """Have the descriptors, folder, environment and streams of a new process."""
    if order["new_session"]:
        os.setsid()
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, _FIRST_FREE) for file in files]
    os.closerange(3, _FIRST_FREE)
    for file, target in zip(high, order["targets"], strict=True):
        os.dup2(file, target, inheritable=True)
    os.closerange(_FIRST_FREE, max(high) + 1)
    if order["is_terminal"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python does when it starts
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    for limit, value in order["limits"]:
        resource.setrlimit(limit, (value, value))
    for number in order["closed"]:
        os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = None if number in order["closed"] else _stream(number)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _stream(number: int) -> io.TextIOWrapper:
    """Return a standard stream as Python makes it when it starts."""
    if number == 0:
        return io.TextIOWrapper(open(0, "rb", closefd=False), encoding="utf-8")
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    return io.TextIOWrapper(
        open(number, "wb", -1 if number == 1 else 0, closefd=False),
        encoding="utf-8",
        errors="strict" if number == 1 else "backslashreplace",
        line_buffering=number == 2 or os.isatty(number),
        write_through=unbuffered,
    )


def _command(order: dict[str, Any]) -> Callable[[], object]:
    """Return what runs an order, in a process that is its own."""
    how, *rest = order["args"]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    known = [path for path in sys.path[1:] if path not in paths]
    if how == "-c":
        code, *arguments = rest
        sys.argv, sys.path[:] = ["-c", *arguments], ["", *paths, *known]
        main = sys.modules["__main__"]
        for name in [name for name in vars(main) if not name.startswith("__")]:
            delattr(main, name)
        return lambda: exec(compile(code, "<string>", "exec"), vars(main))
    if how == "-m":
        module, *arguments = rest
        sys.argv, sys.path[:] = [module, *arguments], [os.getcwd(), *paths, *known]
        return lambda: runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.argv, sys.path[:] = [how, *rest], [str(Path(how).resolve().parent), *paths, *known]
    return lambda: runpy.run_path(how, run_name="__main__")


def _get_warm() -> None:
    """Import what commands import, and compile once; no thread may be there afterwards."""
    import numpy  # noqa: F401
    import scipy.linalg  # noqa: F401

    before = len(os.listdir("/proc/self/task"))  # OpenBLAS makes its threads anew after a fork
    import tqdm
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401
    import yaml  # noqa: F401

    import penstock.cli.train
    import penstock.demo
    import penstock.distributed.worker.main
    import penstock.training.trainer  # noqa: F401
    from penstock.config import PresetModel
    from penstock.planning import builders, model_sources

    tqdm.tqdm.monitor_interval = 0  # else a bar starts a thread
    source = model_sources.model_source(PresetModel(preset="tiny"))
    cache = os.environ.get("XDG_CACHE_HOME", "")
    os.environ["XDG_CACHE_HOME"] = os.devnull  # a program from the cache would import less
    builders.compile_source(source, micro_batch=1, length=8, precision="fp32")
    os.environ["XDG_CACHE_HOME"] = cache
    threads = len(os.listdir("/proc/self/task")) - before
    assert threads == 0, f"{threads} threads were started: a fork would lack them"
    gc.collect()
    gc.freeze()


def _main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    _get_warm()
    order = _serve(control)
    if order is None:
        sys.exit()
    control.detach()
    _command(order)()
    return None


if __name__ == "__main__":
    _main()
