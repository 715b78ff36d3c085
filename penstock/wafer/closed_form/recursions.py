"""When rows of cores are done, for the entries of a given mask: recursions over output features.

Each has the constraints of one output feature for all rows of cores at a time: the work of a row,
the words that pass its links one by one, and the room in its memory and queues. A core takes one
word at a time from its router, whatever the colour: the words of sums or of dY, and the entries and
control words, share that way (`arriving_cycles`). (The simulation showed this.)
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from penstock.wafer.closed_form.skew import ColumnWords


@dataclass(frozen=True)
class SumSteps:
    """How a core takes part in the sum of an output feature.

    Attributes:
        pass_cycles: of a core for each output feature, to pass its sum on.
        add_cycles: of its vector unit, where the addition takes it; else 0.
        accumulators: output features whose sum a core may hold unsent.
        inbox_rows: sums that a core may have received and not yet used; None: any number.
        is_one_thread: whether the thread that computes waits for the sum of the row before.
        is_ring: whether a sum begins in a row of cores of its own and ends in the row before.
    """

    pass_cycles: float = 0.0
    add_cycles: float = 0.0
    accumulators: int = 1
    inbox_rows: int | None = None
    is_one_thread: bool = False
    is_ring: bool = False


def forward_finish(
    work: np.ndarray,
    steps: SumSteps,
    words: ColumnWords,
    arriving_cycles: np.ndarray | None = None,
) -> float:
    """Return when the last row of cores has passed on its last sum.

    A core computes an output feature, waits for the sum of the row before, adds its own and passes
    the result on word by word. With more than one accumulator it computes on while it waits; an
    accumulator is free when its last word has been read.

    Args:
        work: cycles of the entries [outputs, feature rows].
        words: of one sum.
        arriving_cycles: in which other words enter a core [outputs, feature rows]; None: none do.
    """
    outputs, rows = work.shape
    hop = words.to_next_core + (steps.pass_cycles if steps.is_one_thread else 0.0)
    sending = words.of_row * words.cycles
    last_word = max(0.0, sending - words.cycles)
    in_flight = words.to_next_core + min(sending, 2 * words.queue_words * words.cycles)
    first, way = 0, np.arange(rows) * hop
    start = np.zeros(rows)  # of the entries of an output feature
    sent_next = np.zeros(rows)  # earliest first word of a core's next sum
    # When the first word of a sum left a core, and when its accumulator was free:
    began: deque[np.ndarray] = deque(maxlen=steps.inbox_rows or 1)
    freed: deque[np.ndarray] = deque(maxlen=max(2, steps.accumulators))
    for output in range(outputs):
        if steps.is_ring:
            first = (output + 1) % rows
        ready = start + work[output] + steps.pass_cycles
        begin = np.maximum(ready, sent_next)
        if steps.inbox_rows is not None and output >= steps.inbox_rows:
            room = began[0][1:] - in_flight
            begin[:-1] = np.maximum(begin[:-1], room)
        if not steps.is_one_thread:
            begin = begin + steps.add_cycles
        begin = _along_column(begin, way, first, words)
        free = begin + last_word
        began.append(begin)
        freed.append(free)
        occupied = np.full(rows, sending)
        if arriving_cycles is not None and not steps.is_one_thread:
            entering = words.of_row * words.word_cycles + arriving_cycles[output]
            occupied = np.maximum(occupied, entering)
            occupied[first] = sending  # the first core of a sum receives none
        sent_next = begin + occupied
        if steps.is_one_thread:
            start = begin + steps.add_cycles
            if output:
                start = np.maximum(start, freed[-2])
        else:
            start = ready + steps.add_cycles
            if output + 1 >= steps.accumulators:
                start = np.maximum(start, freed[-steps.accumulators])
    return float(freed[-1].max())


def _along_column(begin: np.ndarray, way: np.ndarray, first: int, words: ColumnWords) -> np.ndarray:
    """Return when a sum begins to leave each core, if it leaves none before `begin` and comes from
    the core before; `first` is the row of cores where it begins."""
    if not first:
        return np.maximum.accumulate(begin - way) + way
    rows = len(begin)
    order = (first + np.arange(rows)) % rows
    # From the last row of cores a sum goes back over all routers to the first.
    passed = way + (order < first) * (rows - 1) * words.hop_cycles
    found = np.empty(rows)
    found[order] = np.maximum.accumulate(begin[order] - passed) + passed
    return found


def broadcast_finish(
    work: np.ndarray,
    buffered_rows: int,
    words: ColumnWords,
    arriving_cycles: np.ndarray | None = None,
) -> float:
    """Return when the last row of cores has done its work, where all rows receive the same
    broadcast and hold `buffered_rows` output features of it, and queues some of its words.

    The last word of an output feature is in a core when (a) it has come after the one before; (b)
    the core has room for it; (c) all cores have room for it or for a word that is as many words
    before it as fit into the queues between: those of a core, and of each router on the way to a
    later one. What does not fit comes when an earlier output feature is done.

    Args:
        work: cycles of the entries [outputs, feature rows].
        words: of a row of dY.
        arriving_cycles: in which other words enter the mean core [outputs]; None: none do. A word
            that waits for all cores leaves no gaps for them.
    """
    outputs, rows = work.shape
    of_row, depth, each = words.of_row, words.queue_words, words.cycles
    places = np.arange(rows)
    ahead = depth * each * places  # in which the queues on the way to a row of cores fill
    whole = depth // of_row  # output features that fit a core's own queue
    coming = np.full(outputs, of_row * each)
    if arriving_cycles is not None:
        coming = coming + arriving_cycles
    arrived = np.zeros(rows)
    done = np.zeros(rows)
    finished: list[np.ndarray] = []  # of each output feature: by a core,
    before: list[np.ndarray] = []  # by all cores up to it,
    beyond: list[np.ndarray] = []  # and the same less the words in the queues on the way
    bands = _queue_bands(rows, words)
    for output in range(outputs):
        arrived = arrived + coming[output]
        if output >= buffered_rows:
            moved = finished[output - buffered_rows] + (of_row - 1) * words.word_cycles
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
