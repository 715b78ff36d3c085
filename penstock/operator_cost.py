"""What one operator of a stage costs: arithmetic and memory traffic, as the compiler counts them.

The costs belong to the program, so that everything that is said about time is derived from the
graphs that run. How long an operator takes is a property of a machine (`penstock.machines`).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class OperatorCost:
    """Calls of one operator on equal shapes, per micro-batch.

    Attributes:
        name: of the operator, for people.
        work: the kind of work, a `penstock.machines.Work`.
        dtype: `float32` or `bfloat16` (any type of two bytes), `any` for other types.
        layout: of a product: `tokens` if it sums over tokens, else `features`; else `any`.
        size: what the machine's rate depends on: the smallest dimension of a product, the share of
            kept entries of a sparse one, the sequence's length of attention, the tokens of a head,
            and the bytes of all other work.
        flops: of one call; a multiply-add counts as two.
        bytes: of one call: its tensor operands and its results.
        calls: number of such calls.
        form: of a product with a weight: `forward`, `data gradient` or `weight gradient`; else
            empty.
        outputs, inputs: features of that weight; else 0.
    """

    name: str
    work: str
    dtype: str
    layout: str
    size: float
    flops: int
    bytes: int
    calls: int = 1
    form: str = ""
    outputs: int = 0
    inputs: int = 0
