"""Weights that a checkpoint omits: frozen weights that the base folder of the run contains.

A checkpoint names the base folder by its fingerprint and holds a checksum of each omitted weight.
A load reads these weights from the base folder and rejects any other values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from penstock.errors import ConfigError, few
from penstock.program import WeightSpec
from penstock.store.interface import Store
from penstock.store.masters import PIECE_ELEMENTS
from penstock.store.roles import MASTER
from penstock.store.tensor_file import DTYPES

ReadBase = Callable[[Collection[str]], Iterable[tuple[str, torch.Tensor]]]
"""Reads weights of a base by name, each float32 in its shape."""


@dataclass(frozen=True)
class BaseWeight:
    """A weight of the base: the type in which a store keeps it, its shape, and the checksum of its
    float32 values."""

    dtype: str
    shape: tuple[int, ...]
    checksum: str


@dataclass(frozen=True)
class Base:
    """The omitted weights of a checkpoint; `fingerprint` identifies the base folder."""

    fingerprint: str
    weights: Mapping[str, BaseWeight]

    @classmethod
    def held_by(cls, store: Store, fingerprint: str, names: Iterable[str]) -> Base:
        """Return the frozen weights of a store; `fingerprint` identifies the base folder they come
        from.

        Each weight is read once, in pieces. A checkpoint holds every sparse weight: that of the
        base has other values.
        """
        weights = {}
        for name in (name for name in names if not store.program.weights[name].is_sparse):
            spec, digest = store.program.weights[name], xxhash.xxh3_128()
            for begin in range(0, spec.elements, PIECE_ELEMENTS):
                end = min(begin + PIECE_ELEMENTS, spec.elements)
                digest.update(store.read(name, MASTER, begin, end).data)
            dtype = DTYPES[spec.format.saved_dtype]
            weights[name] = BaseWeight(dtype, spec.shape, digest.hexdigest())
        return cls(fingerprint, weights)

    def require(self, fingerprint: str | None, where: object) -> None:
        """Reject a different base folder.

        Raises:
            ConfigError: the fingerprint differs.
        """
        if fingerprint != self.fingerprint:
            raise ConfigError(
                "the checkpoints of this run hold only the trained weights, and need the "
                f"{len(self.weights)} frozen weights of the folder that the run was started from "
                f"(fingerprint {self.fingerprint}); {where} is another ({fingerprint}). Set "
                "model.hf to that folder or to a copy of it"
            )

    def reader(self, read: ReadBase | None) -> ReadBase:
        """Return the function that reads the base.

        Raises:
            ConfigError: there is no such function.
        """
        if read is None:
            raise ConfigError(
                f"this checkpoint does not hold {few(list(self.weights))}: these weights are in "
                f"the folder that the run was started from (fingerprint {self.fingerprint}); give "
                "that folder as well"
            )
        return read

    def read(
        self, read: ReadBase | None, names: Collection[str] | None = None
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yield weights by name, flat float32, each compared with its checksum; all by default.

        Raises:
            ConfigError: no base can be read, or a weight of the base has changed.
        """
        wanted = list(self.weights) if names is None else list(names)
        if not wanted:
            return
        for name, tensor in self.reader(read)(wanted):
            shape, checksum, expected = tuple(tensor.shape), _checksum(tensor), self.weights[name]
            if (shape, checksum) != (expected.shape, expected.checksum):
                raise ConfigError(
                    f"weight {name} of the base: expected shape {list(expected.shape)} and "
                    f"checksum {expected.checksum}, got {list(shape)} and {checksum}; set model.hf "
                    "to the folder that the run was started from, or restore it from a copy"
                )
            wanted.remove(name)
            yield name, tensor.detach().contiguous().view(-1).numpy()
        if wanted:
            raise ConfigError(
                f"the base has no {few(wanted)}; set model.hf to the folder that the run was "
                "started from"
            )


class BaseNotes:
    """Records the weights of a base during the first load of a store."""

    def __init__(self, fingerprint: str, specs: Mapping[str, WeightSpec]) -> None:
        self._fingerprint = fingerprint
        self._specs = {name: spec for name, spec in specs.items() if not spec.is_sparse}
        self._weights: dict[str, BaseWeight] = {}

    def passing(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights unchanged, and record them."""
        for name, tensor in weights:
            if name in self._specs:
                dtype = DTYPES[self._specs[name].format.saved_dtype]
                self._weights[name] = BaseWeight(dtype, tuple(tensor.shape), _checksum(tensor))
            yield name, tensor

    @property
    def base(self) -> Base:
        """The recorded weights."""
        return Base(self._fingerprint, self._weights)


def _checksum(tensor: torch.Tensor) -> str:
    values = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_128_hexdigest(values.data)
