"""Trains on a store in two shards on flash, and dies there: once per order.

Arguments: a folder, and orders `NAME/point:visit`; several of the same folder NAME come one after
the other, each going on from what the one before has left. See `flash_killer.py`.
"""

import os
import signal
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import numba  # noqa: E402
from test_shard_crashes import opened, run  # noqa: E402

from penstock.io import failpoints  # noqa: E402

if __name__ == "__main__":
    folder, *orders = sys.argv[1:]
    numba.njit(lambda x: x + 1)(1)  # half a second of every child otherwise
    for order in orders:
        name, _, place = order.partition("/")
        point, _, visit = place.partition(":")
        child = os.fork()
        if child == 0:
            with failpoints.watching(failpoints.killer(point, int(visit))):
                run(opened(Path(folder) / name))
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != -signal.SIGKILL:
            sys.exit(f"{order}: the child ended with {status} instead of being killed")
