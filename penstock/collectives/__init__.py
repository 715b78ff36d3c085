"""Broadcast of weights and reduction of gradients between engines, independent of models."""

from penstock.collectives.interface import CollectiveTraffic, Fabric
from penstock.collectives.local import LocalFabric
from penstock.collectives.process_group import DeviceRendezvous, GroupFabric, GroupMember
from penstock.collectives.tree_reduce import (
    PartialSum,
    TreeReduction,
    partial_sums,
    partition,
    root_level,
)

__all__ = [
    "CollectiveTraffic",
    "DeviceRendezvous",
    "Fabric",
    "GroupFabric",
    "GroupMember",
    "LocalFabric",
    "PartialSum",
    "TreeReduction",
    "partial_sums",
    "partition",
    "root_level",
]
