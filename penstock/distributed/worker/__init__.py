"""The worker's side of a distributed run: one engine or one shard of the store."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.distributed.worker.main import NAME, TOKEN, Worker
    from penstock.distributed.worker.node_adapters import WorkerShard
    from penstock.distributed.worker.shard_executor import LocalShardExecutor

__all__ = ["NAME", "TOKEN", "LocalShardExecutor", "Worker", "WorkerShard"]

__getattr__ = lazily(
    __name__,
    {
        "LocalShardExecutor": "shard_executor",
        "NAME": "main",
        "TOKEN": "main",
        "Worker": "main",
        "WorkerShard": "node_adapters",
    },
)
