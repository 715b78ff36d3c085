"""The compiler: a PyTorch module becomes a program.

A name is imported at first use: reading a compiled program needs no part of PyTorch that traces.
"""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.compiler.build import CompileOptions, compile_module
    from penstock.compiler.capture import Precision, tensor_attributes
    from penstock.compiler.counted_costs import operator_costs
    from penstock.compiler.fused_head import Head
    from penstock.compiler.hooks import refuse_gradient_hooks
    from penstock.compiler.matmul_backend import (
        PRODUCTS,
        Products,
        choose_products,
        has_onednn,
        products_for,
        uses_onednn,
        widens,
    )
    from penstock.compiler.selection import select_trainable

__all__ = [
    "PRODUCTS",
    "CompileOptions",
    "Head",
    "Precision",
    "Products",
    "choose_products",
    "compile_module",
    "has_onednn",
    "operator_costs",
    "products_for",
    "refuse_gradient_hooks",
    "select_trainable",
    "tensor_attributes",
    "uses_onednn",
    "widens",
]

__getattr__ = lazily(
    __name__,
    {
        "CompileOptions": "build",
        "Head": "fused_head",
        "PRODUCTS": "matmul_backend",
        "Precision": "capture",
        "Products": "matmul_backend",
        "choose_products": "matmul_backend",
        "compile_module": "build",
        "has_onednn": "matmul_backend",
        "operator_costs": "counted_costs",
        "products_for": "matmul_backend",
        "refuse_gradient_hooks": "hooks",
        "select_trainable": "selection",
        "tensor_attributes": "capture",
        "uses_onednn": "matmul_backend",
        "widens": "matmul_backend",
    },
)
