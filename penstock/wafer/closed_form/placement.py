"""Which core row has which input features, and how evenly that divides a sparse weight.

The entries of a feature (a column of the weight) are computed where the feature is. Features are
sorted by their number of entries and dealt to the rows of cores in turn, forwards and backwards, so
that the rows' totals differ by little.
"""

import functools
import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from penstock.errors import ConfigError

_NORMAL = NormalDist()


@dataclass(frozen=True, eq=False)
class MaskCounts:
    """The kept entries of a weight, by output feature and row of cores.

    Attributes:
        counts: integers [outputs, feature rows].
        inputs: input features of the weight.
    """

    counts: np.ndarray
    inputs: int

    def __post_init__(self) -> None:
        counts = self.counts
        if counts.ndim != 2 or not counts.size or not np.issubdtype(counts.dtype, np.integer):
            raise ConfigError(
                "mask: expected whole numbers of entries by output feature and row of cores, got "
                f"an array of {counts.dtype} with shape {list(counts.shape)}"
            )
        sums = counts.sum(axis=1)
        if counts.min() < 0 or sums.max() > self.inputs:
            least = counts.min() if counts.min() < 0 else sums.min()
            raise ConfigError(
                f"mask: expected 0 to {self.inputs} entries per output feature, as many as there "
                f"are input features; got {least} to {sums.max()}"
            )

    @property
    def outputs(self) -> int:
        """Output features of the weight."""
        return int(self.counts.shape[0])

    @property
    def feature_rows(self) -> int:
        """Rows of cores over which the input features are divided."""
        return int(self.counts.shape[1])

    @property
    def entries(self) -> int:
        """All kept entries."""
        return int(self.counts.sum())

    @property
    def density(self) -> float:
        """The share of kept entries."""
        return self.entries / (self.outputs * self.inputs)

    @property
    def load_factor(self) -> float:
        """Entries of the fullest row of cores over the mean."""
        totals = self.counts.sum(axis=0)
        return float(totals.max() / totals.mean()) if self.entries else 1.0


def count_mask(mask: np.ndarray, feature_rows: int, *, is_sorted: bool = True) -> MaskCounts:
    """Return the entries of a mask by output feature and row of cores.

    Args:
        mask: booleans [outputs, inputs].
        is_sorted: whether features are dealt by their number of entries; else in their own order,
            in equal blocks.
    """
    if mask.ndim != 2 or mask.dtype != np.bool_ or not mask.size:
        raise ConfigError(
            "mask: expected booleans with the shape [outputs, inputs], got an array of "
            f"{mask.dtype} with shape {list(mask.shape)}"
        )
    inputs = mask.shape[1]
    rows = assign_rows(mask.sum(axis=0), feature_rows, is_sorted=is_sorted)
    counts = np.zeros((mask.shape[0], feature_rows), np.int64)
    order = np.argsort(rows, kind="stable")
    starts = np.searchsorted(rows[order], np.arange(feature_rows))
    present = np.flatnonzero(np.bincount(rows, minlength=feature_rows))
    sums = np.add.reduceat(mask[:, order].astype(np.int64), starts[present], axis=1)
    counts[:, present] = sums
    return MaskCounts(counts, inputs)


def assign_rows(entries: np.ndarray, feature_rows: int, *, is_sorted: bool = True) -> np.ndarray:
    """Return the row of cores of each input feature, given the features' numbers of entries."""
    places = np.arange(len(entries))
    if not is_sorted:
        return np.minimum(places // -(-len(entries) // feature_rows), feature_rows - 1)
    turn, place = np.divmod(places, feature_rows)
    dealt = np.where(turn % 2 == 0, place, feature_rows - 1 - place)
    rows = np.empty(len(entries), np.int64)
    rows[np.argsort(-entries, kind="stable")] = dealt
    return rows


@functools.lru_cache(maxsize=4096)
def expected_load_factor(
    inputs: int, outputs: int, density: float, feature_rows: int, *, is_sorted: bool = True
) -> float:
    """Return the entries of the fullest row of cores over the mean, for a mask drawn at random.

    Sorted, from the expected order statistics of the features' entries; unsorted, from the expected
    greatest of as many normal numbers as there are rows.
    """
    most = math.ceil(inputs / feature_rows)
    uneven = most * feature_rows / inputs
    if density == 1:
        return uneven
    deviation = math.sqrt(outputs * density * (1 - density))
    full = uneven / density  # of a row that keeps all entries: normal numbers may exceed them
    if not is_sorted:
        relative = deviation * math.sqrt(most) / (outputs * density * most)
        return min(full, uneven * (1 + normal_maximum(min(feature_rows, inputs)) * relative))
    entries = outputs * density + deviation * _order_statistics(inputs)
    entries = np.clip(entries, 0, outputs)
    rows = assign_rows(entries, feature_rows)
    totals = np.bincount(rows, weights=entries, minlength=feature_rows)
    return min(full, max(1.0, float(totals.max() / totals.mean())))


@functools.lru_cache(maxsize=64)
def _order_statistics(count: int) -> np.ndarray:
    """Return the expected values of `count` sorted normal numbers (Blom 1958), descending."""
    places = (np.arange(count, 0, -1) - 0.375) / (count + 0.25)
    return np.array([_NORMAL.inv_cdf(place) for place in places])


@functools.lru_cache(maxsize=1024)
def normal_maximum(count: int) -> float:
    """Return the expected greatest of independent normal numbers (Blom 1958)."""
    return 0.0 if count < 2 else _NORMAL.inv_cdf((count - 0.375) / (count + 0.25))


@functools.lru_cache(maxsize=1024)
def binomial_extremes(trials: int, share: float, draws: int) -> tuple[float, float]:
    """Return the expected least and greatest of `draws` binomial numbers."""
    if share >= 1 or trials == 0:
        return float(trials), float(trials)
    ends = np.arange(trials + 1)
    logs = np.cumsum(np.log(np.maximum(ends, 1)))
    chance = logs[-1] - logs - logs[::-1]
    chance = np.exp(chance + ends * math.log(share) + (trials - ends) * math.log1p(-share))
    below = np.minimum(np.cumsum(chance), 1.0)
    # E[X] of a number from 0 up is the sum of P(X > k).
    most = float(np.sum(1 - below**draws))
    least = float(np.sum((1 - below) ** draws))
    return least, most
