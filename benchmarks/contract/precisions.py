"""In which precisions plain PyTorch can be compared on this processor.

Where oneDNN has no products of bfloat16, PyTorch's take up to 200 times as long as those of float32
(`penstock/compiler/product_libraries.py`): nobody would train so. Plain loops then compute in
float32.
"""

from __future__ import annotations


def plain_precisions() -> list[str]:
    """Return those of `fp32` and `bf16` in which plain PyTorch multiplies matrices fast."""
    # Late: a worker under another Python, which lacks Penstock, imports this package.
    from penstock.kernels.processor import Processor

    return ["fp32", "bf16"] if Processor.here().multiplies_bfloat16 else ["fp32"]


def fastest_precision() -> str:
    """Return the precision of plain loops that would rather compute in bfloat16."""
    return plain_precisions()[-1]
