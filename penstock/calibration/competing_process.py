"""A process that computes steps of the reference model when it is told to.

    python -m penstock.calibration.competing_process LIBRARY

It writes a line when it is ready, and another after each step; each line that it reads is a step to
make. It ends with its standard input.
"""

import sys
from typing import cast

import torch

from penstock.calibration.reference_step import reference_program, reference_step
from penstock.compiler import Products
from penstock.engine import keep_freed_pages, set_threads


def main() -> None:
    """Serve steps until standard input ends."""
    products = cast(Products, sys.argv[1])
    set_threads(None)
    keep_freed_pages()
    with torch.no_grad():
        step = reference_step(reference_program("float32", products))
        step()
        print("ready", flush=True)
        for _ in sys.stdin:
            step()
            print("done", flush=True)


if __name__ == "__main__":
    main()
