"""A `transformers` model whose weights are in a folder: deferred structure, weights read from
files."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from penstock.errors import ConfigError, few
from penstock.models.buffers import persistent_names
from penstock.models.deferred import Deferred
from penstock.models.huggingface_weight_names import Converted, Direct, match
from penstock.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from penstock.sparsity import PackedIndex


class Pretrained:
    """A deferred model with the files of its weights; see `Deferred` for the attributes.

    Args:
        deferred: the model as built from its configuration.
        files: the folder's tensors.
        ignore: patterns of tensors that the model may leave unused.

    Raises:
        ConfigError: the files belong to another model.
    """

    def __init__(self, deferred: Deferred, files: WeightFiles, ignore: Sequence[str] = ()) -> None:
        self.module = deferred.module
        self.fake_mode = deferred.fake_mode
        self.names = deferred.names
        self.aliases = deferred.aliases
        self.files = files
        self._deferred = deferred
        self._origins = match(
            files.tensors, deferred.module, deferred.aliases, folder=files.folder, ignore=ignore
        )
        self.bfloat16 = frozenset(
            name
            for name in self.names.parameters
            if isinstance(origin := self._origins.get(name), Direct | Converted)
            and origin.keeps_values
            and all(files.tensors[part].extent.dtype == "BF16" for part in origin.tensors)
        )
        self.stored = frozenset(self.names.buffers).intersection(self._origins)
        self._shapes = {
            name: tuple(tensor.shape)
            for name, tensor in {**self.names.parameters, **self.names.buffers}.items()
        }

    def materialise(
        self, seed: int, names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) in the order of `names`; tensors without a file are initialised as
        usual.

        At most one tensor of the model is in memory, besides those that the caller keeps; if
        several weights are parts of one tensor, all of these. `seed` affects buffers only.
        """
        wanted = list(self._shapes) if names is None else list(dict.fromkeys(names))
        yield from self._read([name for name in wanted if name in self._origins])
        yield from self._deferred.materialise(
            seed, [name for name in wanted if name not in self._origins]
        )

    def mask(self, name: str) -> "PackedIndex | None":
        """Return the mask of a weight that equals one packed tensor of the folder; else None."""
        origin = self._origins.get(name)
        if not isinstance(origin, Direct):
            return None
        try:
            return self.files.mask(origin.tensor)
        finally:
            self.files.close()

    def draws(self, names: Iterable[str]) -> bool:
        """Return whether tensors without a file depend on the seed."""
        return self._deferred.draws(name for name in names if name not in self._origins)

    def _read(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        waiting: dict[str, torch.Tensor] = {}
        wanted = set(names)
        try:
            for name in names:
                origin = self._origins[name]
                if name in waiting:
                    yield name, waiting.pop(name)
                elif isinstance(origin, Converted):
                    made = origin.convert(self.files.read, self.module, self._shapes)
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
        return self.names.buffers[name].dtype if name in self.stored else torch.float32

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
