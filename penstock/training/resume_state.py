"""What a run must find again beside weights and state, as a checkpoint or a journal keeps it.

Checksums say that these bytes are those that were written, not who wrote them: each value is held
to its type before anything is done with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.compiler import Products
from penstock.errors import CorruptionError


@dataclass(frozen=True)
class ResumeState:
    """What the trainer keeps with every step that survives.

    `trajectory` is the part of the configuration that decides the result; `micro_batch`
    decides in which order sums are taken, `slot_bytes` how stages are cut, by which files on flash
    are laid out, `products` who multiplies (`compiler/products.py`). `data`, `weights` (of a
    folder) and `values` (of a module) are fingerprints of what the run began with, None where there
    is none; `architecture` is what a model of the user's own code computes
    (`same_run.Architecture`).
    """

    trajectory: Mapping[str, Any]
    micro_batch: int | None
    slot_bytes: int | None
    data: str | None
    weights: str | None
    best_loss: float | None
    evaluations_since_best: int
    values: str | None = None
    architecture: Mapping[str, str] | None = None
    products: Products | None = None

    @classmethod
    def read(cls, found: Mapping[str, Any], place: Path) -> ResumeState:
        """Return what was kept at `place`; keys that older releases did not keep may be missing.

        Raises:
            CorruptionError: a value is of another type.
        """
        whole: dict[str, Any] = dict.fromkeys(
            (field.name for field in dataclasses.fields(cls)), None
        ) | {
            "evaluations_since_best": 0,
            **found,
        }
        match whole:
            case {
                "trajectory": dict(),
                "micro_batch": micro_batch,
                "slot_bytes": slot_bytes,
                "data": None | str(),
                "weights": None | str(),
                "values": None | str(),
                "products": None | "torch" | "onednn",
                "architecture": None
                | {"class_name": str(), "graph": str(), "captured_with": str()},
                "best_loss": None | float() | int(),
                "evaluations_since_best": int(evaluations),
            } if _is_count(micro_batch) and _is_count(slot_bytes) and 0 <= evaluations < 2**63:
                known = {field.name: whole[field.name] for field in dataclasses.fields(cls)}
                return cls(**known)
        raise CorruptionError(
            f"{place}: what a run keeps with a step was expected, it holds {str(dict(found))[:100]}"
            "; restore it from a copy"
        )

    def to_mapping(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return dataclasses.asdict(self)


def _is_count(value: object) -> bool:
    return value is None or (type(value) is int and 0 < value < 2**63)
