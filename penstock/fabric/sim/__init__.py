"""The fabric in one process and virtual time: deterministic, and as faulty as it is told to be."""

from penstock.fabric.sim.faults import Faults
from penstock.fabric.sim.network import Links, Network

__all__ = ["Faults", "Links", "Network"]
