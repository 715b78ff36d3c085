"""The resume state: the trainer's record beside weights and optimizer state.

A checkpoint or a journal holds the record. Checksums prove that its bytes are unchanged, not who
wrote them. So the type of each value is checked before use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.compiler import Products
from penstock.errors import CorruptionError


@dataclass(frozen=True)
class ResumeState:
    """The trainer's record with every durable step.

    `trajectory` is the part of the configuration that decides the result. `micro_batch` decides the
    order of sums. `slot_bytes` decides the cut into stages, and so the layout of files on flash.
    `products` is the library of matrix products (`compiler/product_libraries.py`). `data`,
    `weights` (of a folder) and `values` (of a module) are fingerprints of the run's initial inputs,
    None if absent. `architecture` describes the computation of a model of the user's own code
    (`same_run.Architecture`). `sparse_entries` are the numbers of entries that the sparse weights
    had at the start, `sparse_products` the algorithms of their products (`engine.SparseProducts`);
    None for a run without sparse weights. `best_step` is the step of `best_loss`, and
    `best_batches` the `evaluation.batches` that it was measured on. `evaluated_step` is the newest
    step that was evaluated, 0 if none was; older releases recorded None. `tokenizer` is the digest
    of the rules by which the data set's text became ids (`same_tokenizer.py`). `buffer_seed` is the
    seed of random buffers; older releases recorded none and drew from seed 0. `run_dir` and
    `flash_dir` are the folders of the run and of its store on flash, which may lie anywhere.
    `numerics` is what decides the last bits of a step (`numerics.py`); older releases recorded
    none.
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
    sparse_entries: Mapping[str, int] | None = None
    sparse_products: Sequence[Mapping[str, Any]] | None = None
    best_step: int | None = None
    best_batches: int | None = None
    evaluated_step: int | None = None
    tokenizer: str | None = None
    buffer_seed: int = 0
    run_dir: str | None = None
    flash_dir: str | None = None
    numerics: Mapping[str, str] | None = None

    @classmethod
    def read(cls, found: Mapping[str, Any], place: Path) -> ResumeState:
        """Return the record from `place`; keys that older releases did not write may be missing.

        Raises:
            CorruptionError: a value has another type.
        """
        whole: dict[str, Any] = dict.fromkeys(
            (field.name for field in dataclasses.fields(cls)), None
        ) | {
            "evaluations_since_best": 0,
            "buffer_seed": 0,
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
                "products": None | "torch" | "onednn" | "torch+float32" | "onednn+float32",
                "architecture": None
                | {"class_name": str(), "graph": str(), "captured_with": str()},
                "best_loss": None | float() | int(),
                "best_step": best_step,
                "best_batches": best_batches,
                "evaluated_step": evaluated_step,
                "evaluations_since_best": int(evaluations),
                "sparse_entries": None | dict() as entries,
                "sparse_products": None | [*_],
                "tokenizer": None | str(),
                "buffer_seed": int(buffer_seed),
                "run_dir": None | str(),
                "flash_dir": None | str(),
                "numerics": None | dict() as numerics,
            } if (
                _is_count(micro_batch)
                and _is_count(slot_bytes)
                and _is_count(best_step)
                and _is_count(best_batches)
                and _is_count(evaluated_step, least=0)
                and 0 <= evaluations < 2**63
                and type(buffer_seed) is int
                and all(
                    count is not None and _is_count(count) for count in (entries or {}).values()
                )
                and all(type(text) is str for text in (numerics or {}).values())
            ):
                known = {field.name: whole[field.name] for field in dataclasses.fields(cls)}
                return cls(**known)
        raise CorruptionError(
            f"{place}: expected the resume state of a step, got {str(dict(found))[:100]}; restore "
            "the file from a copy"
        )

    def to_mapping(self) -> dict[str, Any]:
        """Return the record in a form that JSON can represent."""
        return dataclasses.asdict(self)


def _is_count(value: object, least: int = 1) -> bool:
    return value is None or (type(value) is int and least <= value < 2**63)
