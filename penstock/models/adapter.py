"""A low-rank adapter of a weight, by its names and sizes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Adapter:
    """The effective weight of a layer with an adapter: W + (alpha / rank) B A.

    Attributes:
        down: name of A [rank, in].
        up: name of B [out, rank].
        rank, alpha: the product is scaled by `alpha / rank`.
        dropout: share of the adapter's inputs that training drops.
        transposed: the weight is [in, out], as in GPT-2's Conv1D, and so is the product.
    """

    down: str
    up: str
    rank: int
    alpha: float
    dropout: float
    transposed: bool

    @property
    def scale(self) -> float:
        """The factor on the product."""
        return self.alpha / self.rank

    @property
    def path(self) -> str:
        """The adapted layer's place in the model."""
        return self.down.removesuffix("lora_A.weight").removesuffix(".")
