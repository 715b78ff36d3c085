"""Weights from outside, validated one by one against the program before the store accepts them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.errors import ConfigError, did_you_mean
from penstock.store.holding import Holding
from penstock.store.roles import MASTER

if TYPE_CHECKING:
    from penstock.store.interface import Store


def checked_weights(
    program: Holding, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every weight of the program once, flat float32.

    Raises:
        ConfigError: a name is unknown or occurs twice, or a weight is missing or has another shape
            or type; the weights yielded before do not form a complete model.
    """
    awaited = set(program.weights)
    for name, tensor in weights:
        spec = program.weights.get(name)
        if spec is None:
            hint = did_you_mean(name, program.weights)
            raise ConfigError(f"{program.name} has no weight {name!r}{hint}")
        if name not in awaited:
            raise ConfigError(f"weight {name!r} was given twice")
        if tuple(tensor.shape) != spec.shape or tensor.dtype != torch.float32:
            raise ConfigError(
                f"weight {name!r}: expected float32 {list(spec.shape)}, got {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
        awaited.discard(name)
        yield name, tensor.detach().contiguous().view(-1).numpy()
    if awaited:
        names = [name for name in program.weights if name in awaited]
        raise ConfigError(
            f"expected every weight of {program.name}; {len(names)} were not given: "
            f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
        )


def fill(store: Store, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load all weights of a store, one at a time, with no optimizer state, at step 0.

    Errors are those of `checked_weights`; the store must be loaded again after an error.
    """
    store.begin_restore()
    for name, values in checked_weights(store.program, weights):
        store.clear_state(name)
        store.write(name, MASTER, 0, values)
    store.finish_restore(0)
