"""Trains on stores on flash, and dies there: once per fault point.

Arguments: a folder, and where to die as `kind/seed/point:visit`. Every order has a child of its
own, which trains in the sub-folder of that name. The imports are made once, and nothing is computed
before the last fork, so that no child inherits a pool of threads. A child that never reaches its
point trains to the end; the orders of those that were killed are printed.
"""

import os
import signal
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import numba  # noqa: E402
from test_flash_crashes import opened, run  # noqa: E402

from penstock.io import failpoints  # noqa: E402


def train_and_die(folder: Path, order: str) -> None:
    numba.set_num_threads(1)  # as in conftest.py, but after the fork
    moments, seed, place = order.split("/")
    point, _, visit = place.partition(":")
    with failpoints.watching(failpoints.killer(point, int(visit))):
        run(opened(folder, moments), int(seed))


if __name__ == "__main__":
    folder, *orders = sys.argv[1:]
    numba.njit(lambda x: x + 1)(1)  # half a second of every child otherwise
    for order in orders:
        child = os.fork()
        if child == 0:
            train_and_die(Path(folder) / order, order)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status not in (0, -signal.SIGKILL):
            sys.exit(f"{order}: the child ended with {status} instead of being killed")
        if status:
            print(order)
