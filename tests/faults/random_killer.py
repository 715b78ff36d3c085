"""Trains in one process after the other, each killed at a random moment, and checks what is found.

python random_killer.py flash|checkpoints fp32|8bit FOLDER REFERENCE LIVES SEED

REFERENCE is a JSON list: the hash of the weights after 0, 1, 2 ... steps of a run that was never
interrupted. Everything is imported once; every life is a fork of this process, which computes
nothing itself, since a pool of threads does not survive a fork. A life opens what the one before
left, compares its hash, trains on, and says what it does through a pipe. Prints one JSON object.
"""

import json
import os
import random
import select
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import numba  # noqa: E402
from store_programs import random_weights, train  # noqa: E402
from test_flash_crashes import PROGRAM, SEED, in_memory, opened  # noqa: E402

from penstock.store import find_checkpoint, load_checkpoint, save_checkpoint  # noqa: E402


def flash_life(folder, moments, hashes, say):
    store = opened(folder, moments)
    begin(store, store.durable_step, hashes, say)
    while store.step < len(hashes) - 1:
        train(store, 1, SEED)
        say(f"commit {store.step} {store.durable_step}")
    store.make_durable()
    say(f"commit {store.step} {store.durable_step}")
    store.close()


def checkpoint_life(folder, moments, hashes, say):
    store = in_memory(moments)
    latest = find_checkpoint(folder, "latest")
    if latest is not None:
        load_checkpoint(store, latest)
    begin(store, None if latest is None else store.step, hashes, say)
    while store.step < len(hashes) - 1:
        train(store, 1, SEED)
        save_checkpoint(store, folder, {})
        say(f"commit {store.step} {store.step}")


def begin(store, found, hashes, say):
    """Say what was found; load weights where that is nothing."""
    if found is None:
        say("new")
        store.load(random_weights(PROGRAM, SEED).items())
        say(f"commit 0 {getattr(store, 'durable_step', None)}")
        return
    right = store.step == found and store.content_hash() == hashes[found]
    say(f"opened {found}" if right else f"error step {store.step}, found {found}: other bits")


LIVES = {"flash": flash_life, "checkpoints": checkpoint_life}


def be_born(live, folder, moments, hashes):
    """Fork; return the child's number and where it speaks."""
    heard, spoken = os.pipe()
    child = os.fork()
    if child:
        os.close(spoken)
        return child, heard
    code = 0
    numba.set_num_threads(1)  # as in conftest.py, but after the fork
    try:
        live(folder, moments, hashes, lambda line: os.write(spoken, f"{line}\n".encode()))
    except BaseException:
        os.write(spoken, f"error {traceback.format_exc()[-2000:]!r}\n".encode())
        code = 1
    os._exit(code)


def listen(heard, seconds):
    """Return what is said within some time, and whether the speaker has ended by itself."""
    said, end = b"", time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([heard], [], [], left)[0]:
            piece = os.read(heard, 1 << 16)
            if not piece:
                return said, True
            said += piece
    return said, False


class Witness:
    """What the lives so far have promised."""

    def __init__(self):
        self.committed = self.durable = None

    def hear(self, lines):
        """Check a life's words against the promises; return how far it came."""
        stage = "opening"
        for line in lines:
            what, *numbers = line.split(maxsplit=2)
            if what == "error":
                raise SystemExit(line)
            if what == "new":
                assert self.durable is None, f"durable step {self.durable} is gone"
                stage = "loading"
            elif what == "opened":
                step = int(numbers[0])
                least = max((self.committed or 0) - 1, self.durable or 0)
                most = 0 if self.committed is None else self.committed + 1
                assert least <= step <= most, (step, self.committed, self.durable)
                self.committed = self.durable = step
                stage = "training"
            else:
                self.committed = int(numbers[0])
                self.durable = None if numbers[1] == "None" else int(numbers[1])
                stage = "training"
        return stage


def main(kind, moments, folder, reference, count, seed):
    numba.njit(lambda x: x + 1)(1)  # half a second of every life otherwise
    hashes = json.loads(Path(reference).read_text())
    chosen = random.Random(seed)
    begin_seconds = time.monotonic()
    child, heard = be_born(LIVES[kind], Path(folder), moments, hashes[:9])
    said, ended = listen(heard, 300)
    assert ended
    assert os.waitpid(child, 0)[1] == 0, said.decode()
    window_seconds = time.monotonic() - begin_seconds  # eight steps, at this machine's pace
    shutil.rmtree(folder)
    stages, kills, runs, steps, witness = Counter(), 0, 0, 0, Witness()
    while kills < count:
        child, heard = be_born(LIVES[kind], Path(folder), moments, hashes)
        said, _ = listen(heard, chosen.uniform(0, window_seconds))
        os.kill(child, signal.SIGKILL)
        rest, _ = listen(heard, 60)
        os.close(heard)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        before = witness.committed or 0
        stage = witness.hear((said + rest).decode().splitlines())
        steps += max(0, (witness.committed or 0) - before)
        if killed:
            kills += 1
            stages[stage] += 1
        if witness.durable == len(hashes) - 1:
            runs, witness = runs + 1, Witness()
            shutil.rmtree(folder)
    print(json.dumps({"kills": kills, "stages": stages, "runs": runs, "steps": steps}))


if __name__ == "__main__":
    main(*sys.argv[1:5], *map(int, sys.argv[5:]))
