"""A model that is already built, weights and all, in the same shape as a deferred one."""

import copy
import warnings
from collections.abc import Iterable, Iterator

import torch
import xxhash
from torch import nn

from penstock.errors import CompileError, ConfigError, did_you_mean
from penstock.models.deferred import TensorNames
from penstock.models.recording import SharedFakeTensorMode
from penstock.models.shared_memory import refuse_shared_memory


class Built:
    """A fake twin of a module: same structure, same names, tensors without memory.

    The module itself is not changed, and its tensors are not copied: `materialise` hands out the
    module's own tensors, detached. `module` is the twin of `original`; the other attributes are
    those of `Deferred`.
    """

    def __init__(self, module: nn.Module) -> None:
        refuse_shared_memory(module)
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
        # Every object of the module is copied except its tensors, for which deepcopy finds a
        # fake one in its memo. Ties are kept, since the memo is by identity.
        memo = {
            id(tensor): self.fake_mode.from_tensor(tensor, static_shapes=True)
            for tensor in tensors.values()
        }
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Accessing the data pointer of Fake")
                self.module = copy.deepcopy(module, memo)
        except (TypeError, RuntimeError, AttributeError) as error:
            raise CompileError(
                f"expected a module that copy.deepcopy can copy, {type(module).__name__} cannot "
                f"be: {error}; keep open files, locks and graphs out of it"
            ) from error
        self.names = TensorNames.of(self.module)
        self.aliases = self.names.aliases
        self._values = tensors

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
        return ((name, self._values[name].detach()) for name in wanted)

    def fingerprint(self) -> str:
        """Return a hash of all tensors' names, shapes, types and values."""
        digest = xxhash.xxh3_128()
        for name, tensor in self._values.items():
            digest.update(f"{name}\0{list(tensor.shape)}\0{tensor.dtype}\0".encode())
            values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            digest.update(values.numpy().data)
        return digest.hexdigest()
