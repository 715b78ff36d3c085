"""The weights of a checkpoint as a store that streams them and does not train.

The first weights that fit into a budget stay in memory, the others are read again for every use.
So a model is evaluated that is larger than memory, and a small one is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from penstock.config import Config
from penstock.errors import ConfigError, few
from penstock.program import Program
from penstock.spans import Spans
from penstock.sparsity import MaskSize, StreamedWeight, compact_bytes
from penstock.store import (
    INDEX,
    MASTER,
    VALUES,
    DramStore,
    FlashTraffic,
    HeldPart,
    PartStage,
    ReadBase,
    SavedWeights,
    Traffic,
    checkpoint_hash,
    read_state,
)

_PIECE_ELEMENTS = 4 << 20


def no_training() -> ConfigError:
    """Return the error for a training step from the best checkpoint."""
    return ConfigError(
        "Trainer(best=True) evaluates, generates and exports, and does not train; use "
        "Trainer(config) to continue the run from its newest state, or export the best checkpoint "
        "and start a new run from the export (model.hf)"
    )


class ReadOnlyStore(SavedWeights):
    """A checkpoint with the interface of `penstock.store.Store`; every byte is verified when read.

    Args:
        config: names the precision.
        program: names the weights.
        folder: the checkpoint.
        base: reads the weights that the checkpoint omits, if any.
        budget_bytes: most memory of the weights that stay.

    Raises:
        ConfigError: there is no checkpoint, or it is of another model.
        CorruptionError: its description is damaged.
    """

    def __init__(
        self,
        config: Config,
        program: Program,
        folder: Path,
        base: ReadBase | None,
        budget_bytes: int,
    ) -> None:
        super().__init__(folder, base)
        self.program = program
        self._place, self._base, self._precision = folder, base, config.precision
        state = read_state(folder)
        self.step = state.step
        self._entries = state.kept
        self._require_same_model()
        self._budget_bytes, self._held_bytes = budget_bytes, 0
        self._held: dict[str, DramStore] = {}
        self._streamed_bytes = 0
        self.spans: Sequence[Spans] = ()
        self.flash_bytes = 0
        self.flash_rule = FlashTraffic()

    def _require_same_model(self) -> None:
        wanted = {name: (spec.shape, spec.is_sparse) for name, spec in self.program.weights.items()}
        found = {name: (shape, name in self._entries) for name, shape in self.shapes.items()}
        names = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
        if names:
            raise ConfigError(
                f"{self._place}: a checkpoint of another model, which differs in {few(names)}; use "
                "the configuration that wrote it"
            )

    @property
    def memory_bytes(self) -> dict[str, int]:
        """The memory of the weights that stay."""
        return {"master": self._held_bytes}

    @property
    def mask_sizes(self) -> dict[str, MaskSize]:
        """The sizes of all masks."""
        weights = self.program.weights
        return {name: MaskSize(weights[name].elements, n) for name, n in self._entries.items()}

    def fetch(self, stage: int, positions: Sequence[int] | None = None) -> list[StreamedWeight]:
        """Return the weights of a stage for streaming, as `DramStore.fetch`."""
        names = self.program.stages[stage].weights
        return self.stream(names if positions is None else [names[p] for p in positions])

    def stream(self, names: Sequence[str]) -> list[StreamedWeight]:
        """Return weights by name, in the types and shapes of the program."""
        found = [weight for name in names for weight in self._store_of(name).stream([name])]
        self._streamed_bytes += sum(weight.nbytes for weight in found)
        return found

    def _store_of(self, name: str) -> DramStore:
        """Return a store of one weight, which is kept if the budget has room for it."""
        if name in self._held:
            return self._held[name]
        store = self._loaded(name)
        size = sum(store.memory_bytes.values())
        if self._held_bytes + size <= self._budget_bytes:
            self._held[name] = store
            self._held_bytes += size
        return store

    def _loaded(self, name: str) -> DramStore:
        spec = replace(self.program.weights[name], trainable=False)
        stage = PartStage(0, name, (name,))
        part = HeldPart(self.program.name, (stage,), {name: spec}, {name: spec.capacity})
        store = DramStore(part, self._precision)
        store.begin_restore()
        mask = self.mask(name)
        role, count = (MASTER, spec.elements) if mask is None else (VALUES, mask.kept)
        if mask is not None:
            store.write(name, INDEX, 0, np.frombuffer(compact_bytes(mask), np.uint8))
        for begin in range(0, count, _PIECE_ELEMENTS):
            end = min(begin + _PIECE_ELEMENTS, count)
            store.write(name, role, begin, self.read(name, role, begin, end))
        store.finish_restore(self.step)
        return store

    def master(self, name: str) -> torch.Tensor:
        """Return a copy of a weight, float32 in its shape, with zeros where it has no entry."""
        spec = self.program.weights[name]
        return torch.from_numpy(self.read(name, MASTER, 0, spec.elements).copy()).view(spec.shape)

    def content_hash(self) -> str:
        """Return a hash of all weights."""
        return checkpoint_hash(self._place, self._base)

    def take_traffic(self) -> Traffic:
        """Return the bytes that were streamed since the last call."""
        streamed, self._streamed_bytes = self._streamed_bytes, 0
        return Traffic(streamed, 0)

    def take_flash_traffic(self) -> FlashTraffic:
        """No traffic to flash."""
        return FlashTraffic()

    def unchanged(self) -> tuple[str, ...]:
        """No weight was updated."""
        return ()

    def page_lock(self) -> bool:
        """Do nothing: weights come and go."""
        return False

    def close(self) -> None:
        """Free the weights in memory."""
        self._held.clear()
        self._held_bytes = 0

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise no_training()

    load = receive = commit = prepare = decide = discard = remember = _refuse
    begin_restore = write = clear_state = finish_restore = state = roles = _refuse
