"""How the tensors of a model are made from a seed, one at a time: a constructor's log, replayed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.errors import ConfigError, did_you_mean
from penstock.models.constructor_log import RecordedOperation, Window
from penstock.models.replay import Replay, plan


@dataclass(frozen=True)
class WeightRecipe:
    """The log of a constructor, and which part of its memory each tensor of the model is.

    Attributes:
        windows: of parameters, buffers and tensor attributes, by first name.
        operations: of the constructor, in order.
        storage_bytes: bytes of each storage, by number.
        generator_states: of each random generator, by number; None for one that begins at the seed.
    """

    windows: Mapping[str, Window]
    operations: Sequence[RecordedOperation]
    storage_bytes: Sequence[int]
    generator_states: Sequence[torch.Tensor | None]

    def materialise(
        self, seed: int, names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) for parameters, buffers and tensor attributes, each when final.

        Args:
            seed: the argument of `torch.manual_seed` before an ordinary build.
            names: only these (first names); all by default. Random numbers of other tensors are
                still drawn if later tensors depend on them.

        At any time about two tensors of the model are in memory, besides those that the caller
        keeps. Memory that the constructor never wrote (`torch.empty`) is zero. The global random
        state is unchanged.

        Raises:
            ConfigError: a name that the model does not have.
        """
        wanted = list(self.windows) if names is None else list(dict.fromkeys(names))
        for name in wanted:
            if name not in self.windows:
                raise ConfigError(
                    f"the model has no tensor {name!r}{did_you_mean(name, self.windows)}"
                )
        return self._replay(seed, wanted)

    def draws(self, names: Iterable[str]) -> bool:
        """Return whether the constructor draws random numbers for these tensors."""
        storages = {self.windows[name].storage for name in names}
        return any(step.operation.draw for step in plan(self.operations, storages))

    def _replay(self, seed: int, wanted: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        names_of: dict[int, list[str]] = {}
        for name in wanted:
            names_of.setdefault(self.windows[name].storage, []).append(name)
        replay = Replay(self.storage_bytes, self.generator_states, seed)
        for step in plan(self.operations, names_of):
            replay.run(step)
            for storage in step.finished:
                yield from self._hand_out(replay, names_of.pop(storage, []))
                replay.release(storage)
        for storage in list(names_of):
            yield from self._hand_out(replay, names_of.pop(storage))
            replay.release(storage)

    def _hand_out(self, replay: Replay, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = [replay.tensor(self.windows[name]) for name in names]
        if names:
            replay.release(self.windows[names[0]].storage)
        for name in names:
            yield name, tensors.pop(0)
