"""Replicas of the store's shards: assignment, loss and rebuild."""

from penstock.distributed.replication.rebuild import copy_shard as copy_shard
from penstock.distributed.replication.replica_manager import ReplicaManager as ReplicaManager
from penstock.distributed.replication.state_transfer import (
    SnapshotReceiver as SnapshotReceiver,
    SnapshotSender as SnapshotSender,
)
