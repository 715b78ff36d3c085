"""Saves the state of one checkpoint into other folders, and dies there: once per fault point.

Arguments: a checkpoint, a folder, and the points as `name:count`. Every point has a child of its
own, which saves into the sub-folder of that name. The imports are made once, and nothing is
computed before the last fork, so that no child inherits a pool of threads.
"""

import os
import signal
import sys
from pathlib import Path

from store_programs import make_program, training_store

from penstock.io import failpoints
from penstock.store import load_checkpoint, save_checkpoint

LAYERS = ({"a": (40, 3), "b": (7,)}, {"c": (5, 5)})


def save_and_die(source: Path, checkpoints: Path, order: str) -> None:
    store = training_store(make_program(LAYERS, frozen=("b",)))
    load_checkpoint(store, source)
    name, _, count = order.partition(":")
    with failpoints.watching(failpoints.killer(name, int(count))):
        save_checkpoint(store, checkpoints, {"saved_at": store.step})


if __name__ == "__main__":
    source, folder, *orders = sys.argv[1:]
    for order in orders:
        child = os.fork()
        if child == 0:
            save_and_die(Path(source), Path(folder) / order, order)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != -signal.SIGKILL:
            sys.exit(f"{order}: the child ended with {status} instead of being killed")
