"""Steps of two processes that compute at once, each with as many threads as there are cores.

Engines that are processes of one host do so. The system divides the cores between their threads,
which wait for each other within an operator; so both steps together take longer than one after the
other.
"""

import contextlib
import select
import subprocess
import sys
from collections.abc import Iterator

from penstock.calibration.reference_step import reference_program, reference_step
from penstock.calibration.repetitions import Case, Prepared, Quantity
from penstock.compiler import Products
from penstock.errors import ClusterError

SHARED = "reference steps at once"
"""The work of the case: steps of the reference model, by two processes."""

_PROCESSES = 2
_START_SECONDS = 120.0  # it imports PyTorch and compiles, also kernels at first use
_STEP_SECONDS = 30.0


class CompetingProcess:
    """The other process; see `competing_process.py`."""

    def __init__(self, products: Products) -> None:
        self._products = products
        command = [sys.executable, "-m", "penstock.calibration.competing_process", products]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            self._await("ready", _START_SECONDS)
        except BaseException:
            self.close()
            raise

    def case(self) -> Case:
        """Return the case: a step of each process, in steps per second of both."""

        def prepare() -> Prepared:
            step = reference_step(reference_program("float32", self._products))

            def both() -> None:
                self._begin()
                step()
                self._await("done", _STEP_SECONDS)

            return Prepared(both, _PROCESSES)

        return Case(Quantity("processes", SHARED), prepare)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was not sent cannot be sent any more
                pipe.close()
        self._process.wait()

    def _begin(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ClusterError(f"the other process has ended: {error.strerror}") from error

    def _await(self, line: str, seconds: float) -> None:
        """Read a line.

        Raises:
            ClusterError: the process has written another line, has ended, or is too slow.
        """
        pipe = self._process.stdout
        assert pipe is not None
        if not select.select([pipe], [], [], seconds)[0]:
            raise ClusterError(f"the other process has not written {line!r} in {seconds:g} s")
        found = pipe.readline().strip()
        if found != line:
            code = self._process.wait() if not found else None
            ended = f"it ended with exit code {code}" if not found else f"it wrote {found!r}"
            raise ClusterError(f"expected {line!r} of the other process; {ended}")


@contextlib.contextmanager
def competing_process(products: Products) -> Iterator[CompetingProcess]:
    """Yield another process, which ends with the context.

    Raises:
        ClusterError: the process cannot be started, or does not compute.
    """
    try:
        process = CompetingProcess(products)
    except OSError as error:
        raise ClusterError(f"cannot start another process: {error.strerror}") from error
    try:
        yield process
    finally:
        process.close()
