"""The interface of a store: weights out, gradients in, and one commit per step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch

from penstock.spans import Spans
from penstock.store.holding import Holding
from penstock.store.norm import GradientReport
from penstock.store.roles import Stored

if TYPE_CHECKING:
    from penstock.sparsity import MaskChange, MaskSize, StreamedWeight


@dataclass(frozen=True)
class Decision:
    """The result of a step's commit decision; every shard of the store updates its weights by it.

    `step` counts from 1. `norm` is the global norm of the gradients before clipping. `clip_scale`
    is the factor on every gradient. `learning_rate` is the schedule's value for this step. `masks`
    are the changes of masks, each applied after the weight's update; with `replaces_update` no
    weight is updated in this step.
    """

    step: int
    norm: float
    clip_scale: float
    learning_rate: float
    masks: tuple[MaskChange, ...] = ()
    replaces_update: bool = False


@dataclass(frozen=True)
class Commit:
    """A committed step: the decision, and the weights whose gradient was zero in every element."""

    decision: Decision
    zero_gradients: tuple[str, ...] = ()


@dataclass(frozen=True)
class Traffic:
    """Bytes of streamed weights, and bytes of received gradients.

    `update_seconds` is the caller's waiting time for updates. `snapshot_seconds` is the waiting
    time for a snapshot that had to be read or copied before an update.
    """

    streamed_bytes: int
    gradient_bytes: int
    update_seconds: float = 0.0
    snapshot_seconds: float = 0.0


@dataclass(frozen=True)
class FlashTraffic:
    """Bytes read from flash and written to it, and the caller's waiting time for them.

    `speculated_bytes` were updated before the commit and adopted by it, `discarded_bytes` were
    updated before the commit in vain.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    waited_seconds: float = 0.0
    speculated_bytes: int = 0
    discarded_bytes: int = 0


@dataclass(frozen=True)
class UpdateTimes:
    """The updates between two queries.

    Attributes:
        elements: of the updated weights.
        seconds: of these updates.
        deferred_elements: those whose update was deferred.
        blocked_seconds: in which received gradients waited for an update in another thread.
    """

    elements: int = 0
    seconds: float = 0.0
    deferred_elements: int = 0
    blocked_seconds: float = 0.0


class WeightReader(Protocol):
    """Weights that can be read in pieces: those of a store or of a checkpoint."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def flush(self) -> None: ...

    def read(self, name: str, role: str, begin: int, end: int) -> np.ndarray: ...


class Store(Protocol):
    """Owns every weight and all optimizer state; see `DramStore` for what each method does."""

    @property
    def program(self) -> Holding: ...

    @property
    def step(self) -> int: ...

    @property
    def memory_bytes(self) -> Mapping[str, int]: ...

    @property
    def flash_bytes(self) -> int: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def flash_rule(self) -> FlashTraffic: ...

    @property
    def spans(self) -> Sequence[Spans]:
        """The measurements of what the store does in this process, one for each of its parts."""
        ...

    def page_lock(self) -> bool: ...

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None: ...

    def fetch(
        self, stage: int, positions: Sequence[int] | None = None
    ) -> Sequence[StreamedWeight]: ...

    def stream(self, names: Sequence[str]) -> Sequence[StreamedWeight]: ...

    def receive(self, stage: int, gradients: Sequence[torch.Tensor | None]) -> None: ...

    def commit(self) -> Commit: ...

    def prepare(self) -> GradientReport: ...

    def decide(self, decision: Decision) -> None: ...

    def discard(self) -> None: ...

    def flush(self) -> None: ...

    def unchanged(self) -> tuple[str, ...]: ...

    def take_traffic(self) -> Traffic: ...

    def take_flash_traffic(self) -> FlashTraffic: ...

    def master(self, name: str) -> torch.Tensor: ...

    def state(self, name: str) -> dict[str, torch.Tensor]: ...

    def roles(self, name: str) -> dict[str, Stored]: ...

    def read(self, name: str, role: str, begin: int, end: int) -> np.ndarray: ...

    def begin_restore(self) -> None: ...

    def write(self, name: str, role: str, begin: int, values: np.ndarray) -> None: ...

    def clear_state(self, name: str) -> None: ...

    def finish_restore(self, step: int) -> None: ...

    def content_hash(self) -> str: ...

    def remember(self, extra: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class SavedState(Protocol):
    """The source of a checkpoint: an idle store, or a snapshot of a running store."""

    @property
    def program(self) -> Holding: ...

    @property
    def step(self) -> int: ...

    def roles(self, name: str) -> Mapping[str, Stored]: ...

    def pieces(self, name: str, role: str, piece_elements: int) -> Iterator[np.ndarray]: ...


class OpenSnapshot(SavedState, Protocol):
    """A snapshot; updates that would overwrite it wait until it is read or closed."""

    def close(self) -> None: ...

    @property
    def is_closed(self) -> bool: ...


@runtime_checkable
class MemoryStore(Store, Protocol):
    """A store that can be saved during training (`DramStore.snapshot`)."""

    def snapshot(self, buffer_bytes: int) -> OpenSnapshot: ...


@runtime_checkable
class DefersUpdates(Protocol):
    """A store that can stream weights before their update (`DramStore.defer`)."""

    @property
    def early_elements(self) -> int: ...

    def allow_early(self) -> None: ...

    def defer(self, elements: int) -> None: ...

    def make_deferred(self, stage: int) -> None: ...

    def take_update_times(self) -> UpdateTimes: ...


@runtime_checkable
class _WithMasks(Protocol):
    """A store that may have sparse weights."""

    @property
    def mask_sizes(self) -> Mapping[str, MaskSize]: ...


def kept_entries(store: Store) -> dict[str, int]:
    """Return the number of entries of every sparse weight after the last commit, by name."""
    if not isinstance(store, _WithMasks):
        return {}
    return {name: size.kept for name, size in store.mask_sizes.items()}
