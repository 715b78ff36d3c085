"""The engine of a simulated wafer: it computes as the torch engine does, and counts the cycles that
each stage would take on a mesh of cores.

Each micro-batch streams the weights of a stage once more, as its costs are those of a micro-batch.
Cycles come from the closed form; if the run asks for it, the products of weights are computed by
the simulator of the mesh instead, and their cycles come from there. What the store does at a
commit, such as a change of masks, takes no cycles of the mesh; a step that needs the gradient of
every element of a sparse weight does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from penstock.engine.interface import Batch, Engine, EnginePlan, PendingGradients
from penstock.engine.sparse_weights import SparseWeights
from penstock.engine.torch_engine import TorchEngine
from penstock.engine.wafer_costs import MaskState, stage_cycles_of
from penstock.engine.wafer_plan import WaferPlan
from penstock.program import Program, Stage
from penstock.sparsity import SparseWeight

if TYPE_CHECKING:
    from penstock.engine.simulated_products import ProductSimulator

Pass = Literal["forward", "turn", "backward"]


@dataclass(frozen=True)
class StageCount:
    """The cycles of a stage in one sweep of a step, of all micro-batches of one engine.

    Attributes:
        stage: its name.
        sweep: `turn` is the last stage's forward and backward.
        closed_form: cycles from formulas.
        simulated: cycles of the simulated mesh, in addition.
    """

    stage: str
    sweep: Pass
    closed_form: float
    simulated: float = 0.0

    @property
    def cycles(self) -> float:
        """All cycles."""
        return self.closed_form + self.simulated


class WaferEngine(TorchEngine):
    """Runs a program's stages on the CPU, and counts their cycles on a mesh.

    Args:
        wafer: how the stages lie on the mesh; for other arguments see `TorchEngine`.
    """

    def __init__(
        self,
        program: Program,
        plan: EnginePlan,
        wafer: WaferPlan,
        *,
        budget_bytes: int | None = None,
        sparse: SparseWeights | None = None,
    ) -> None:
        self._simulator: ProductSimulator | None = None
        if wafer.options.cycles == "simulated":
            from penstock.engine.simulated_products import ProductSimulator
            from penstock.engine.simulated_stages import simulated_program

            self._simulator = ProductSimulator(wafer.options)
            program = simulated_program(program, wafer, self._simulator)
        super().__init__(program, plan, budget_bytes=budget_bytes, sparse=sparse)
        self.wafer = wafer
        self._masks: dict[str, MaskState] = {}  # of sparse weights, as last sent
        self._counts: list[StageCount] = []
        self._known: dict[tuple[Any, ...], float] = {}  # closed forms that were computed

    @property
    def counts(self) -> tuple[StageCount, ...]:
        """The cycles of the present step's stages, in the order in which they ran."""
        return tuple(self._counts)

    def begin(self, batch: Batch) -> None:
        """Accept the inputs of a step and compute the prelude; discard any earlier step."""
        super().begin(batch)
        self._counts.clear()
        if self._simulator is not None:
            self._simulator.take_cycles()  # of an aborted step

    def forward(self, stage: int) -> None:
        """Run a stage on all micro-batches; keep the values that backward needs."""
        super().forward(stage)
        is_repeated = stage in self._plan.recompute
        self._count(stage, "forward", "infer" if is_repeated else "forward")

    def turn(self, stage: int) -> PendingGradients:
        """Run the last stage forward and backward; return its weights' gradients."""
        sent = super().turn(stage)
        self._count(stage, "turn", "turn")
        return sent

    def backward(self, stage: int) -> PendingGradients:
        """Run a stage backward on all micro-batches; return its weights' gradients."""
        sent = super().backward(stage)
        if any(self.program.stages[stage].kind.outputs_grad):
            is_repeated = stage in self._plan.recompute
            self._count(stage, "backward", "recompute" if is_repeated else "backward")
        return sent

    def _prepared(self, weight: Any) -> Any:
        if isinstance(weight, SparseWeight):
            self._masks[weight.name] = MaskState(weight.index.kept, weight.dense_gradient)
        prepared = super()._prepared(weight)
        if self._simulator is None or not isinstance(weight, SparseWeight):
            return prepared
        from penstock.engine.simulated_products import SimulatedSparse

        assert self._sparse is not None
        return SimulatedSparse(weight, prepared.layout, self._sparse.products, self._simulator)

    def _count(self, stage: int, sweep: Pass, executable: str) -> None:
        place = self.program.stages[stage]
        masks = {n: self._masks[place.weights[n]] for n in place.kind.sparse}
        cycles = len(self._flows) * self._closed_form(place, executable, masks)
        simulated = 0.0 if self._simulator is None else self._simulator.take_cycles()
        self._counts.append(StageCount(place.name, sweep, cycles, simulated))

    def _closed_form(self, place: Stage, executable: str, masks: Mapping[int, MaskState]) -> float:
        """Return the cycles of one micro-batch, without products that are simulated."""
        key = (place.kind.digest, executable, tuple(sorted(masks.items())))
        if key in self._known:
            return self._known[key]
        if self._simulator is None:
            found = stage_cycles_of(place.kind, executable, self.wafer, masks).cycles
        else:
            from penstock.engine.simulated_stages import cycles_beside_products

            found = cycles_beside_products(place.kind, executable, self.wafer)
        self._known[key] = found
        return found


def counted_cycles(engines: Iterable[Engine]) -> tuple[StageCount, ...]:
    """Return the cycles of a step's stages, of the slowest of some engines, which work side by
    side; nothing if the engines count no cycles."""
    counts = [engine.counts for engine in engines if isinstance(engine, WaferEngine)]
    if not counts:
        return ()
    return tuple(
        max(of_stage, key=lambda one: one.cycles) for of_stage in zip(*counts, strict=True)
    )
