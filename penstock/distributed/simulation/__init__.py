"""A simulated network in one process and virtual time: deterministic, with injected faults."""

from penstock.distributed.simulation.faults import Faults as Faults
from penstock.distributed.simulation.network import Links as Links, Network as Network
