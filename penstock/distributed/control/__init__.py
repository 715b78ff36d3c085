"""The trainer's side of a distributed run: members, workers, statistics."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.distributed.control.admin_client import scale
    from penstock.distributed.control.cluster_manager import ClusterManager, open_cluster
    from penstock.distributed.control.worker_stats import ComputeTimer, StragglerDetector

__all__ = ["ClusterManager", "ComputeTimer", "StragglerDetector", "open_cluster", "scale"]

__getattr__ = lazily(
    __name__,
    {
        "ClusterManager": "cluster_manager",
        "ComputeTimer": "worker_stats",
        "StragglerDetector": "worker_stats",
        "open_cluster": "cluster_manager",
        "scale": "admin_client",
    },
)
