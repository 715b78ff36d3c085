"""The gradients of one step: their memory, which of them have arrived, and their norm.

Engines send float32. A gradient is rounded once, at arrival, to the store's type. A tied weight
gets one part per stage that uses the weight. The parts are added in the order of arrival (the order
of the backward sweep) and in float32, even if other gradients are stored in bfloat16, so that the
sum too is rounded only once.

The gradient of a sparse weight has one number per kept entry, except in a step that grows entries
by the dense gradient: that is reduced to the kept entries at arrival, and not held.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from penstock.kernels.exact_sum import exact_sum
from penstock.kernels.gradients import (
    add_gradient,
    add_packed_gradient,
    copy_gradient,
    copy_packed_gradient,
    sums_of_squares,
)
from penstock.store.dense_gradients import DenseGradients
from penstock.store.holding import HeldStage, Holding, home_stages
from penstock.store.layout import allocate_role
from penstock.store.masks import Masks
from penstock.store.norm import GradientReport
from penstock.store.packed import with_room


class Gradients:
    """The gradient slabs, and the record of arrivals in this step.

    Gradients of the weights named in `elsewhere` have no slab: `place` sets their memory before
    they arrive. `masks` are those of the sparse weights.
    """

    def __init__(
        self,
        holding: Holding,
        dtype: torch.dtype,
        elsewhere: Collection[str] = (),
        masks: Masks | None = None,
    ) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"gradients are kept in float32 or bfloat16, not in {dtype}")
        self._holding = holding
        self._masks = masks or Masks(holding, None)
        self._trainable = {
            stage.index: trainable_weights(holding, stage) for stage in holding.stages
        }
        uses = Counter(name for names in self._trainable.values() for name in names)
        half, full = np.dtype(np.uint16), np.dtype(np.float32)
        kinds = {n: half if dtype == torch.bfloat16 and k == 1 else full for n, k in uses.items()}
        here = {name: kind for name, kind in kinds.items() if name not in elsewhere}
        self._arrays, self.memory_bytes = allocate_role(holding, here)
        self._order = tuple(name for name in home_stages(holding) if name in uses)
        self._dense = DenseGradients(uses)
        self._received: set[int] = set()
        self._squares: dict[str, tuple[float, ...]] = {}
        self._squares_so_far = 0.0
        self._non_finite: dict[int, list[str]] = {}

    def trainable(self, stage: int) -> tuple[str, ...]:
        """Return the weights of a stage that get gradients, in stage order."""
        return self._trainable[stage]

    def array(self, name: str) -> np.ndarray:
        """Return a gradient in the form that the optimizer's kernels take: float32 or bfloat16
        patterns."""
        index = self._masks.index(name)
        return self._arrays[name] if index is None else self._arrays[name][: index.kept]

    def place(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Set the memory for gradients that have no slab, before they arrive."""
        self._arrays.update(arrays)

    def check(self, stage: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Reject invalid gradients of `stage` before anything is written.

        Raises:
            RuntimeError: the stage has already sent its gradients.
            ValueError: the number of gradients, or a shape, type or device, is wrong.
        """
        if stage in self._received:
            where = self._holding.stages[stage].name
            raise RuntimeError(f"stage {where} has sent its gradients twice in one step")
        packed = {
            name: (index.kept,)
            for name in self._trainable[stage]
            if (index := self._masks.index(name)) is not None
            and not self._masks.needs_dense_gradient(name)
        }
        require_gradients(self._holding, stage, gradients, packed)

    def receive(self, stage: int, gradients: Sequence[torch.Tensor | None]) -> int:
        """Store the gradients of one stage, which `check` has accepted, and return their bytes."""
        pairs = zip(self._trainable[stage], gradients, strict=True)
        received_bytes = sum(self.receive_one(stage, name, gradient) for name, gradient in pairs)
        self.finish(stage)
        return received_bytes

    def receive_one(self, stage: int, name: str, gradient: torch.Tensor | None) -> int:
        """Store the gradient of one weight, which `check` has accepted, and return its bytes; after
        all those of the stage, call `finish`."""
        source = None
        if gradient is not None:
            source = gradient.detach().contiguous().view(-1).numpy()
        is_finite = True
        if self._masks.needs_dense_gradient(name):
            source, is_finite = self._reduce(name, source)
        if source is not None:
            before = sum(self._squares.get(name, ()))
            squares = self._squares[name] = exact_sum(self._take(name, source))
            self._squares_so_far += sum(squares) - before
            is_finite = is_finite and all(map(math.isfinite, squares))
        if not is_finite:
            self._non_finite.setdefault(stage, []).append(name)
        return 0 if gradient is None else gradient.nbytes

    def finish(self, stage: int) -> None:
        """Note that all gradients of a stage are stored."""
        self._received.add(stage)

    def _take(self, name: str, source: np.ndarray) -> np.ndarray:
        """Store or add a gradient; return the sums of squares per granule of the weight."""
        is_first, index = name not in self._squares, self._masks.index(name)
        if index is None:
            take = copy_gradient if is_first else add_gradient
            return take(source, self._arrays[name])
        if is_first:
            self._require_room(name, index.kept)
        take_packed = copy_packed_gradient if is_first else add_packed_gradient
        return take_packed(source, self.array(name), index.entry_offsets)

    def _require_room(self, name: str, kept: int) -> None:
        """Make room for so many entries of a sparse weight."""
        array = with_room(self._arrays[name], kept)
        if array is not self._arrays[name]:
            self._arrays[name] = array
            self.memory_bytes += array.nbytes

    def _reduce(self, name: str, part: np.ndarray | None) -> tuple[np.ndarray | None, bool]:
        """Select the entries to grow by a dense gradient, once it is complete.

        Returns:
            The part's numbers of the kept entries, and whether the gradient is finite.
        """
        index = self._masks.index(name)
        assert index is not None
        kept = None if part is None else part[index.positions() - index.begin]
        dense = self._dense.add(name, part)
        if dense is None:
            return kept, True
        is_finite = bool(np.isfinite(sums_of_squares(dense)).all())
        if is_finite:
            self._masks.grow(name, dense)
        return kept, is_finite

    @property
    def squares_so_far(self) -> float:
        """The sum of the squares of the gradients that have arrived, to rounding."""
        return self._squares_so_far

    def report(self) -> GradientReport:
        """Return the report on this step's gradients."""
        squares = np.array([part for name in self._squares.values() for part in name], np.float64)
        return GradientReport(
            exact_sum(squares),
            tuple(s for s, names in self._trainable.items() if names and s not in self._received),
            tuple(name for name in self._order if name not in self._squares),
            {
                stage: tuple(name for name in self._trainable[stage] if name in names)
                for stage, names in self._non_finite.items()
            },
            {
                name: self._holding.weights[name].elements
                for name, squares in self._squares.items()
                if not any(squares)
            },
        )

    def decided(self) -> None:
        """Start the next step after a commit. The slabs keep their bytes for the pending
        updates."""
        self.clear()

    def clear(self) -> None:
        """Discard the arrivals since the last commit."""
        self._received.clear()
        self._squares.clear()
        self._squares_so_far = 0.0
        self._non_finite.clear()
        self._dense.clear()


def trainable_weights(holding: Holding, stage: HeldStage) -> tuple[str, ...]:
    """Return the weights of a stage that get gradients, in stage order."""
    return tuple(name for name in stage.weights if holding.weights[name].trainable)


def require_gradients(
    holding: Holding,
    stage: int,
    gradients: Sequence[torch.Tensor | None],
    packed: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> None:
    """Reject invalid gradients of a stage.

    **Arguments:** `packed` are the shapes of gradients that do not have their weights' shapes.

    Raises:
        ValueError: the number of gradients, or a shape, type or device, is wrong.
    """
    where = holding.stages[stage].name
    names = trainable_weights(holding, holding.stages[stage])
    if len(gradients) != len(names):
        raise ValueError(
            f"stage {where}: expected a gradient for each of {len(names)} trainable weights, got "
            f"{len(gradients)} gradients"
        )
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is None:
            continue
        shape = packed.get(name, holding.weights[name].shape)
        if tuple(gradient.shape) != shape or gradient.dtype != torch.float32:
            raise ValueError(
                f"stage {where}: expected float32 {list(shape)} as the gradient of {name}, got "
                f"{gradient.dtype} {list(gradient.shape)}"
            )
        if gradient.device.type != "cpu":
            raise ValueError(
                f"stage {where}: the gradient of {name} is on {gradient.device}; "
                "the store takes gradients in host memory"
            )
