"""The gradients of one step: where they lie, which have come, and how large they are together.

Engines send float32. A gradient is rounded to the store's type once, when it arrives. A tied
weight gets one part per stage that uses it; its parts are added in the order of their arrival
(the backward sweep's), in float32 even where the others are kept in bfloat16, so that the sum too
is not rounded twice.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from penstock.kernels.exact_sum import exact_sum
from penstock.kernels.gradients import add_gradient, copy_gradient
from penstock.store.holding import HeldStage, Holding, homes
from penstock.store.layout import allocate_role
from penstock.store.norm import GradientReport


class Gradients:
    """The gradient slabs, and the account of what has arrived in this step.

    Gradients of the weights named in `elsewhere` have no slab: where they go is said by `place`
    before they are received.
    """

    def __init__(
        self, holding: Holding, dtype: torch.dtype, elsewhere: Collection[str] = ()
    ) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"gradients are kept in float32 or bfloat16, not in {dtype}")
        self._holding = holding
        self._trainable = {
            stage.index: trainable_weights(holding, stage) for stage in holding.stages
        }
        uses = Counter(name for names in self._trainable.values() for name in names)
        half, full = np.dtype(np.uint16), np.dtype(np.float32)
        kinds = {n: half if dtype == torch.bfloat16 and k == 1 else full for n, k in uses.items()}
        here = {name: kind for name, kind in kinds.items() if name not in elsewhere}
        self._arrays, self.memory_bytes = allocate_role(holding, here)
        self._order = tuple(name for name in homes(holding) if name in uses)
        self._received: set[int] = set()
        self._squares: dict[str, tuple[float, ...]] = {}
        self._non_finite: dict[int, list[str]] = {}

    def trainable(self, stage: int) -> tuple[str, ...]:
        """Return the weights of a stage that get gradients, in stage order."""
        return self._trainable[stage]

    def array(self, name: str) -> np.ndarray:
        """Return a gradient as the optimizer's kernels take it: float32 or bfloat16 patterns."""
        return self._arrays[name]

    def place(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Say where gradients that have no slab are to be written when they come."""
        self._arrays.update(arrays)

    def check(self, stage: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Refuse what cannot be the gradients of `stage` in this step, before anything is written.

        Raises:
            RuntimeError: the stage has already sent its gradients.
            ValueError: another number of them, or one of another shape, type or device.
        """
        if stage in self._received:
            where = self._holding.stages[stage].name
            raise RuntimeError(f"stage {where} has sent its gradients twice in one step")
        require_gradients(self._holding, stage, gradients)

    def receive(self, stage: int, gradients: Sequence[torch.Tensor | None]) -> int:
        """Take the gradients of one stage, which `check` has passed, and return their bytes."""
        received_bytes = 0
        for name, gradient in zip(self._trainable[stage], gradients, strict=True):
            if gradient is None:
                continue
            received_bytes += gradient.nbytes
            source = gradient.detach().contiguous().view(-1).numpy()
            take = add_gradient if name in self._squares else copy_gradient
            squares = exact_sum(take(source, self._arrays[name]))
            self._squares[name] = squares
            if not all(map(math.isfinite, squares)):
                self._non_finite.setdefault(stage, []).append(name)
        self._received.add(stage)
        return received_bytes

    def report(self) -> GradientReport:
        """Return what is known of this step's gradients."""
        squares = np.array([part for name in self._squares.values() for part in name], np.float64)
        return GradientReport(
            exact_sum(squares),
            tuple(s for s, names in self._trainable.items() if names and s not in self._received),
            tuple(name for name in self._order if name not in self._squares),
            {stage: tuple(names) for stage, names in self._non_finite.items()},
            {
                name: self._holding.weights[name].elements
                for name, squares in self._squares.items()
                if not any(squares)
            },
        )

    def decided(self) -> None:
        """Begin anew: the step is committed. The slabs keep their bytes for its updates."""
        self.clear()

    def clear(self) -> None:
        """Forget what has arrived since the last commit."""
        self._received.clear()
        self._squares.clear()
        self._non_finite.clear()


def trainable_weights(holding: Holding, stage: HeldStage) -> tuple[str, ...]:
    """Return the weights of a stage that get gradients, in stage order."""
    return tuple(name for name in stage.weights if holding.weights[name].trainable)


def require_gradients(
    holding: Holding, stage: int, gradients: Sequence[torch.Tensor | None]
) -> None:
    """Refuse what cannot be the gradients of a stage.

    Raises:
        ValueError: another number of them, or one of another shape, type or device.
    """
    where = holding.stages[stage].name
    names = trainable_weights(holding, holding.stages[stage])
    if len(gradients) != len(names):
        raise ValueError(
            f"stage {where} has {len(names)} trainable weights, {len(gradients)} gradients came"
        )
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is None:
            continue
        shape = holding.weights[name].shape
        if tuple(gradient.shape) != shape or gradient.dtype != torch.float32:
            raise ValueError(
                f"stage {where}: the gradient of {name} must be float32 {list(shape)}, "
                f"{gradient.dtype} {list(gradient.shape)} came"
            )
        if gradient.device.type != "cpu":
            raise ValueError(
                f"stage {where}: the gradient of {name} is on {gradient.device}; "
                "the store takes gradients in host memory"
            )
