"""`python -m penstock.demo`; Ctrl-C is handled before the demo is imported."""

import sys

from penstock.interruption import interruptible

if __name__ == "__main__":
    with interruptible():
        from penstock.demo.command import main

        sys.exit(main(sys.argv[1:]))
