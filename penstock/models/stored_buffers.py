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
from penstock.models.folder import read_bytes
from penstock.models.kept_folder import BUFFERS

if TYPE_CHECKING:
    from penstock.models.deferred import Deferred
    from penstock.sparsity import PackedIndex


class WithStoredBuffers:
    """A model whose constructor makes all tensors but some buffers; see `WeightSource`."""

    def __init__(self, deferred: "Deferred", values: Mapping[str, torch.Tensor]) -> None:
        self.module = deferred.module
        self.fake_mode = deferred.fake_mode
        self.names = deferred.names
        self.aliases = deferred.aliases
        self.bfloat16 = deferred.bfloat16
        self.stored = frozenset(values)
        self._deferred, self._values = deferred, values

    def materialise(
        self, seed: int, names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor); the stored ones first."""
        everything = (*self.names.parameters, *self.names.buffers)
        wanted = list(dict.fromkeys(everything if names is None else names))
        for name in wanted:
            if name in self._values:
                yield name, self._values[name]
        yield from self._deferred.materialise(seed, [n for n in wanted if n not in self._values])

    def mask(self, name: str) -> "PackedIndex | None":
        """Return None: a constructor makes no masks."""
        return self._deferred.mask(name)

    def draws(self, names: Iterable[str]) -> bool:
        """Return whether tensors that are not stored depend on the seed."""
        return self._deferred.draws(name for name in names if name not in self._values)


def buffer_files(values: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Return the file of buffers by its name; nothing if there are none."""
    contiguous = {name: value.contiguous() for name, value in values.items()}
    return {BUFFERS: safetensors.torch.save(contiguous)} if values else {}


def with_stored_buffers(deferred: "Deferred", folder: Path) -> "Deferred | WithStoredBuffers":
    """Return a model with the buffers in the file `BUFFERS` of a folder, if it has that file.

    Raises:
        CorruptionError: the file is damaged, or its buffers are those of another model.
        StorageError: the operating system refuses to read.
    """
    path = folder / BUFFERS
    try:
        values = safetensors.torch.load(read_bytes(path, sys.maxsize))
    except FileNotFoundError:
        return deferred
    except safetensors.SafetensorError as error:
        raise CorruptionError(
            f"{path}: cannot read it: {error}; restore the file from a copy"
        ) from None
    for name, value in values.items():
        wanted = deferred.names.buffers.get(name)
        if wanted is None or (wanted.dtype, wanted.shape) != (value.dtype, value.shape):
            found = "none" if wanted is None else f"{wanted.dtype} {list(wanted.shape)}"
            raise CorruptionError(
                f"{path}: it has a buffer {name}, {value.dtype} {list(value.shape)}, the model of "
                f"this folder has {found}; restore the folder from a copy"
            )
    return WithStoredBuffers(deferred, values)
