"""The buffers that a run keeps of the folder that it started from, which may then be deleted.

Weights change from step to step and are in the run's store. Buffers, such as the biases of a
router's scores, stay as they were.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors
import safetensors.torch
import torch

from penstock.errors import CorruptionError
from penstock.models.constructed_origin import ConstructedOrigin
from penstock.models.folder import read_bytes
from penstock.models.kept_folder import BUFFERS
from penstock.models.origin import WeightSource
from penstock.models.tensor_names import TensorNames

if TYPE_CHECKING:
    from penstock.sparsity import PackedIndex


class WithStoredBuffers(ConstructedOrigin):
    """A model whose constructor makes all tensors but some buffers; see `WeightSource`."""

    def __init__(
        self, constructor: WeightSource, names: TensorNames, values: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__(constructor, names, stored=values)
        self._values = values

    def materialise(
        self, seed: int, names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor); the stored ones first."""
        wanted = self.wanted(names)
        for name in wanted:
            if name in self._values:
                yield name, self._values[name]
        rest = [name for name in wanted if name not in self._values]
        if rest:
            yield from self.constructor.materialise(seed, rest)

    def mask(self, name: str) -> "PackedIndex | None":
        """Return None: a constructor makes no masks."""
        return self.constructor.mask(name)

    def draws(self, names: Iterable[str]) -> bool:
        """Return whether tensors that are not stored depend on the seed."""
        return self.constructor.draws(name for name in names if name not in self._values)


def buffer_files(values: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Return the file of buffers by its name; nothing if there are none."""
    contiguous = {name: value.contiguous() for name, value in values.items()}
    return {BUFFERS: safetensors.torch.save(contiguous)} if values else {}


def with_stored_buffers(
    constructor: WeightSource, names: TensorNames, folder: Path
) -> WeightSource:
    """Return a model with the buffers in the file `BUFFERS` of a folder, if it has that file.

    **Arguments:** `names` are those of the model's tensors, for their shapes and types.

    Raises:
        CorruptionError: the file is damaged, or its buffers are those of another model.
        StorageError: the operating system refuses to read.
    """
    path = folder / BUFFERS
    try:
        values = safetensors.torch.load(read_bytes(path, sys.maxsize))
    except FileNotFoundError:
        return constructor
    except safetensors.SafetensorError as error:
        raise CorruptionError(
            f"{path}: cannot read it: {error}; restore the file from a copy"
        ) from None
    for name, value in values.items():
        wanted = names.buffers.get(name)
        if wanted is None or (wanted.dtype, wanted.shape) != (value.dtype, value.shape):
            found = "none" if wanted is None else f"{wanted.dtype} {list(wanted.shape)}"
            raise CorruptionError(
                f"{path}: it has a buffer {name}, {value.dtype} {list(value.shape)}, the model of "
                f"this folder has {found}; restore the folder from a copy"
            )
    return WithStoredBuffers(constructor, names, values)
