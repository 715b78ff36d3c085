"""The worker's side of a distributed run: one engine or one shard of the store."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.distributed.worker.main import NAME as NAME, TOKEN as TOKEN, Worker as Worker
    from penstock.distributed.worker.node_adapters import WorkerShard as WorkerShard
    from penstock.distributed.worker.shard_executor import LocalShardExecutor as LocalShardExecutor

__getattr__ = lazily(__name__, __file__)
