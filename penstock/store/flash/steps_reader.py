"""Queries on the durable steps of a flash store, in one part or in shards."""

from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from penstock.errors import ConfigError
from penstock.sparsity import PackedIndex
from penstock.store.content_hash import hash_read
from penstock.store.roles import MASTER, VALUES


class StepsReader(ABC):
    """The durable steps of the store in `folder`, newest last. A context manager.

    Args:
        folder: the folder of the whole store.
        shards: the number of shards.
        opened: resources that are closed at the end.
    """

    def __init__(self, folder: Path, shards: int, opened: ExitStack) -> None:
        self.folder = folder
        self.shards = shards
        self._opened = opened

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._opened.close()

    @property
    @abstractmethod
    def steps(self) -> list[int]:
        """The durable steps whose extents still exist, oldest first."""

    @property
    def newest(self) -> int:
        """The newest durable step.

        Raises:
            ConfigError: there is none yet.
        """
        if not self.steps:
            raise self._none_durable()
        return self.steps[-1]

    def _none_durable(self) -> ConfigError:
        return ConfigError(f"{self.folder}: no durable step yet; start the run again")

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes of the extents on flash."""

    @property
    @abstractmethod
    def state_bytes(self) -> int:
        """Weights and state of one step."""

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Number of elements of all weights."""

    @property
    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight, by name, in the order of the stages."""

    @property
    def weights(self) -> int:
        """Number of weights."""
        return len(self.shapes)

    def flush(self) -> None:  # noqa: B027 - whoever reads weights flushes first
        """A durable step has no pending updates."""

    def read(self, name: str, role: str, begin: int, end: int) -> np.ndarray:
        """Return values `begin` to `end` of a weight or its state after the newest durable step.

        Raises:
            CorruptionError: bytes have changed; the message gives the place and both checksums.
        """
        return self.read_step(self.newest, name, role, begin, end)

    @abstractmethod
    def read_step(self, step: int, name: str, role: str, begin: int, end: int) -> np.ndarray:
        """As `read`, for any durable step."""

    def mask(self, name: str) -> PackedIndex | None:
        """Return the mask of a sparse weight after the newest durable step; None for a dense
        weight."""
        return self.mask_of(self.newest, name)

    def mask_of(self, step: int, name: str) -> PackedIndex | None:
        """As `mask`, for any durable step."""
        return None

    @property
    def sparse(self) -> dict[str, tuple[int, ...]]:
        """Shape of every sparse weight, by name."""
        return {}

    @property
    def kept(self) -> dict[str, int]:
        """The number of entries of every sparse weight after the newest durable step, by name."""
        masks = {name: self.mask(name) for name in self.sparse}
        return {name: mask.kept for name, mask in masks.items() if mask is not None}

    @abstractmethod
    def verify(self, step: int) -> None:
        """Read every byte of a durable step.

        Raises:
            CorruptionError: bytes have changed; the message gives the place and both checksums.
        """

    def content_hash(self, step: int) -> str:
        """Return the hash of all weights after a durable step; an unsharded store has the same
        hash."""

        def read(name: str, begin: int, end: int) -> np.ndarray:
            role = MASTER if self.mask_of(step, name) is None else VALUES
            return self.read_step(step, name, role, begin, end)

        return hash_read(self.shapes, read, lambda name: self.mask_of(step, name))

    @property
    @abstractmethod
    def has_damaged_journal(self) -> bool:
        """Whether bytes of a journal have changed."""

    @abstractmethod
    def repair(self) -> int:
        """Roll back to the newest intact durable step; return it.

        Raises:
            ConfigError: there is no durable step yet, and nothing is damaged.
            CorruptionError: no step is intact; nothing has been changed.
        """
