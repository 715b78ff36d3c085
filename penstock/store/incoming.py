"""Weights that come from outside, checked one by one against the program before they go in."""

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
        ConfigError: a name that the program lacks, a name twice, a weight that did not come, or
            one of another shape or type; what was yielded before it does not make a model.
    """
    awaited = set(program.weights)
    for name, tensor in weights:
        spec = program.weights.get(name)
        if spec is None:
            hint = did_you_mean(name, program.weights)
            raise ConfigError(f"{program.name} has no weight {name!r}{hint}")
        if name not in awaited:
            raise ConfigError(f"weight {name!r} came twice")
        if tuple(tensor.shape) != spec.shape or tensor.dtype != torch.float32:
            raise ConfigError(
                f"weight {name!r} must be float32 {list(spec.shape)}, "
                f"{tensor.dtype} {list(tensor.shape)} came"
            )
        awaited.discard(name)
        yield name, tensor.detach().contiguous().view(-1).numpy()
    if awaited:
        names = [name for name in program.weights if name in awaited]
        raise ConfigError(
            f"{len(names)} weights of {program.name} did not come: "
            f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
        )


def fill(store: Store, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Give a store all its weights, one at a time, with no optimizer state, at step 0.

    Errors are those of `checked_weights`; the store must be filled again after one.
    """
    store.begin_restore()
    for name, values in checked_weights(store.program, weights):
        store.clear_state(name)
        store.write(name, MASTER, 0, values)
    store.finish_restore(0)
