"""What rows of cores lose because their entries of one output feature are not equally many.

Sorting makes the rows' totals equal; their entries of a single output feature still differ. Rows of
cores that must agree on every output feature therefore wait for each other, the less the further
they may run ahead. Here are the exact recursions for a given mask, and laws for a random one.

A forward product without room to run ahead is a last-passage problem: its time is the greatest sum
over sequences of rows that never go back, one row for each output feature. For random entries it
exceeds the mean by 2 sigma sqrt(M R) in the limit (Glynn and Whitt 1991, Baryshnikov 2001: the
largest eigenvalue of a random Hermitian matrix). The constants named fitted here were fitted to the
exact recursions on random masks (64 to 4,096 output features, 8 to 256 rows of cores, 2 to 50 %
density), where the laws were within 25 % of the skew for all but the smallest skews.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_FINITE_ROWS = 1.77  # derived: mean of the Tracy-Widom law of the largest eigenvalue
_FEW_OUTPUTS = 0.3  # fitted: fewer changes of row are possible where M is not much larger than R
_ACCUMULATORS = 2.8  # fitted; the derivation below gives 1 for the best path of equal segments
_INBOX = 0.7  # fitted
_WINDOW = 0.4  # fitted


@dataclass(frozen=True)
class RowLoad:
    """The work of a row of cores for one output feature, in cycles, over a random mask.

    Attributes:
        mean: with everything that the row does for each output feature.
        deviation: standard deviation of the work.
        worst: expected work of the fullest row beyond the mean.
    """

    mean: float
    deviation: float
    worst: float


def forward_skew(
    load: RowLoad,
    outputs: int,
    feature_rows: int,
    accumulators: int,
    inbox_rows: int | None,
) -> float:
    """Return the expected cycles by which a forward product exceeds its mean work.

    Each change of row on the greatest sequence costs `accumulators - 1` output features of lead.
    The best number of changes then gives at most sigma^2 M / ((accumulators - 1) mean) in place of
    2 sigma sqrt(M R); both are joined as parallel resistances are. A finite inbox lets sequences go
    back too, for the lead of both together.

    Args:
        accumulators: output features for which a core may hold an unsent sum.
        inbox_rows: sums that a core may have received and not yet used; None: any number.
    """
    barrier = outputs * load.worst
    if feature_rows == 1 or load.deviation == 0:
        return 0.0
    root = math.sqrt(outputs * feature_rows)
    constant = 2 - _FINITE_ROWS * feature_rows ** (-2 / 3)
    constant *= max(0.0, 1 - _FEW_OUTPUTS * math.sqrt(min(1.0, feature_rows / outputs)))
    passage = constant * load.deviation * root
    rate = load.deviation**2 / load.mean
    if accumulators > 1:
        limit = _ACCUMULATORS * rate * outputs / (accumulators - 1)
        passage = passage * limit / (passage + limit)
    if inbox_rows is not None:
        lead = inbox_rows + accumulators - 1
        few = math.sqrt(feature_rows / outputs) * lead * load.mean / load.deviation
        passage += _INBOX * rate * outputs / lead * max(0.0, 1 - few / _ACCUMULATORS)
    return min(barrier, passage)


def broadcast_skew(load: RowLoad, outputs: int, buffered_rows: int) -> float:
    """Return the expected cycles by which a product exceeds the work of its fullest row of cores,
    where every row waits for the same broadcast, of which it holds `buffered_rows` output features.
    """
    barrier = outputs * load.worst
    if buffered_rows <= 1 or load.deviation == 0:
        return barrier
    spread = load.deviation / load.mean
    return barrier * spread / (spread + _WINDOW) / buffered_rows


def forward_finish(
    work: np.ndarray,
    pass_cycles: float,
    add_cycles: float,
    accumulators: int,
    inbox_rows: int | None,
) -> float:
    """Return when the last row of cores has passed on its last sum, hops not counted.

    A core computes an output feature, waits for the sum of the row before, adds its own and passes
    the result on. With more than one accumulator it computes on while it waits.

    Args:
        work: cycles of the entries [outputs, feature rows].
        pass_cycles: of each core for each output feature, before the next row has the sum.
        add_cycles: of each core for each output feature, beside passing on.
    """
    outputs, rows = work.shape
    ahead = np.arange(rows) * pass_cycles
    ready = np.zeros(rows)
    sent: list[np.ndarray] = []
    for output in range(outputs):
        start = ready
        if output and accumulators > 1:
            start = ready + pass_cycles + add_cycles
        if output >= accumulators:
            start = np.maximum(start, sent[-accumulators] + add_cycles)
        ready = start + work[output]
        last = ready.copy()
        if sent:
            last = np.maximum(last, sent[-1])
        if inbox_rows is not None and output >= inbox_rows:
            last[:-1] = np.maximum(last[:-1], sent[-inbox_rows][1:])
        sent.append(np.maximum.accumulate(last - ahead) + ahead + pass_cycles)
        del sent[: -max(accumulators, inbox_rows or 1)]
    return float(sent[-1].max()) + add_cycles


def broadcast_finish(work: np.ndarray, buffered_rows: int) -> float:
    """Return when the last row of cores has done its work, where all rows receive the same
    broadcast and hold `buffered_rows` output features of it."""
    outputs, rows = work.shape
    done = np.zeros(rows)
    all_done: list[float] = []
    for output in range(outputs):
        if output >= buffered_rows:
            done = np.maximum(done, all_done[output - buffered_rows])
        done = done + work[output]
        all_done.append(float(done.max()))
    return all_done[-1]
