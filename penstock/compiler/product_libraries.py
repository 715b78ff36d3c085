"""Which library multiplies matrices on the CPU, and in which precision.

PyTorch computes float32 products with MKL and bfloat16 products with oneDNN. MKL uses AVX-512 on
processors from Intel only. On others with AVX-512 oneDNN is also faster for float32 (measured: 1.15
to 1.35 times for the shapes of GPT-2 on Zen 4, 2 times on Zen 5, `docs/decisions.md`), so large
products use oneDNN there. With AVX2 alone MKL is as fast for a forward product, and up to 2.4 times
as fast for gradients (Zen 3). The two libraries sum in different orders, so the choice affects
bits.

oneDNN multiplies bfloat16 only with AVX-512 or instructions made for it. Elsewhere PyTorch falls
back to plain loops, which take many times as long (`benchmarks/attention.py` shows it), and
bfloat16 is multiplied in float32.

A target chooses by the processor alone, never by a timing. A run records the choice, and all
processes of the run and every resume compile with the recorded one.
"""

from typing import Literal, get_args

import torch

from penstock.kernels.processor import Processor

Products = Literal["torch", "onednn", "torch+float32", "onednn+float32"]
"""The library for products of large float32 matrices: PyTorch's default, or oneDNN; with `+float32`
bfloat16 matrices, also those of attention, are multiplied in float32."""
PRODUCTS: tuple[Products, ...] = get_args(Products)


def has_onednn() -> bool:
    """Return whether this PyTorch allows the explicit use of oneDNN."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def products_for(processor: Processor) -> Products:
    """Return the library for large float32 products on a processor, with this PyTorch, and whether
    bfloat16 is multiplied in float32."""
    if processor.prefers_onednn and has_onednn():
        return "onednn"
    return "torch" if processor.multiplies_bfloat16 else "torch+float32"


def uses_onednn(products: str) -> bool:
    """Return whether oneDNN multiplies large float32 matrices."""
    return products.startswith("onednn")


def widens(products: str) -> bool:
    """Return whether bfloat16 matrices are multiplied in float32."""
    return products.endswith("+float32")
