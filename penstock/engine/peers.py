"""The other devices of a group, as seen by the slots of one device."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Peers(Protocol):
    """The collective operations of a group; every device runs the same ones in the same order.

    On devices with queues, an operation is put into the current queue and the call returns at once.
    The return value of a call is meant for the caller's `Lanes.queue`.
    """

    rank: int
    size: int

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> Any:
        """Fill `whole`, uint8 [size * piece], with every device's `own` [piece], by rank; `own` is
        this device's part of `whole`."""
        ...

    def exchange(
        self,
        incoming: torch.Tensor,
        outgoing: torch.Tensor,
        incoming_sizes: Sequence[int],
        outgoing_sizes: Sequence[int],
    ) -> Any:
        """Send each device its part of `outgoing`, float32 [sum of sizes], and receive each
        device's part for this one into `incoming`, by rank."""
        ...
