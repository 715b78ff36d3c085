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

from penstock.errors import NonFiniteError, NoTrainingError
from penstock.kernels.gradients import add_gradient, copy_gradient
from penstock.program import Program, Stage
from penstock.store.layout import allocate_role, homes


class Gradients:
    """The gradient slabs, and the account of what has arrived in this step.

    Gradients of the weights named in `elsewhere` have no slab: where they go is said by `place`
    before they are received.
    """

    def __init__(
        self, program: Program, dtype: torch.dtype, elsewhere: Collection[str] = ()
    ) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"gradients are kept in float32 or bfloat16, not in {dtype}")
        self._program = program
        self._trainable = {
            stage.index: tuple(n for n in stage.weights if program.weights[n].trainable)
            for stage in program.stages
        }
        uses = Counter(name for names in self._trainable.values() for name in names)
        half, full = np.dtype(np.uint16), np.dtype(np.float32)
        kinds = {n: half if dtype == torch.bfloat16 and k == 1 else full for n, k in uses.items()}
        here = {name: kind for name, kind in kinds.items() if name not in elsewhere}
        self._arrays, self.memory_bytes = allocate_role(program, here)
        self._order = tuple(name for name in homes(program) if name in uses)
        self._received: set[int] = set()
        self._squares: dict[str, float] = {}
        self._zero: frozenset[str] = frozenset()
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
        where, names = self._stage(stage).name, self._trainable[stage]
        if stage in self._received:
            raise RuntimeError(f"stage {where} has sent its gradients twice in one step")
        if len(gradients) != len(names):
            raise ValueError(
                f"stage {where} has {len(names)} trainable weights, {len(gradients)} gradients came"
            )
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is None:
                continue
            shape = self._program.weights[name].shape
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

    def receive(self, stage: int, gradients: Sequence[torch.Tensor | None]) -> int:
        """Take the gradients of one stage, which `check` has passed, and return their bytes."""
        received_bytes = 0
        for name, gradient in zip(self._trainable[stage], gradients, strict=True):
            if gradient is None:
                continue
            received_bytes += gradient.nbytes
            source = gradient.detach().contiguous().view(-1).numpy()
            take = add_gradient if name in self._squares else copy_gradient
            square = take(source, self._arrays[name])
            self._squares[name] = square
            if not math.isfinite(square):
                self._non_finite.setdefault(stage, []).append(name)
        self._received.add(stage)
        return received_bytes

    def norm(self, step: int) -> float:
        """Return the global norm of this step's gradients, summed exactly in float64.

        Raises:
            NoTrainingError: a trainable weight has got no gradient.
            NonFiniteError: a gradient is NaN or infinite.
        """
        silent = [self._stage(s).name for s in self._trainable if self._is_silent(s)]
        if silent:
            raise NoTrainingError(
                f"step {step}: no gradients came from {_some('stage', silent)}; "
                "every stage with trainable weights must send them before the commit"
            )
        missing = [name for name in self._order if name not in self._squares]
        if missing:
            raise NoTrainingError(
                f"step {step}: no gradient for {_some('trainable weight', missing)}: the loss does "
                "not depend on this; freeze what is not to be trained, or use it in the loss"
            )
        if self._non_finite:
            raise NonFiniteError(self._describe_non_finite(step))
        self._zero = frozenset(name for name in self._order if self._squares[name] == 0)
        return math.sqrt(math.fsum(self._squares[name] for name in self._order))

    def zero_everywhere(self, name: str) -> bool:
        """Whether the gradient of a weight was zero in every element when the norm was taken."""
        return name in self._zero

    def clear(self) -> None:
        """Forget what has arrived; the slabs keep their bytes for updates that are yet to come."""
        self._received.clear()
        self._squares.clear()
        self._non_finite.clear()

    def _is_silent(self, stage: int) -> bool:
        return bool(self._trainable[stage]) and stage not in self._received

    def _stage(self, index: int) -> Stage:
        return self._program.stages[index]

    def _describe_non_finite(self, step: int) -> str:
        # A dictionary keeps the order of arrival: the first is where the backward sweep met it.
        first, names = next(iter(self._non_finite.items()))
        text = (
            f"step {step} is not committed: NaN or infinity in the gradient of "
            f"{_some('weight', names)} of stage {self._stage(first).name}"
        )
        others = [self._stage(index).name for index in self._non_finite if index != first]
        if others:
            text += f", then of {_some('stage', others)}"
        return f"{text}; lower the learning rate, clip by a smaller norm, or look at the data"


def _some(what: str, names: Sequence[str], limit: int = 5) -> str:
    """Name a few: `weight a`, `weights a, b`, `weights a, b, c, d, e and 7 more`."""
    rest = len(names) - limit
    shown = ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
    return f"{what}{'s' if len(names) > 1 else ''} {shown}"


def clip_scale(norm: float, clip_norm: float | None) -> float:
    """Return the factor of `torch.nn.utils.clip_grad_norm_` for a global norm."""
    if clip_norm is None:
        return 1.0
    return min(1.0, clip_norm / (norm + 1e-6))
