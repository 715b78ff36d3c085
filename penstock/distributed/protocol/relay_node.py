"""A relay: a node of its own between shards and engines (SwarmX on wafer-scale clusters).

A relay forwards weights and adds gradients. It computes nothing and keeps nothing of a step but the
sums in progress. It knows the transfers of a step, and no model.
"""

from dataclasses import dataclass, field

from penstock.distributed.protocol import message_validation
from penstock.distributed.protocol.forwarding_node import ForwardingNode, ForwardingStep
from penstock.distributed.protocol.membership_view import MembershipView
from penstock.distributed.protocol.messages import Message
from penstock.distributed.protocol.node_context import NodeContext
from penstock.distributed.protocol.transfer_schedule import TransferSchedule
from penstock.step_schedule import ByStep


@dataclass
class _RelayStep(ForwardingStep):
    """A relay's state of the step in flight."""

    forwarded: set[tuple[int, int]] = field(default_factory=set)  # operation and chunk


class RelayNode(ForwardingNode[_RelayStep]):
    """One relay of a run.

    Args:
        number: its node number.
        context: carries its messages.
        transfers: the operations of each step.
    """

    lane = "relay"

    def __init__(
        self, number: int, context: NodeContext, transfers: ByStep[TransferSchedule]
    ) -> None:
        super().__init__(number, context, lambda step: _RelayStep(step, transfers(step)))

    def _takes_part(self, view: MembershipView) -> bool:
        return self.number in view.relays

    def _begin(self, message: Message) -> None:
        self._learn_total(message)
        self._take_early_gradients()

    def _take_weights(self, message: Message) -> None:
        _, piece = message_validation.weights_of(self._step.transfers, message)
        key = message.op, message.chunk
        if key not in self._step.forwarded:
            self._forward(message, piece)
            self._step.forwarded.add(key)
