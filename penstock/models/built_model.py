"""A model that is already built with its weights, with the same interface as a deferred model."""

import copy
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from penstock.compiler import tensor_attributes
from penstock.errors import CompileError, ConfigError, did_you_mean
from penstock.models.bound_functions import refuse_bound_functions
from penstock.models.finite_weights import refuse_non_finite
from penstock.models.recording import SharedFakeTensorMode
from penstock.models.shared_memory import refuse_shared_memory
from penstock.models.tensor_digest import tensor_digest
from penstock.models.tensor_names import TensorNames

if TYPE_CHECKING:
    from penstock.sparsity import PackedIndex

_HALF = (torch.bfloat16, torch.float16)


class Built:
    """A fake twin of a module: same structure, same names, tensors without memory.

    The module itself is not changed, and its tensors are not copied: `materialise` returns the
    module's own tensors, detached. Parameters and buffers of bfloat16 and float16 are float32 in
    the twin, with the same values, as after `module.float()`; these are copied one at a time.
    `module` is the twin of `original`; the other attributes are those of `Deferred`.
    """

    def __init__(self, module: nn.Module) -> None:
        refuse_shared_memory(module)
        refuse_bound_functions(module)
        names = TensorNames.of(module)
        tensors = {**names.parameters, **names.buffers}
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu":
                raise CompileError(
                    f"{name} is on device {tensor.device}, which cannot be read as an initial "
                    f"value; move the model to the CPU first (module.cpu()), or on the meta "
                    f"device pass the function that builds it"
                )
        self.original = module
        self.fake_mode = SharedFakeTensorMode(allow_non_fake_inputs=True)
        # Every object of the module is copied except its tensors, for which deepcopy finds fake
        # tensors in its memo. Ties are kept, since the memo is by identity.
        attributes = tensor_attributes(module)
        self._raised = {
            name
            for name, tensor in tensors.items()
            if tensor.dtype in _HALF and name not in attributes
        }
        memo = {
            id(tensor): self._fake(tensor, name in self._raised) for name, tensor in tensors.items()
        }
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Accessing the data pointer of Fake")
                self.module = copy.deepcopy(module, memo)
        except (TypeError, RuntimeError, AttributeError) as error:
            raise CompileError(
                f"expected a module that copy.deepcopy can copy, {type(module).__name__} cannot "
                f"be: {error}; remove open files, locks and graphs from it"
            ) from error
        self.names = TensorNames.of(self.module)
        self.aliases = self.names.aliases
        self.bfloat16 = frozenset(
            name for name, tensor in names.parameters.items() if tensor.dtype == torch.bfloat16
        )
        self.stored = frozenset[str]()  # a module is no file
        self._values = tensors
        self._class_name = type(module).__name__

    def materialise(
        self, seed: int, names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of the given module; they have values, so `seed` has no effect."""
        wanted = list(self._values) if names is None else list(dict.fromkeys(names))
        for name in wanted:
            if name not in self._values:
                raise ConfigError(
                    f"the model has no tensor {name!r}{did_you_mean(name, self._values)}"
                )
        return ((name, self._value(name)) for name in wanted)

    def mask(self, name: str) -> "PackedIndex | None":
        """Return None: a module's weights are dense."""
        return None

    def draws(self, names: Iterable[str]) -> bool:
        """Return False: a module that is built has values, whatever the seed."""
        return False

    def _value(self, name: str) -> torch.Tensor:
        tensor = self._values[name].detach()
        value = tensor.float() if name in self._raised else tensor
        if self._values[name].requires_grad:
            refuse_non_finite(value, f"{self._class_name}: {name}", "repair the module's weights")
        return value

    def _fake(self, tensor: torch.Tensor, raised: bool) -> torch.Tensor:
        fake = self.fake_mode.from_tensor(tensor, static_shapes=True)
        if not raised:
            return fake
        with self.fake_mode, torch.no_grad():
            masters = fake.detach().float()
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(masters, tensor.requires_grad)
        return masters

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages for the start of a run: weights that were not float32."""
        raised = [n for n in self._raised if n in self.names.parameters]
        if not raised:
            return ()
        types = {str(self._values[n].dtype).removeprefix("torch.") for n in raised}
        return (
            f"{len(raised)} of the {len(self.names.parameters)} weights given are "
            f"{' and '.join(sorted(types))}: the store begins with exactly their values, those "
            "that train as float32 masters",
        )

    def fingerprint(self) -> str:
        """Return a hash of all tensors' names, shapes, types and values."""
        return tensor_digest(self._values)
