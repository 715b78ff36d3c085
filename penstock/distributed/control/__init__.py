"""The trainer's side of a distributed run: members, workers, statistics."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.distributed.control.admin_client import scale as scale
    from penstock.distributed.control.cluster_manager import (
        ClusterManager as ClusterManager,
        open_cluster as open_cluster,
    )
    from penstock.distributed.control.worker_stats import (
        ComputeTimer as ComputeTimer,
        StragglerDetector as StragglerDetector,
        StragglerReports as StragglerReports,
    )

__getattr__ = lazily(__name__, __file__)
