"""How the products of a run's sparse weights are computed: measured once, recorded with the run.

The way depends on shape, type, tokens and sparsity, and ways differ in the last bits. A run
measures every case that its masks can reach before its first step; a resumed run, an evaluation and
a text generation take the choices of the record.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import ConfigError
from penstock.program import Program
from penstock.sparsity import Choice, choose_product

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_MOST = 0.99  # the greatest sparsity that is measured

Measure = Callable[[tuple[int, int], torch.dtype, float, int], Choice]


@dataclass(frozen=True)
class ProductCase:
    """What a choice depends on.

    Attributes:
        shape: of the weight, as it is stored.
        dtype: float32 or bfloat16.
        tokens: of a call.
        sparsity: as `measured_sparsity` rounds it.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    tokens: int
    sparsity: float

    def __str__(self) -> str:
        return (
            f"{self.shape[0]} x {self.shape[1]} {_NAMES[self.dtype]}, {self.tokens} tokens, "
            f"sparsity {self.sparsity}"
        )


def measured_sparsity(sparsity: float) -> float:
    """Return the sparsity at which products are measured instead of this one: the nearest multiple
    of 0.05, or of 0.01 above 0.95, at most 0.99."""
    steps = 20 if sparsity <= 0.95 else 100
    return min(math.floor(sparsity * steps + 0.5) / steps, _MOST)


class SparseProducts:
    """The choices of a run's sparse products.

    Args:
        choices: what has been measured before.
        measure: returns the fastest choice on this machine.
    """

    def __init__(
        self,
        choices: Mapping[ProductCase, Choice] | None = None,
        measure: Measure = choose_product,
    ) -> None:
        self._choices = dict(choices or {})
        self._measure = measure
        self._lock = threading.Lock()

    def cases(
        self, program: Program, sparsities: Mapping[str, Iterable[float]]
    ) -> list[ProductCase]:
        """Return the cases of a program's sparse products.

        Args:
            sparsities: the sparsities that each weight can reach, by name.
        """
        found: dict[ProductCase, None] = {}
        for name, use in program.sparse_weights.items():
            spec = program.weights[name]
            for tokens in use.product_tokens:
                for sparsity in sparsities[name]:
                    rows, columns = spec.shape
                    case = ProductCase(
                        (rows, columns), spec.stream_dtype, tokens, measured_sparsity(sparsity)
                    )
                    found[case] = None
        return list(found)

    def add(self, choices: Mapping[ProductCase, Choice]) -> None:
        """Take choices of cases that have none yet."""
        with self._lock:
            self._choices = {**choices, **self._choices}

    def measure(
        self,
        cases: Iterable[ProductCase],
        on_case: Callable[[int, int], None] = lambda number, count: None,
    ) -> dict[ProductCase, Choice]:
        """Measure the cases that have no choice yet, and return their choices; each takes seconds.

        **Arguments:** `on_case` is called before each case, with its number from 1 on and the
        number of cases.
        """
        with self._lock:
            missing = [case for case in dict.fromkeys(cases) if case not in self._choices]
            for number, case in enumerate(missing, 1):
                on_case(number, len(missing))
                self._choices[case] = self._measure(
                    case.shape, case.dtype, case.sparsity, case.tokens
                )
            return {case: self._choices[case] for case in missing}

    def choice(
        self, shape: tuple[int, int], dtype: torch.dtype, tokens: int, sparsity: float
    ) -> Choice:
        """Return the choice for a product.

        Raises:
            ConfigError: it has not been measured.
        """
        case = ProductCase(shape, dtype, tokens, measured_sparsity(sparsity))
        found = self._choices.get(case)
        if found is None:
            raise ConfigError(
                f"sparse products: expected a recorded choice for {case}, got choices for "
                f"{len(self._choices)} other cases; measure every case of the program before its "
                "first step"
            )
        return found

    def as_record(self) -> list[dict[str, Any]]:
        """Return the choices as plain data, in one order."""
        ordered = sorted(self._choices, key=str)
        return [
            {
                "shape": list(case.shape),
                "dtype": _NAMES[case.dtype],
                "tokens": case.tokens,
                "sparsity": case.sparsity,
                "choice": self._choices[case].as_record(),
            }
            for case in ordered
        ]

    @classmethod
    def from_record(
        cls, record: Sequence[Mapping[str, Any]], measure: Measure = choose_product
    ) -> SparseProducts:
        """Return the choices that `as_record` returned as plain data.

        Raises:
            ConfigError: the record is not one of choices.
        """
        choices = {}
        for entry in record:
            try:
                rows, columns = entry["shape"]
                case = ProductCase(
                    (int(rows), int(columns)),
                    _TYPES[entry["dtype"]],
                    int(entry["tokens"]),
                    measured_sparsity(float(entry["sparsity"])),
                )
                choices[case] = Choice.from_record(entry["choice"])
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(
                    "sparse products: expected an entry of a record (shape, dtype, tokens, "
                    f"sparsity, choice), got {entry!r}: {error!r}; resume the run with the version "
                    "of Penstock that recorded it"
                ) from error
        return cls(choices, measure)
