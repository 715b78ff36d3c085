"""A simulated network in one process and virtual time: deterministic, with injected faults."""

from penstock.distributed.simulation.faults import Faults
from penstock.distributed.simulation.network import Links, Network

__all__ = ["Faults", "Links", "Network"]
