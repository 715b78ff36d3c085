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
_WINDOW = 0.35  # fitted
_QUEUES = 1.0  # fitted: queues of a core and of the routers on the way to the slowest one


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


@dataclass(frozen=True)
class ColumnWords:
    """The words of one output feature that go down a column of cores: sums, or a row of dY.

    Attributes:
        of_row: words of one output feature.
        queue_words: that fit a queue of a router or of a core.
        word_cycles: of a word on a link.
        ramp_cycles: of a word from a router to its core, where it has a place in the queue.
    """

    of_row: int
    queue_words: int
    word_cycles: float
    ramp_cycles: float

    @property
    def cycles(self) -> float:
        """Cycles of a word where many follow: a short queue waits for words under way."""
        return max(self.word_cycles, self.ramp_cycles / self.queue_words)


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


def broadcast_skew(load: RowLoad, outputs: int, buffered_rows: int, words: ColumnWords) -> float:
    """Return the expected cycles by which a product exceeds the work of its fullest row of cores,
    where every row waits for the same broadcast, of which it holds `buffered_rows` output features.

    Words in queues are as good as more output features held. With a single one, the words that no
    queue holds come when it is done everywhere.
    """
    barrier = outputs * load.worst
    held = buffered_rows + _QUEUES * words.queue_words / words.of_row
    spread = load.deviation / load.mean
    of_barrier = spread / (spread + _WINDOW) / max(held, 2)
    if held < 2:  # between one output feature, a barrier at each, and two
        of_barrier += (2 - held) * (1 - of_barrier)
    late = 0.0  # cycles of the words that no queue holds
    if buffered_rows == 1:
        late = max(0, words.of_row - words.queue_words) * words.cycles
    return barrier * of_barrier + outputs * late


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


def broadcast_finish(work: np.ndarray, buffered_rows: int, words: ColumnWords) -> float:
    """Return when the last row of cores has done its work, where all rows receive the same
    broadcast and hold `buffered_rows` output features of it, and queues some of its words.

    The last word of an output feature is in a core when (a) it has come after the one before; (b)
    the core has room for it; (c) all cores have room for it or for a word that is as many words
    before it as fit into the queues between: those of a core, and of each router on the way to a
    later one. What does not fit comes when an earlier output feature is done.

    Args:
        work: cycles of the entries [outputs, feature rows].
    """
    outputs, rows = work.shape
    of_row, depth, each = words.of_row, words.queue_words, words.cycles
    places = np.arange(rows)
    ahead = depth * each * places  # in which the queues on the way to a row of cores fill
    whole = depth // of_row  # output features that fit a core's own queue
    arrived = np.full(rows, -np.inf)
    done = np.zeros(rows)
    finished: list[np.ndarray] = []  # of each output feature: by a core,
    before: list[np.ndarray] = []  # by all cores up to it,
    beyond: list[np.ndarray] = []  # and the same less the words in the queues on the way
    bands = _queue_bands(rows, words)
    for output in range(outputs):
        arrived = arrived + of_row * each
        if output >= buffered_rows:
            moved = finished[output - buffered_rows] + of_row * words.word_cycles
            arrived = np.maximum(arrived, moved)
        if output >= buffered_rows + whole:
            own = ((1 + whole) * of_row - depth) * each
            arrived = np.maximum(arrived, before[output - buffered_rows - whole] + own)
        for fitting, farthest in bands:
            earlier = output - buffered_rows - fitting
            if earlier < 0:
                break
            late = ((1 + fitting) * of_row - depth) * each + ahead
            cores = np.minimum(places + farthest, rows - 1)
            # Cores nearer than the band wait for less than all words of an output feature.
            waits = before[earlier][cores] + of_row * each
            arrived = np.maximum(arrived, np.minimum(beyond[earlier][cores] + late, waits))
        done = np.maximum(done, arrived) + work[output]
        finished.append(done)
        before.append(np.maximum.accumulate(done))
        beyond.append(np.maximum.accumulate(done - ahead))
    return float(before[-1][-1])


def _queue_bands(rows: int, words: ColumnWords) -> list[tuple[int, int]]:
    """Return how many output features fit the queues between two rows of cores, and the greatest
    distance of two between which no more fit."""
    bands = []
    for fitting in range(words.queue_words * rows // words.of_row + 1):
        farthest = math.ceil((fitting + 1) * words.of_row / words.queue_words) - 2
        if farthest >= 1:
            bands.append((fitting, farthest))
        if farthest >= rows - 1:
            break
    return bands
