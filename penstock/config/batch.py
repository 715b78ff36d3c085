"""`batch`: the number of sequences per step, and per micro-batch."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator
from pydantic_core import PydanticCustomError

from penstock.config.section import Section, refuse, setting


def _count_or_auto(value: Any) -> Any:
    if value == "auto" or (type(value) is int and value >= 1):
        return value
    raise PydanticCustomError(
        "count", "expected a whole number from 1 up, or auto, got {got}", {"got": repr(value)}
    )


class BatchConfig(Section):
    """The global batch of a step, over all engines, and its micro-batches."""

    size: int = setting(
        32, "sequences per step, over all engines", unit="sequences", ge=1, le=10**9
    )
    micro: Annotated[int | Literal["auto"], BeforeValidator(_count_or_auto)] = setting(
        "auto",
        "sequences of one micro-batch; auto: the largest divisor of size that fits the memory of "
        "one engine, has at most 4,096 tokens (32,768 on a GPU) and leaves eight micro-batches, "
        "unless these would have fewer than 512 tokens. It does not depend on the number of "
        "engines. Another value changes the order of summation, and so the last bits",
        unit="sequences",
    )

    @model_validator(mode="after")
    def _divides(self) -> BatchConfig:
        if isinstance(self.micro, int) and self.size % self.micro:
            raise refuse(
                "micro",
                f"expected a divisor of batch.size {self.size}, got {self.micro}; the next lower "
                f"divisor is {self._largest_divisor(self.micro)}",
            )
        return self

    def _largest_divisor(self, limit: int) -> int:
        small = (d for d in range(1, math.isqrt(self.size) + 1) if self.size % d == 0)
        divisors = [each for d in small for each in (d, self.size // d)]
        return max(d for d in divisors if d <= limit)
