"""What every process of a run is told of it, and must agree on: model, cut, memory, threads."""

from __future__ import annotations

from typing import Any

from penstock.assembly import bfloat16_of, thread_count
from penstock.config import Config
from penstock.models import KEPT
from penstock.step_layout import Layout


def terms_of(config: Config, layout: Layout) -> dict[str, Any]:
    """Return it as plain data; `worker.py` makes an engine or a shard of it."""
    return {
        "config": config.to_mapping(),
        "micro_batch": layout.micro_batch,
        "length": layout.sequence_length,
        "slot_bytes": layout.slot_bytes,
        "bfloat16": sorted(bfloat16_of(layout.program)),
        "device": layout.device,  # chosen once: hosts that differ would round differently
        "recompute": sorted(layout.plan.recompute),
        "shards": config.store.shards,
        "engine_bytes": layout.budget_bytes,
        "engine_peak": layout.shares.engine_peak,
        "engine_host": layout.shares.engine_host,
        "store_bytes": layout.shares.store,
        "kept": _kept_files(config),
        # The same for all: PyTorch cuts sums over rows by the number of its threads.
        "threads": thread_count(config.engine.threads),
    }


_TYPES: dict[str, tuple[type, ...]] = {
    "config": (dict,),
    "micro_batch": (int,),
    "length": (int,),
    "slot_bytes": (int, type(None)),
    "bfloat16": (list,),
    "device": (str,),
    "recompute": (list,),
    "shards": (int,),
    "engine_bytes": (int,),
    "engine_peak": (int,),
    "engine_host": (int,),
    "store_bytes": (int,),
    "kept": (str, type(None)),
    "threads": (int,),
}


def are_terms(told: object) -> bool:
    """Tell whether plain data that came from elsewhere is what `terms_of` makes."""
    return isinstance(told, dict) and all(
        isinstance(told.get(key, ...), types) for key, types in _TYPES.items()
    )


def _kept_files(config: Config) -> str | None:
    """Return where the run keeps what it needs of `model.hf`, which may be gone."""
    kept = (config.run.dir / KEPT).absolute()
    return str(kept) if kept.is_dir() else None
