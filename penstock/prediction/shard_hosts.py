"""The memory of hosts that hold nothing but a shard of the store."""

from __future__ import annotations

from penstock.errors import BudgetError
from penstock.planning import RESERVE_BYTES
from penstock.prediction.predicted_run import Prediction
from penstock.progress import show_bytes


def require_room_for_shards(prediction: Prediction) -> None:
    """Refuse shards that do not fit a host of the machine, which then holds one of them alone.

    What is left of a host's memory is all but the reserve; the libraries of a shard's process,
    some hundred MiB, are not counted.

    **Raises:** `BudgetError` naming the fewest shards that fit.
    """
    share, memory = prediction.shard_bytes, prediction.machine.store.memory
    if share is None:
        return
    left = int(memory) - RESERVE_BYTES
    if share <= left:
        return
    remedies = []
    if left > 0:
        fewest = -(-prediction.plan.shares.store // left)
        remedies.append(f"set store.shards to {fewest} or more")
    if prediction.config.store.flash.path is None:
        remedies.append("keep the store on flash (store.flash.path)")
    elif prediction.config.store.dram != "auto":
        remedies.append("lower store.dram")
    remedies = remedies or ["choose hosts with more memory"]
    raise BudgetError(
        f"store.shards: each of {prediction.config.store.shards} shards needs {show_bytes(share)} "
        f"on a host of its own, and a host of {prediction.machine.name} has "
        f"{show_bytes(int(memory))}; {', or '.join(remedies)}"
    )
