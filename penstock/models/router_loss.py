"""The auxiliary loss of a mixture of experts, which keeps its router from always selecting the same
experts.

Where a configuration sets `output_router_logits`, `transformers` adds `router_aux_loss_coef` times
this loss, a mean over the tokens of a forward call, to the mean cross-entropy of the same call.
"""

from typing import Any

import torch
from torch import nn

from penstock.errors import CompileError

# JetMoE uses another name; DBRX reads the value from another section of its configuration.
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


def router_loss(model: nn.Module, output: Any) -> torch.Tensor | None:
    """Return the term that the model's routers add to its mean loss, []; None if none is
    configured.

    Raises:
        CompileError: the term is configured and the model does not compute it.
    """
    if not getattr(getattr(model, "config", None), "output_router_logits", False):
        return None
    loss = getattr(output, "aux_loss", None)
    coefficient = next(
        (getattr(model, name) for name in _COEFFICIENTS if hasattr(model, name)), None
    )
    if not isinstance(loss, torch.Tensor) or coefficient is None:
        raise CompileError(
            f"output_router_logits is set, but {type(model).__name__} of transformers has no "
            "auxiliary loss of its routers; set output_router_logits to false"
        )
    return coefficient * loss
