"""How many updates each entry of a mask has had: Adam's bias correction of entries that regrow.

Moments of a grown entry begin at 0, so its bias correction must begin anew (Kingma & Ba, "Adam: A
Method for Stochastic Optimization", 2015, section 3). With the correction of an old entry and betas
(0.9, 0.999), its updates would be 3 times too large at first, and 6.5 times at the tenth.

Entries are grown at changes of the mask only, so the age of an entry is the number of changes that
it has survived (`Remap.move_and_count`); the steps of the changes are the same for all entries of a
weight. That number stops at the greatest of its type, which also marks an entry that was never
regrown. Nothing is lost where 1 - beta^n is 1 in float64 for both betas: the correction depends on
the age no longer. With betas (0.9, 0.95) and a change every 100 steps, one byte per entry is exact;
a step count per entry takes four. A list of the young entries alone (a gap and a step: 5 bytes
each) takes more than one byte per entry once a fifth of them is young, and its size differs per
shard.
"""

import math
from collections.abc import Sequence

import numpy as np

_TYPES = (np.uint8, np.uint16, np.uint32)


def updates_by_age(
    step: int, change_steps: Sequence[int], dtype: type[np.unsignedinteger]
) -> np.ndarray:
    """Return the number of updates after step `step`, by the number of survived changes.

    An optimizer computes its corrections once per age, and looks them up per entry.

    Args:
        step: the step whose update is the last one, counted from 1.
        change_steps: the steps of all changes of the mask up to now, rising.
        dtype: the type of the ages.

    Returns:
        int64 `[number of changes + 1]`; the last is for entries that were never regrown, or whose
        age has stopped.
    """
    by_age = step - np.array([*reversed(change_steps), 0], np.int64)
    by_age[np.iinfo(dtype).max :] = step
    return by_age


def correction_ends(betas: Sequence[float]) -> int:
    """Return the least number of updates n from which 1 - beta^n is 1 in float64, for all betas.

    Raises:
        ValueError: a beta is not from 0 to below 1.
    """
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas: expected numbers from 0 to below 1, got {list(betas)}")
    ends = 1
    for beta in betas:
        if beta:
            ends = max(ends, math.ceil(-54 * math.log(2) / math.log(beta)))
            while 1 - beta**ends != 1:
                ends += 1
    return ends


def age_type(betas: Sequence[float], least_steps_between: int) -> type[np.unsignedinteger]:
    """Return the smallest type in which ages are exact.

    Args:
        betas: those of Adam.
        least_steps_between: the least number of steps between two changes of a mask.

    Raises:
        ValueError: a beta is not from 0 to below 1, or there is less than 1 step between changes.
    """
    if least_steps_between < 1:
        raise ValueError(f"steps between changes: expected 1 or more, got {least_steps_between}")
    ends = correction_ends(betas)
    for dtype in _TYPES[:-1]:
        if int(np.iinfo(dtype).max) * least_steps_between >= ends:
            return dtype
    return _TYPES[-1]
