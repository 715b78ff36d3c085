"""Replicas of the store's shards: assignment, loss and rebuild."""

from penstock.distributed.replication.rebuild import copy_shard
from penstock.distributed.replication.replica_manager import ReplicaManager
from penstock.distributed.replication.state_transfer import SnapshotReceiver, SnapshotSender

__all__ = ["ReplicaManager", "SnapshotReceiver", "SnapshotSender", "copy_shard"]
