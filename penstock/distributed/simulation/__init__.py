"""The fabric in one process and virtual time: deterministic, and as faulty as it is told to be."""

from penstock.distributed.simulation.faults import Faults
from penstock.distributed.simulation.network import Links, Network

__all__ = ["Faults", "Links", "Network"]
