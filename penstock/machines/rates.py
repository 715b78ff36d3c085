"""Rates of a machine as curves: how fast it does one kind of work, by the size of a call."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Literal, get_args

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from penstock.config import Numbers, Section, refuse, refuse_all, setting
from penstock.machines.bounds import SLOWEST_RATE

Work = Literal[
    "product",
    "sparse product",
    "attention",
    "head",
    "norm",
    "activation",
    "pointwise",
    "reduction",
    "lookup",
    "copy",
    "update",
    "receive",
    "checksum",
    "flash read",
    "flash write",
    "shared memory",
    "socket",
]
"""A kind of work whose calls have one rate.

`product` multiplies matrices; `sparse product` is one over the kept entries of a mask; `attention`
is softmax attention in one operator; `head` is the last product with its loss in one operator;
`norm` includes softmax; `activation` evaluates exponentials and the like; `pointwise`, `reduction`,
`lookup` (rows of a table) and `copy` move memory; `update` is a
pass of the optimizer; `receive` adds gradients to those of the store and sums their squares;
`checksum` is that of a block on flash; `shared memory` and `socket` carry messages between
processes of one host.
"""

IN_FLOPS: frozenset[str] = frozenset({"product", "sparse product", "attention", "head"})
"""The work whose rate is in FLOP/s; the rate of all other work is in bytes/s."""

Type = Literal["any", "float32", "bfloat16", "8bit"]
Layout = Literal["any", "features", "tokens"]

_STAND_IN: dict[str, Work] = {
    "attention": "product",
    "head": "product",
    "sparse product": "product",
    "norm": "pointwise",
    "activation": "pointwise",
    "reduction": "pointwise",
    "lookup": "pointwise",
    "copy": "pointwise",
    "pointwise": "update",  # of a store, which has none of the engine's work
    "receive": "update",
    "checksum": "update",
}
"""The work whose rate is used where a machine gives none."""


class RateCurve(Section):
    """The rate of one kind of work by the size of a call; constant beyond the first and last size,
    and straight between two sizes if both are drawn in logarithms.

    The size of a product is its smallest dimension, of a sparse product the share of kept entries,
    of attention the sequence's length, of a head its tokens, and of all other work its bytes. A
    product of layout `features` sums over features; one of layout `tokens` sums over tokens, as the
    gradient of a weight does. Rates are in FLOP/s (a multiply-add counts as two) or bytes/s.
    """

    work: Work = setting(..., "kind of work")
    dtype: Type = setting("any", "type of the values; any: all types without a curve of their own")
    layout: Layout = setting("any", "of a product: over what it sums")
    sizes: Numbers = setting(
        (1.0,), "sizes of a call, ascending", example=[64, 256, 1024], min_length=1
    )
    rates: Numbers = setting(
        ..., "rate at each size, in FLOP/s or bytes/s", example=[2e11, 4e11, 5e11], min_length=1
    )
    spread: float = setting(
        0.0, "half the range of the repeated measurements, relative to their median", ge=0
    )

    @model_validator(mode="after")
    def _check(self) -> RateCurve:
        refuse_all(list(self._problems()))
        return self

    def _problems(self) -> Iterator[PydanticCustomError]:
        if len(self.sizes) != len(self.rates):
            yield refuse(
                "rates",
                f"expected one rate per size, got {len(self.rates)} for {len(self.sizes)}; add or "
                "remove some",
            )
        for key, values in (("sizes", self.sizes), ("rates", self.rates)):
            if min(values) <= 0:
                yield refuse(
                    key, f"expected numbers above 0, got {min(values):g}; correct or remove it"
                )
        if 0 < min(self.rates) < SLOWEST_RATE:
            unit = "FLOP/s" if self.work in IN_FLOPS else "bytes/s"
            yield refuse(
                "rates",
                f"expected rates of {SLOWEST_RATE:g} {unit} or more, got {min(self.rates):g}; "
                "correct or remove it",
            )
        if any(later <= size for size, later in zip(self.sizes, self.sizes[1:], strict=False)):
            got = ", ".join(f"{size:g}" for size in self.sizes)
            yield refuse(
                "sizes",
                f"expected ascending sizes, got {got}; order sizes and rates alike, each size once",
            )
        if self.work == "sparse product" and max(self.sizes) > 1:
            yield refuse(
                "sizes",
                f"expected shares of kept entries up to 1 for a sparse product, got "
                f"{max(self.sizes):g}; write 0.1 for 10 %",
            )

    def at(self, size: float) -> float:
        """Return the rate of a call of a size, in FLOP/s or bytes/s."""
        sizes, rates = self.sizes, self.rates
        if size <= sizes[0]:
            return rates[0]
        if size >= sizes[-1]:
            return rates[-1]
        right = bisect.bisect_right(sizes, size)
        low, high = sizes[right - 1], sizes[right]
        share = math.log(size / low) / math.log(high / low)
        return rates[right - 1] ** (1 - share) * rates[right] ** share


def _similar(work: Work) -> Iterator[Work]:
    """Yield a kind of work, and after it the work whose rates may stand in for it."""
    wanted: Work | None = work
    while wanted is not None:
        yield wanted
        wanted = _STAND_IN.get(wanted)


class RateTable:
    """Finds the curve of a kind of work.

    **Arguments:** `where` names the part of the machine in errors.
    """

    def __init__(self, curves: Iterable[RateCurve], where: str) -> None:
        self._curves = {(curve.work, curve.dtype, curve.layout): curve for curve in curves}
        self._where = where

    def curve(self, work: Work, dtype: str = "any", layout: Layout = "any") -> RateCurve:
        """Return the curve of some work: the one of its type and layout, else the one of all
        layouts, else the one of all types, else the one of its type in another layout, else that of
        similar work, else one of another type, of its layout if there is one.

        Raises:
            KeyError: the machine gives no rate for such work.
        """
        chain = list(_similar(work))
        suitable = dict.fromkeys((layout, "any"))
        layouts = dict.fromkeys((*suitable, *get_args(Layout)))
        own = [*itertools.product((dtype, "any"), suitable)]
        own += itertools.product((dtype, "any"), layouts)
        types = dict.fromkeys(key[1] for key in self._curves)
        others = [*itertools.product(types, layouts)]
        for keys in (own, others):
            for similar, key in itertools.product(chain, keys):
                found = self._curves.get((similar, *key))
                if found is not None:
                    return found
        raise KeyError(f"{self._where} gives no rate for {work} of {dtype}")

    def has(self, work: Work) -> bool:
        """Return whether the machine gives a rate for this very work."""
        return any(key[0] == work for key in self._curves)
