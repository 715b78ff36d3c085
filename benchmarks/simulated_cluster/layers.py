"""A step of a model with many equal layers, from steps with few of them.

In the middle of a sweep every layer repeats what the layer before it did, later by a fixed time. So
the time of a step is linear in the number of layers once the effects of its ends have died out, as
that of every event graph with fixed durations is in the end (Baccelli et al., Synchronization and
Linearity, 1992). Whether they have is measured: two further layers must take as long as the two
before them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from simulated_cluster.steps import Measured

FEW, MORE, CHECK = 4, 6, 8  # layers


def repeated(measure: Callable[[int], Measured], layers: int) -> Measured:
    """Return the step of a model with equal layers: of few layers measured, of many calculated.

    Args:
        measure: returns the step of the model with a number of layers.
        layers: those of the model.
    """
    if layers <= MORE:
        return measure(layers)
    few, more = measure(FEW), measure(MORE)
    times, rest = divmod(layers - FEW, MORE - FEW)
    if rest:
        raise ValueError(f"{layers} layers are not {FEW} and a multiple of {MORE - FEW} more")
    return Measured(
        **{
            field.name: getattr(few, field.name)
            + times * (getattr(more, field.name) - getattr(few, field.name))
            for field in dataclasses.fields(Measured)
        }
    )


def difference(measure: Callable[[int], Measured]) -> float:
    """Return by which share the last two layers of a model take longer than the two before.

    Args:
        measure: as for `repeated`.
    """
    few, more, check = (measure(layers).seconds for layers in (FEW, MORE, CHECK))
    return (check - more) / (more - few) - 1
