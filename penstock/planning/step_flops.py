"""The arithmetic of a step, from the program and the entries that the masks keep."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.program import Program

_PRODUCTS = 3  # of a sparse weight: outputs, gradient of the inputs, its own gradient


class StepFlops:
    """Counts the operations of a step's forward and backward sweeps, without recomputation.

    A multiply-add counts as two. The program counts a sparse weight's products by its capacity;
    here they are counted by the entries that exist.
    """

    def __init__(self, program: Program, micro_batches: int) -> None:
        kinds = [stage.kind for stage in program.stages]
        of_one = sum(kind.forward_flops + kind.backward_flops for kind in kinds)
        self._at_capacity = micro_batches * of_one
        self._per_entry: dict[str, int] = {}
        self._capacities = {n: w.capacity for n, w in program.weights.items() if w.is_sparse}
        for stage in program.stages:
            for position, use in stage.kind.sparse.items():
                name, tokens = stage.weights[position], micro_batches * sum(use.product_tokens)
                per_entry = self._per_entry.get(name, 0)
                self._per_entry[name] = per_entry + 2 * _PRODUCTS * tokens

    def of(self, kept: Mapping[str, int]) -> int:
        """Return the operations of a step; `kept` are the entries of every sparse weight."""
        absent = {name: self._capacities[name] - count for name, count in kept.items()}
        return self._at_capacity - sum(self._per_entry[n] * count for n, count in absent.items())
