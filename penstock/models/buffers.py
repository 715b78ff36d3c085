"""The buffers of a model: their values, and which of them a file holds."""

from dataclasses import dataclass

import torch
import xxhash

from penstock.models.origin import WeightSource


@dataclass(frozen=True)
class ModelBuffers:
    """The values of all buffers of a model, and of tensors that are plain attributes of modules.

    They are those of the plain model built after `torch.manual_seed(seed)`, but for those in the
    files of a folder. No step changes them.
    """

    _origin: WeightSource
    seed: int

    def values(self) -> dict[str, torch.Tensor]:
        """Return all values, by first name."""
        return dict(self._origin.materialise(self.seed, self._origin.names.buffers))

    def stored(self) -> dict[str, torch.Tensor]:
        """Return the values that are from a file, by first name."""
        return dict(self._origin.materialise(self.seed, sorted(self._origin.stored)))

    def stored_digest(self) -> str | None:
        """Return a hash of the values that are from a file; None if there are none."""
        if not self._origin.stored:
            return None
        digest = xxhash.xxh3_128()
        for name, value in self.stored().items():
            digest.update(f"{name}\0{value.dtype}\0{list(value.shape)}\0".encode())
            digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def persistent(self) -> dict[str, torch.Tensor]:
        """Return the values in the model's `state_dict()`, by each of their names.

        `save_pretrained` of `transformers` leaves out the tensors in `_keys_to_ignore_on_save`, and
        so does this method.
        """
        module = self._origin.module
        first = {id(tensor): name for name, tensor in self._origin.names.buffers.items()}
        left_out = getattr(module, "_keys_to_ignore_on_save", None) or ()
        names = {
            name: first[id(value)]
            for name, value in module.state_dict(keep_vars=True).items()
            if id(value) in first and name not in left_out
        }
        values = dict(self._origin.materialise(self.seed, set(names.values())))
        return {name: values[first] for name, first in names.items()}

    @property
    def are_random(self) -> bool:
        """Whether values may depend on `seed`."""
        return self._origin.draws(self._origin.names.buffers)
