"""What rows of cores lose because their entries of one output feature are not equally many.

Sorting makes the rows' totals equal; their entries of a single output feature still differ. Rows of
cores that must agree on every output feature therefore wait for each other, the less the further
they may run ahead. Here are laws for random masks; `recursions` has what holds for a given one.

A forward product without room to run ahead is a last-passage problem: its time is the greatest sum
over sequences of rows that never go back, one row for each output feature. For random entries it
exceeds the mean by 2 sigma sqrt(M R) in the limit (Glynn and Whitt 1991, Baryshnikov 2001: the
largest eigenvalue of a random Hermitian matrix). The constants named fitted here were fitted to the
exact recursions on random masks (64 to 4,096 output features, 8 to 256 rows of cores, 2 to 50 %
density), where the laws were within 25 % of the skew for all but the smallest skews.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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
        hop_cycles: of a word from one router to the next.
    """

    of_row: int
    queue_words: int
    word_cycles: float
    ramp_cycles: float
    hop_cycles: float

    @property
    def cycles(self) -> float:
        """Cycles of a word where many follow: a short queue waits for words under way."""
        return max(self.word_cycles, self.ramp_cycles / self.queue_words)

    @property
    def without_times(self) -> ColumnWords:
        """The same words and queues where nothing takes time on the way."""
        return replace(self, word_cycles=0.0, ramp_cycles=0.0, hop_cycles=0.0)

    @property
    def to_next_core(self) -> float:
        """Cycles of a word from one core to the next in the column."""
        return self.hop_cycles + 2 * self.ramp_cycles


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
