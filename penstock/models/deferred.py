"""Deferred initialisation: a model's weights, one at a time, bit-identical to a complete build.

`record(build)` runs `build()` on fake tensors, which takes no memory, whatever the model's size.
`Deferred.materialise(seed)` then replays the constructor's operations and yields each tensor as
soon as it is final. The result is bit-identical to `torch.manual_seed(seed); build()` on the CPU.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from penstock.errors import CompileError
from penstock.garbage_collection import collection_disabled
from penstock.models.recording import recording
from penstock.models.shared_memory import refuse_shared_memory
from penstock.models.tensor_names import TensorNames
from penstock.models.weight_recipe import WeightRecipe

if TYPE_CHECKING:
    from penstock.sparsity import PackedIndex


class Deferred:
    """A module on fake tensors, and the recipe for its real tensors.

    `module` can be traced but not computed. `fake_mode` is the mode of its tensors. `names` lists
    them. `aliases` maps further names of tied tensors to the listed name. `recipe` makes them.
    """

    def __init__(
        self,
        module: nn.Module,
        fake_mode: FakeTensorMode,
        names: TensorNames,
        recipe: WeightRecipe,
    ) -> None:
        self.module = module
        self.fake_mode = fake_mode
        self.names = names
        self.aliases = names.aliases
        self.bfloat16 = frozenset[str]()  # a constructor creates float32
        self.stored = frozenset[str]()
        self.recipe = recipe

    def materialise(
        self, seed: int, names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) for parameters, buffers and tensor attributes, each when final; see
        `WeightRecipe.materialise`."""
        return self.recipe.materialise(seed, names)

    def mask(self, name: str) -> "PackedIndex | None":
        """Return None: a constructor makes no masks."""
        return None

    def draws(self, names: Iterable[str]) -> bool:
        """Return whether the constructor draws random numbers for these tensors."""
        return self.recipe.draws(names)


def record(build: Callable[[], nn.Module]) -> Deferred:
    """Run `build()` on fake tensors and record how it fills them.

    Args:
        build: creates the module on the CPU. Random numbers must come from torch (the global
            generator or a `torch.Generator`); numbers from elsewhere are fixed when recorded.

    Returns:
        The module on fake tensors and the recipe for its weights.

    Raises:
        CompileError: `build` needs the values of random tensors (`.item()`, `.numpy()`, `if`),
            writes tensors that existed before, or leaves the CPU.
    """
    with collection_disabled(), recording() as recorder, warnings.catch_warnings():
        # `copy.deepcopy` of a layer reads the address of its weights, which is harmless.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        try:
            module = build()
        except (UnsupportedFakeTensorException, UnsupportedOperatorException) as error:
            raise CompileError(_cannot_replay(str(error))) from error
        except RuntimeError as error:
            if "tensor subclass" in str(error) or "FakeTensor" in str(error):
                raise CompileError(_cannot_replay(str(error))) from error
            raise
        if not isinstance(module, nn.Module):
            raise CompileError(
                f"expected a constructor that returns a torch.nn.Module, it returned "
                f"{type(module).__name__}"
            )
        refuse_shared_memory(module)
        names = TensorNames.of(module)
        windows = {}
        for name, tensor in {**names.parameters, **names.buffers}.items():
            if not isinstance(tensor, FakeTensor):
                raise CompileError(
                    f"{name} existed before the constructor ran, so its value cannot be made from "
                    f"a seed; pass the built nn.Module instead"
                )
            if tensor.device.type != "cpu":
                raise CompileError(
                    f"{name} is made on device {tensor.device}; build on the CPU, engines choose "
                    f"their own device"
                )
            windows[name] = recorder.window(tensor)
    return Deferred(
        module,
        recorder.fake_mode,
        names,
        WeightRecipe(
            windows, recorder.operations, recorder.storage_bytes(), recorder.generator_states
        ),
    )


def _cannot_replay(reason: str) -> str:
    first_line = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
    return (
        f"the constructor cannot be replayed weight by weight ({first_line}); build the model "
        "yourself and pass the nn.Module instead"
    )
