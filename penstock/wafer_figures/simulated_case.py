"""The product that the pictures of the simulator show."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.wafer import CoreParameters, Mesh
from penstock.wafer.closed_form import HIDDEN
from penstock.wafer.mesh import MeshReport, TraceOptions
from penstock.wafer.programs import (
    Run,
    simulate_data_gradient,
    simulate_forward,
    simulate_weight_gradient,
)
from penstock.wafer_figures.drawn_masks import drawn_mask


@dataclass(frozen=True)
class Case:
    """A sparse weight, activations and gradients, drawn at random, on a mesh.

    Attributes:
        spread: how much input features differ in their entries, as of `drawn_mask`.
    """

    mesh: Mesh = Mesh(32, 32)  # noqa: RUF009  (frozen)
    outputs: int = 512
    inputs: int = 512
    tokens: int = 256
    sparsity: float = 0.9
    seed: int = 0
    spread: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.outputs} x {self.inputs}, {self.sparsity:.0%} sparse, {self.tokens} tokens, "
            f"{self.mesh} cores"
        )

    def simulate(
        self,
        product: str,
        core: CoreParameters,
        trace: TraceOptions | None = None,
        **options: Any,
    ) -> MeshReport:
        """Return the report of `forward`, `data gradient` or `weight gradient`.

        Args:
            core: parameters of the cores.
            trace: a record of the beginning.
            options: that differ from those of `HIDDEN`.
        """
        random = np.random.default_rng(self.seed)
        shape = (self.outputs, self.inputs)
        mask = drawn_mask(shape, self.sparsity, self.spread, self.seed)
        weight = random.standard_normal(mask.shape).astype(np.float32) * mask
        x = random.standard_normal((self.tokens, self.inputs)).astype(np.float32)
        dy = random.standard_normal((self.tokens, self.outputs)).astype(np.float32)
        run = Run(self.mesh, core, replace(HIDDEN, **options), trace=trace)
        if product == "forward":
            return simulate_forward(weight, mask, x, run).report
        if product == "data gradient":
            return simulate_data_gradient(weight, mask, dy, run).report
        return simulate_weight_gradient(mask, x, dy, run).report


PRODUCTS = ("forward", "data gradient", "weight gradient")
