"""Conversion of weights to the element type of an export: rounded, or rejected on overflow.

The largest float16 is 65,504. A larger value would be written as infinity, and a user would notice
only after loading the file.
"""

import numpy as np
import torch

from penstock.errors import ConfigError, NonFiniteError

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def narrowed(name: str, values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Return values of the weight `name`, float32, as `dtype`, ties to even.

    Raises:
        NonFiniteError: a value is NaN or infinite before the conversion.
        ConfigError: a value becomes infinite in `dtype`.
    """
    exact = torch.from_numpy(values)
    rounded = exact.to(dtype)
    if bool(torch.isfinite(rounded).all()):
        return rounded
    if not bool(torch.isfinite(exact).all()):
        raise NonFiniteError(
            f"weight {name} holds NaN or infinity, so nothing was exported; train again with "
            "a lower optimizer.learning_rate"
        )
    most = float(exact[~torch.isfinite(rounded)].abs().max())
    others = "fp32" if dtype is torch.bfloat16 else "bf16 or fp32"
    raise ConfigError(
        f"weight {name} does not fit {_NAMES[dtype]}: it holds {most:,.6g}, the largest possible "
        f"value is {torch.finfo(dtype).max:,.6g}; use --dtype {others}"
    )
