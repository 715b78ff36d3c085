"""The `penstock` command, also as `python -m penstock`.

Ctrl-C is handled before the command line is imported.
"""

import gc

from penstock.interruption import interruptible


def main() -> None:
    """Run the command line; after Ctrl-C exit with 130, without a traceback."""
    try:
        with interruptible():
            from penstock.cli import main as run

            run()
    finally:
        # At its end the interpreter would traverse every module and graph, for up to a second.
        gc.freeze()


if __name__ == "__main__":
    main()
