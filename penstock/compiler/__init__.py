"""The compiler: a PyTorch module becomes a program.

A name is imported at first use: reading a compiled program needs no part of PyTorch that traces.
"""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.compiler.activation_calls import (
        gelu_tanh as gelu_tanh,
        gelu_tanh_backward as gelu_tanh_backward,
        lower_activations as lower_activations,
    )
    from penstock.compiler.attention_calls import (
        kernel_types as kernel_types,
        lower_attention as lower_attention,
    )
    from penstock.compiler.build import compile_module as compile_module
    from penstock.compiler.capture import (
        Precision as Precision,
        tensor_attributes as tensor_attributes,
    )
    from penstock.compiler.counted_costs import (
        operator_costs as operator_costs,
        operator_of as operator_of,
    )
    from penstock.compiler.decoding import (
        CACHE as CACHE,
        POSITION as POSITION,
        Decoding as Decoding,
    )
    from penstock.compiler.fused_head import (
        ALL_ROWS as ALL_ROWS,
        GradientPart as GradientPart,
        Head as Head,
    )
    from penstock.compiler.hooks import refuse_gradient_hooks as refuse_gradient_hooks
    from penstock.compiler.matmul_backend import choose_products as choose_products
    from penstock.compiler.options import CompileOptions as CompileOptions
    from penstock.compiler.product_libraries import (
        PRODUCTS as PRODUCTS,
        Products as Products,
        has_onednn as has_onednn,
        products_for as products_for,
        uses_onednn as uses_onednn,
        widens as widens,
    )
    from penstock.compiler.selection import select_trainable as select_trainable
    from penstock.compiler.sparse_lowering import calls_operand as calls_operand

__getattr__ = lazily(__name__, __file__)
