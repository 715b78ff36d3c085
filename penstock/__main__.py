"""The `penstock` command, also as `python -m penstock`.

Ctrl-C is handled before the command line is imported.
"""

import gc
import sys

from penstock.interruption import interruptible


def main() -> None:
    """Run the command line; after Ctrl-C exit with 130, without a traceback."""
    try:
        with interruptible():
            from penstock.cli import main as run

            run()
    finally:
        # At its end the interpreter would traverse every module and graph, for up to a second.
        # Objects of the user's code may have to be finalized: files that were not closed.
        if "penstock.models.factory" not in sys.modules:
            gc.freeze()


if __name__ == "__main__":
    main()
