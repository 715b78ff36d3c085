"""The values of one micro-batch between stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from penstock.engine.memory import MemoryAccount
from penstock.errors import DataError
from penstock.program import Program, Stage


def dropout_key(seed: int, step: int, micro_batch: int) -> int:
    """Derive a dropout key from its identifiers (splitmix64 finaliser; Steele et al. 2014).

    The key does not depend on stages: a dropout is identified by its number in the whole model.
    """
    mask = (1 << 64) - 1
    mixed = seed & mask
    for part in (step, micro_batch):
        mixed = (mixed + 0x9E3779B97F4A7C15 * (part + 1)) & mask
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
        mixed ^= mixed >> 31
    return mixed >> 1  # fits a signed 64-bit tensor


def check_inputs(program: Program, inputs: Mapping[str, torch.Tensor]) -> None:
    """Reject a micro-batch that does not match the compiled program.

    **Raises:** `DataError` naming the input, the expected and the actual value.
    """
    for name in program.inputs:
        if name not in inputs:
            raise DataError(
                f"the batch lacks {name!r}: the model reads {', '.join(program.inputs)}; "
                f"the source gave {', '.join(inputs) or 'nothing'}"
            )
        if name not in program.values:
            continue  # an argument that the model does not read
        wanted, given = program.values[name].tensor, inputs[name]
        if (wanted.shape, wanted.dtype) != (tuple(given.shape), given.dtype):
            raise DataError(
                f"the batch's {name!r} must be {_described(wanted.dtype, wanted.shape)} per "
                f"micro-batch, as in the model's example inputs; the source gave "
                f"{_described(given.dtype, given.shape)}"
            )


def out_of_range(
    error: IndexError, place: str, micro_batches: Sequence[Mapping[str, torch.Tensor]]
) -> DataError:
    """Return the error for an index that a table of the model does not have: an embedding that is
    too small for the tokens or positions, or a loss with too few classes for the labels.

    **Arguments:** `error` is PyTorch's, `place` what was computed, for `micro_batches`.
    """
    values: dict[str, list[int]] = {}
    for inputs in micro_batches:
        for name, given in inputs.items():
            if given.numel() and not given.is_floating_point() and given.dtype != torch.bool:
                values.setdefault(name, []).extend((int(given.min()), int(given.max())))
    ranges = ", ".join(f"{name!r} from {min(v)} to {max(v)}" for name, v in values.items())
    return DataError(
        f"{place} reads an index that is out of range ({str(error).rstrip('.')}). The batch has "
        f"{ranges or 'no whole numbers'}. Give the model more rows in its embedding of tokens or "
        "of positions, or more outputs of its last layer; or use a tokenizer of fewer ids, or "
        "shorter sequences"
    )


def on_device(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an input of a micro-batch in memory of its own, at the allocator's alignment.

    Where a micro-batch begins within the rows of an engine depends on the number of engines, and
    matrix products on a CPU may sum in another order where an operand is aligned otherwise.
    """
    return rows.to(device, copy=True, memory_format=torch.contiguous_format)


def _described(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


@dataclass
class Flow:
    """Values by name, tensors saved by stages for their backward, and gradients of values.

    Each reference to a tensor in a flow is one reference in the memory account.
    """

    number: int
    seed: int
    step: int
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    saved: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    def key(self, stage: Stage) -> torch.Tensor:
        """Return the key of a stage's dropouts, as `program.Kind` describes it."""
        return torch.tensor([dropout_key(self.seed, self.step, self.number), stage.first_dropout])

    def put(self, account: MemoryAccount, values: Mapping[str, torch.Tensor], what: str) -> None:
        account.hold(values.values(), what)
        self.values.update(values)

    def inputs(self, stage: Stage, constants: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return [constants[n] if n in constants else self.values[n] for n in stage.inputs]

    def keep(self, account: MemoryAccount, stage: Stage, tensors: Sequence[torch.Tensor]) -> None:
        account.hold(tensors, stage.name)
        self.saved[stage.index] = list(tensors)

    def drop_read(
        self, account: MemoryAccount, program: Program, last_use: Mapping[str, int], stage: Stage
    ) -> None:
        """Release the values that no later stage of the forward sweep reads."""
        for name in {*stage.inputs, *stage.outputs}:
            if name in self.values and last_use[name] <= stage.index:
                account.release([self.values.pop(name)])

    def add_gradient(self, account: MemoryAccount, name: str, gradient: torch.Tensor) -> None:
        """Add to a value's gradient; stages add in the order of the backward sweep."""
        have = self.gradients.get(name)
        if have is not None:
            account.release([have])
            gradient = have + gradient
        account.hold([gradient], name)
        self.gradients[name] = gradient

    def take_gradients(self, stage: Stage) -> list[torch.Tensor | None]:
        """Return the gradients of a stage's differentiable outputs; None for an output without
        gradient.

        They stay in the memory account until the engine has used them.
        """
        return [
            self.gradients.pop(name, None)
            for name, needs in zip(stage.outputs, stage.kind.outputs_grad, strict=True)
            if needs
        ]
