"""Goes on from a checkpoint, saves step 4 while it trains on, and dies there: once per fault point.

Arguments: a folder, the seed, and the points as `name:count`. In `folder/order` lies a run that
has been saved at steps 1, 2 and 3; every point has a child of its own, which works there. Nothing
is computed before the last fork, so that no child inherits a pool of threads.
"""

import os
import signal
import sys
from pathlib import Path

from checkpoint_killer import LAYERS
from store_programs import make_program, train, training_store

from penstock.io import failpoints
from penstock.store import BackgroundSave, find_checkpoint, load_checkpoint


def go_on_and_die(checkpoints: Path, seed: int, order: str) -> None:
    store = training_store(make_program(LAYERS, frozen=("b",)))
    load_checkpoint(store, find_checkpoint(checkpoints, "latest"))
    train(store, 1, seed)
    name, _, count = order.partition(":")
    with failpoints.watching(failpoints.killer(name, int(count))):
        saving = BackgroundSave(store.snapshot(1 << 20), checkpoints, {"saved_at": store.step})
        train(store, 2, seed)
        saving.wait()


if __name__ == "__main__":
    folder, seed, *orders = sys.argv[1:]
    for order in orders:
        child = os.fork()
        if child == 0:
            go_on_and_die(Path(folder) / order, int(seed), order)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != -signal.SIGKILL:
            sys.exit(f"{order}: the child ended with {status} instead of being killed")
