"""The buffers of a model: their values, and which of them a file holds."""

from dataclasses import dataclass

import torch

from penstock.models.origin import WeightSource
from penstock.models.tensor_digest import tensor_digest


@dataclass(frozen=True)
class ModelBuffers:
    """The values of all buffers of a model, and of tensors that are plain attributes of modules.

    They are those of the plain model built after `torch.manual_seed(seed)`, but for those in the
    files of a folder. No step changes them.

    Attributes:
        names: of all of them, by first name.
    """

    _origin: WeightSource
    names: tuple[str, ...]
    seed: int

    def values(self) -> dict[str, torch.Tensor]:
        """Return all values, by first name."""
        return dict(self._origin.materialise(self.seed, self.names))

    def stored(self) -> dict[str, torch.Tensor]:
        """Return the values that are from a file, by first name."""
        return dict(self._origin.materialise(self.seed, sorted(self._origin.stored)))

    def stored_digest(self) -> str | None:
        """Return a hash of the values that are from a file; None if there are none."""
        return tensor_digest(self.stored()) if self._origin.stored else None

    def persistent(self) -> dict[str, torch.Tensor]:
        """Return the values of `persistent_names`, by each of their names."""
        names = persistent_names(self._origin)
        values = dict(self._origin.materialise(self.seed, set(names.values())))
        return {name: values[first] for name, first in names.items()}

    @property
    def are_random(self) -> bool:
        """Whether values may depend on `seed`."""
        return self._origin.draws(self.names)


def persistent_names(origin: WeightSource) -> dict[str, str]:
    """Return the first name of every buffer in the `state_dict()` of a model, by each of its names.

    `save_pretrained` of `transformers` leaves out the tensors in `_keys_to_ignore_on_save`, and so
    does this function.
    """
    first = {id(tensor): name for name, tensor in origin.names.buffers.items()}
    left_out = getattr(origin.module, "_keys_to_ignore_on_save", None) or ()
    return {
        name: first[id(value)]
        for name, value in origin.module.state_dict(keep_vars=True).items()
        if id(value) in first and name not in left_out
    }
