"""Queries on the durable steps of a flash store, in one part or in shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from penstock.errors import ConfigError
from penstock.store.content_hash import hash_read
from penstock.store.roles import MASTER


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

    @abstractmethod
    def verify(self, step: int) -> None:
        """Read every byte of a durable step.

        Raises:
            CorruptionError: bytes have changed; the message gives the place and both checksums.
        """

    def content_hash(self, step: int) -> str:
        """Return the hash of all weights after a durable step; an unsharded store has the same
        hash."""
        return hash_read(
            self.shapes,
            lambda name, begin, end: self.read_step(step, name, MASTER, begin, end),
        )

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
