"""Broadcast of weights and reduction of gradients between engines, independent of models."""

from penstock.collectives.interface import Fabric as Fabric
from penstock.collectives.local import LocalFabric as LocalFabric
from penstock.collectives.process_group import (
    DeviceRendezvous as DeviceRendezvous,
    GroupFabric as GroupFabric,
)
from penstock.collectives.tree_reduce import (
    PartialSum as PartialSum,
    TreeReduction as TreeReduction,
    partial_sums as partial_sums,
    partition as partition,
    root_level as root_level,
)
