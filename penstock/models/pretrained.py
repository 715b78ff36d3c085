"""A `transformers` model whose weights are in a folder: the structure of its configuration, weights
read from files."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from penstock.errors import ConfigError, few
from penstock.models.buffers import persistent_names
from penstock.models.constructed_origin import ConstructedOrigin
from penstock.models.origin import WeightSource
from penstock.models.tensor_names import TensorNames
from penstock.models.weight_files import WeightFiles
from penstock.models.weight_origins import Converted, Direct, Origin

if TYPE_CHECKING:
    from penstock.sparsity import PackedIndex


class Pretrained(ConstructedOrigin):
    """The constructor's tensors, and those of a folder's files; see `WeightSource`.

    Args:
        constructor: the model as built from its configuration.
        names: the model's tensors by name, for their shapes and types.
        files: the folder's tensors.
        origins: the origin of each weight, and of each buffer that the folder has (`match`).
    """

    def __init__(
        self,
        constructor: WeightSource,
        names: TensorNames,
        files: WeightFiles,
        origins: Mapping[str, Origin],
    ) -> None:
        super().__init__(constructor, names, stored=origins.keys() & names.buffers)
        self.files = files
        self.origins = origins
        self.bfloat16 = frozenset(
            name
            for name in names.parameters
            if isinstance(origin := origins.get(name), Direct | Converted)
            and origin.keeps_values
            and all(files.tensors[part].extent.dtype == "BF16" for part in origin.tensors)
        )

    def materialise(
        self, seed: int, names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) in the order of `names`; tensors without a file are initialised as
        usual.

        At most one tensor of the model is in memory, besides those that the caller keeps; if
        several weights are parts of one tensor, all of these. `seed` affects buffers only.
        """
        wanted = self.wanted(names)
        yield from self._read([name for name in wanted if name in self.origins])
        rest = [name for name in wanted if name not in self.origins]
        if rest:
            yield from self.constructor.materialise(seed, rest)

    def mask(self, name: str) -> "PackedIndex | None":
        """Return the mask of a weight that equals one packed tensor of the folder; else None."""
        origin = self.origins.get(name)
        if not isinstance(origin, Direct):
            return None
        try:
            return self.files.mask(origin.tensor)
        finally:
            self.files.close()

    def draws(self, names: Iterable[str]) -> bool:
        """Return whether tensors without a file depend on the seed."""
        return self.constructor.draws(name for name in names if name not in self.origins)

    def _read(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        waiting: dict[str, torch.Tensor] = {}
        wanted = set(names)
        try:
            for name in names:
                origin = self.origins[name]
                if name in waiting:
                    yield name, waiting.pop(name)
                elif isinstance(origin, Converted):
                    made = origin.convert(self.files.read, self.module, self._shapes())
                    for target in wanted.intersection(origin.targets):
                        waiting[target] = made[target].contiguous().to(self._dtype(target))
                    yield name, waiting.pop(name)
                else:
                    self._refuse_unequal(name, origin)
                    if name in self.stored:
                        yield name, self.files.read_buffer(origin.tensor, self._dtype(name))
                    else:
                        yield name, self.files.read(origin.tensor)
        finally:
            self.files.close()

    def _dtype(self, name: str) -> torch.dtype:
        """Return the type in which a tensor is read: float32 for a weight."""
        return self.tensors[name].dtype if name in self.stored else torch.float32

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        """A message about the buffers of the model's state that the folder does not have."""
        missing = sorted({*persistent_names(self).values()} - self.stored)
        if not missing:
            return ()
        return (
            f"{self.files.folder}: no values of {few(missing)}, which the state of "
            f"{type(self.module).__name__} contains; the values of a new model are used",
        )

    def _refuse_unequal(self, name: str, origin: Direct) -> None:
        for other in origin.also:
            if not self.files.equal(origin.tensor, other):
                raise ConfigError(
                    f"{self.files.folder}: {origin.tensor} and {other} are one weight in "
                    f"{type(self.module).__name__}, but have different values in the files; set "
                    "tie_word_embeddings to false in config.json if they are two weights"
                )
