"""The arithmetic of a step, from the program and the entries that the masks keep."""

from collections.abc import Mapping

from penstock.program import Program


class StepFlops:
    """Counts the operations of a step's forward and backward sweeps, without recomputation.

    A multiply-add counts as two. The program counts a sparse weight's products by its capacity;
    here they are counted by the entries that exist, and the gradient of every element where a step
    computes it.
    """

    def __init__(self, program: Program, micro_batches: int) -> None:
        kinds = [stage.kind for stage in program.stages]
        of_one = sum(kind.forward_flops + kind.backward_flops for kind in kinds)
        self._at_capacity = micro_batches * of_one
        self._sparse = {name: w for name, w in program.weights.items() if w.is_sparse}
        self._products = dict.fromkeys(self._sparse, 0)  # operations of each, at capacity
        self._tokens = dict.fromkeys(self._sparse, 0)  # of a step's products with each weight
        for stage in program.stages:
            for position, use in stage.kind.sparse.items():
                name = stage.weights[position]
                self._products[name] += micro_batches * use.flops
                self._tokens[name] += micro_batches * sum(use.product_tokens)

    def of(self, kept: Mapping[str, int], with_dense_gradients: bool = False) -> int:
        """Return the operations of a step.

        Args:
            kept: the entries of every sparse weight.
            with_dense_gradients: whether the step computes the gradient of every element.
        """
        total = self._at_capacity
        for name, count in kept.items():
            weight = self._sparse[name]
            absent = weight.capacity - count
            if absent:  # every product has as many operations for each entry
                total -= self._products[name] * absent // weight.capacity
            if with_dense_gradients and weight.trainable:
                total += 2 * self._tokens[name] * (weight.elements - count)
        return total
