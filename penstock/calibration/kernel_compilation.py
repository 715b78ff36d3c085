"""Compiles the kernels of the measurements before the first of them, on all cores.

    python -m penstock.calibration.kernel_compilation

is a worker: it reads numbers of cases from its standard input, one byte each, prepares and runs
each case once, and writes a line for each. All workers read one pipe, so that each takes the next
case when it is free. The machine code goes to the cache of kernels, from which the process that
measures reads it. That process compiles what is missing there.
"""

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from penstock.calibration.host_key import HostKey, kept_file
from penstock.calibration.processor_cases import processor_cases
from penstock.calibration.repetitions import Case, OnProgress, Quantity
from penstock.calibration.sparse_cases import small_choices
from penstock.engine import set_threads
from penstock.kernels.code_cache import code_folder
from penstock.telemetry import process_memory

_WORKER_BYTES = 600 << 20  # assumed resident memory of a worker: PyTorch, Numba and their code
_MOST_WORKERS = 8  # assumed: a few long cases decide the time, whatever the number of workers
_LONGEST_CASE_SECONDS = 600.0  # without an answer of any worker; then the rest is left


def compile_kernels(on_progress: OnProgress) -> bool:
    """Compile the kernels of all measurements, unless this was done before or cannot be kept.

    **Returns:** whether it compiled any, which takes longer than measurements do.

    A worker that fails, or hangs, leaves the rest to the others and to the process that measures.
    """
    mark, workers = _mark(), _most_workers()
    if mark is None or mark.exists() or workers < 2:
        return False
    count, done = len(cases_by_quantity()), 0
    for done in completed(bytes(reversed(range(count))), min(workers, count)):
        on_progress("compiling kernels", done / count)
    if done == count:
        with contextlib.suppress(OSError):  # the next measurement looks again
            mark.touch()
    return True


def _most_workers() -> int:
    """Return how many workers have a core and memory to themselves."""
    room = process_memory.available_bytes() // _WORKER_BYTES
    return min(len(os.sched_getaffinity(0)), room, _MOST_WORKERS)


def cases_by_quantity() -> dict[Quantity, Case]:
    """Return one case of each kind of work: cases that differ in size alone share kernels."""
    cases: dict[Quantity, Case] = {}
    for case in processor_cases(small_choices()):
        cases.setdefault(case.quantity, case)
    return cases


def _mark() -> Path | None:
    """Return the file that says that all kernels were compiled on a host with this one's key."""
    folder = code_folder()
    return None if folder is None else folder / f"{kept_file(HostKey.here()).stem}.compiled"


def completed(numbers: bytes, workers: int) -> Iterator[int]:
    """Start workers for cases of these numbers, and yield how many cases are done, from 0.

    The last cases, those of sparse products, take the longest: they come first.
    """
    command = [sys.executable, "-m", "penstock.calibration.kernel_compilation"]
    with contextlib.ExitStack() as stack:
        waiting, queue = os.pipe()
        os.write(queue, numbers)
        os.close(queue)
        results, result = os.pipe()
        lines = stack.enter_context(open(results, "rb"))
        try:
            with contextlib.suppress(OSError):  # no more processes: go on with those that there are
                for _ in range(workers):
                    worker = subprocess.Popen(
                        command, stdin=waiting, stdout=result, stderr=subprocess.DEVNULL
                    )
                    stack.callback(worker.wait)
                    stack.callback(worker.kill)
        finally:
            os.close(waiting)
            os.close(result)
        done = 0
        yield done
        while select.select([lines], [], [], _LONGEST_CASE_SECONDS)[0]:
            if not (answers := os.read(results, 1 << 12).count(b"\n")):
                break
            done += answers
            yield done


def main() -> None:
    """Run cases until the pipe of their numbers is empty."""
    set_threads(None)
    cases = list(cases_by_quantity().values())
    with torch.no_grad():
        while number := os.read(0, 1):
            cases[number[0]].prepare().run()
            os.write(1, b"done\n")


if __name__ == "__main__":
    main()
