"""Gaps between the kept entries of a mask, in bytes: the code that packed indices use.

A byte below `ESCAPE` is a number of absent entries, followed by a kept one. `ESCAPE` is that many
absent entries, followed by another byte. These parts are inlined into the kernels of
`penstock/sparsity`; they lie here because the cache of compiled code knows the sources of this
folder.
"""

from penstock.kernels.compilation import inlined

ESCAPE = 255


@inlined
def put_gap(codes, at, gap):
    """In a kernel: write the code of `gap` absent entries and a kept one; return the place after
    it."""
    while gap >= ESCAPE:
        codes[at] = ESCAPE
        at += 1
        gap -= ESCAPE
    codes[at] = gap
    return at + 1
