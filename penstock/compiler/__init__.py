"""The compiler: a PyTorch module becomes a program."""

from penstock.compiler.build import CompileOptions, compile_module
from penstock.compiler.capture import Precision, tensor_attributes
from penstock.compiler.fused_head import Head
from penstock.compiler.hooks import refuse_gradient_hooks
from penstock.compiler.operator_costs import operator_costs
from penstock.compiler.products import (
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
