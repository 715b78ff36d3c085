"""Begins journals anew, and dies there: once per fault point.

Arguments: a folder, and where to die as `rotate|drop/point:visit`. Every order has a child of its
own and, in the sub-folder of that name, a journal of three records.
"""

import os
import signal
import sys
from pathlib import Path

from penstock.io import failpoints
from penstock.store.flash import journal
from penstock.store.flash.journal import Journal, Record

KEEP = 1


def record(number):
    return Record({"step": number}, bytes([number]) * 700)


def rotate_or_drop(path, what):
    opened = Journal(path)
    usual = journal.ROTATE_BYTES
    try:
        if what == "drop":
            opened.keep_only(opened.records[1:-1])
        else:
            journal.ROTATE_BYTES = 1
            opened.append(record(3), KEEP)
    finally:
        journal.ROTATE_BYTES = usual
        opened.close()


def make(path):
    path.parent.mkdir(parents=True)
    made = Journal.create(path, record(0))
    for number in (1, 2):
        made.append(record(number), KEEP)
    made.close()


if __name__ == "__main__":
    folder, *orders = sys.argv[1:]
    for order in orders:
        what, _, place = order.partition("/")
        point, _, visit = place.partition(":")
        path = Path(folder) / order / "journal"
        make(path)
        child = os.fork()
        if child == 0:
            with failpoints.watching(failpoints.killer(point, int(visit))):
                rotate_or_drop(path, what)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != -signal.SIGKILL:
            sys.exit(f"{order}: the child ended with {status} instead of being killed")
