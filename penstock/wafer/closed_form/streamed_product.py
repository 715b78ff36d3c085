"""A weight that streams over the mesh, and how its program works."""

import math
from dataclasses import dataclass
from typing import Literal

from penstock.errors import ConfigError

WORD_BYTES = 4
_INDEX_BYTES = 2
_MOST_FEATURES = 1 << 22  # far more than any vocabulary; a weight beyond is a mistake


@dataclass(frozen=True)
class StreamedProduct:
    """A weight and the tokens that it is multiplied with.

    Attributes:
        outputs, inputs: features; the weight has the shape [outputs, inputs].
        tokens: of the whole mesh.
        density: share of kept entries; ignored where counts of a mask are given.
        is_indexed: whether each value carries its index. A dense weight needs none, so that a word
            holds two 16-bit values.
        element_bytes: of activations and values, 2 or 4.

    Raises:
        ConfigError: sizes below 1, more than 4 Mi features, a density outside 0 to 1, another type.
    """

    outputs: int
    inputs: int
    tokens: int
    density: float = 1.0
    is_indexed: bool = True
    element_bytes: int = 2

    def __post_init__(self) -> None:
        for name in ("outputs", "inputs", "tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"product: expected {name} from 1 up, got {getattr(self, name)}")
        for name in ("outputs", "inputs"):
            if getattr(self, name) > _MOST_FEATURES:
                raise ConfigError(
                    f"product: expected at most {_MOST_FEATURES:,} {name}, got "
                    f"{getattr(self, name):,}"
                )
        if not 0 < self.density <= 1:
            raise ConfigError(
                f"product: expected a density above 0 and up to 1, got {self.density:g}; 90 % "
                "sparsity is a density of 0.1"
            )
        if self.element_bytes not in (2, 4):
            raise ConfigError(
                f"product: expected element_bytes of 2 or 4, got {self.element_bytes}"
            )

    @property
    def entries(self) -> float:
        """Kept entries of the weight."""
        return self.outputs * self.inputs * self.density

    @property
    def words_per_entry(self) -> float:
        """Words in which an entry travels."""
        if not self.is_indexed:
            return self.element_bytes / WORD_BYTES
        return math.ceil((self.element_bytes + _INDEX_BYTES) / WORD_BYTES)

    def __str__(self) -> str:
        kind = f"{100 * (1 - self.density):.6g}% sparse " if self.density < 1 else ""
        return f"{kind}{self.outputs} x {self.inputs} with {self.tokens} tokens"


@dataclass(frozen=True)
class StreamingOptions:
    """How the program of a streamed product works.

    Attributes:
        is_sorted: whether features are dealt to rows of cores by their number of entries.
        sums: `hidden` if partial sums are added beside the products and only `partial_sum_cycles`
            remain; `paid` if the addition takes the vector unit, as it does in the compute thread
            or where threads share a data path.
        accumulators: output features whose sum a core may hold unsent; 1 if the compute thread adds
            and sends sums itself.
        inbox_rows: sums that a core may have received and not used; None: any number.
        broadcast_rows: rows of dY that a core can hold.
        reduction: `chain` if each sum starts at the first core of a column and ends at the last;
            `ring` if it ends where its output feature belongs, so that outputs are divided evenly.
        reduction_cycles: of a core for each entry of a weight gradient, to pass its sum on.

    Raises:
        ConfigError: numbers below 1.
    """

    is_sorted: bool = True
    sums: Literal["hidden", "paid"] = "hidden"
    accumulators: int = 8
    inbox_rows: int | None = None
    broadcast_rows: int = 8
    reduction: Literal["chain", "ring"] = "chain"
    reduction_cycles: float = 1.0

    def __post_init__(self) -> None:
        for name in ("accumulators", "broadcast_rows", "inbox_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"streaming: expected {name} from 1 up, got {value}")


HIDDEN = StreamingOptions()
"""Partial sums are added beside the products."""
PAID = StreamingOptions(sums="paid", accumulators=1)
"""Partial sums are added and sent by the thread that computes."""
