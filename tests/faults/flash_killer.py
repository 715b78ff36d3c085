"""Trains on a flash store in a process of its own, to be killed at a fault point.

python flash_killer.py FOLDER
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from test_flash_crashes import opened, run  # noqa: E402

if __name__ == "__main__":
    run(opened(Path(sys.argv[1])))
    print("done")
