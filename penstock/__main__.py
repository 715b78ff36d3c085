"""The `penstock` command, also as `python -m penstock`.

Ctrl-C is handled before the command line is imported.
"""

from penstock.interruption import interruptible


def main() -> None:
    """Run the command line; after Ctrl-C exit with 130, without a traceback."""
    with interruptible():
        from penstock.cli import main as run

        run()


if __name__ == "__main__":
    main()
