"""A cluster that is not there: the nodes of a run in a simulated network, with machines as data."""

from simulated_cluster.layers import CHECK, FEW, MORE, difference, repeated
from simulated_cluster.machines import CS2, H200, SOCKET_BYTES_PER_SECOND, Load, Machine
from simulated_cluster.memory import fit
from simulated_cluster.steps import Measured, measure, transfers_of
from simulated_cluster.works import Engine, Order, Shard

__all__ = [
    "CHECK",
    "CS2",
    "FEW",
    "H200",
    "MORE",
    "SOCKET_BYTES_PER_SECOND",
    "Engine",
    "Load",
    "Machine",
    "Measured",
    "Order",
    "Shard",
    "difference",
    "fit",
    "measure",
    "repeated",
    "transfers_of",
]
