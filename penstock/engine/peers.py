"""The other devices of a group, as the slots of one of them see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Peers(Protocol):
    """What a group does together; every device does the same things in the same order.

    Where devices have queues, an operation is put into the one that is current and the call
    returns at once. What a call returns is for the caller's `Lanes.queue`.
    """

    rank: int
    size: int

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> Any:
        """Fill `whole`, uint8 [size * piece], with everyone's `own` [piece], by rank; `own` is
        this device's place in `whole`."""
        ...

    def exchange(
        self,
        incoming: torch.Tensor,
        outgoing: torch.Tensor,
        incoming_sizes: Sequence[int],
        outgoing_sizes: Sequence[int],
    ) -> Any:
        """Send each device its part of `outgoing`, float32 [sum of sizes], and put what each
        has for this one into `incoming`, by rank."""
        ...
