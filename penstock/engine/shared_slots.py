"""The path of weights and gradients for several devices that share one host's link to the store.

Weights: each device copies its piece of a stage from the host, then the devices gather the pieces
from each other. Every byte leaves host memory once, whatever the number of devices. Gradients: each
device receives all devices' sums of its piece and adds them in the tree over the micro-batches, so
that the result is bit-identical to that of one device. The sums of a library collective
(reduce-scatter) have an order of their own. Each device then writes its piece into one host buffer
that all devices share.

`sharing.py` defines which device has which piece.
"""

import contextlib
from collections.abc import Sequence

import torch

from penstock.collectives import PartialSum, TreeReduction
from penstock.engine.expanded_weights import DeviceMasks
from penstock.engine.interface import PendingGradients
from penstock.engine.lanes import Lanes
from penstock.engine.peers import Peers
from penstock.engine.sharing import FlatSums, Sharing, aligned, sends
from penstock.engine.slots import Arrived, SlotsInTurn
from penstock.engine.sparse_weights import gradient_shape
from penstock.program import Program
from penstock.sparsity import SparseWeight, StreamedWeight


class SharedSlots(SlotsInTurn):
    """The slots of one device of a group.

    Args:
        program: the program whose stages are loaded.
        count: number of slots.
        lanes: the queues of the device.
        sharing: the division into pieces.
        peers: the other devices.
        returns: host buffers, uint8 [`sharing.return_bytes`] each, the same for all devices; as
            many as stages may be returning at once.
        masks: of sparse weights, if the device expands them.
    """

    def __init__(
        self,
        program: Program,
        count: int,
        lanes: Lanes,
        sharing: Sharing,
        peers: Peers,
        returns: Sequence[torch.Tensor],
        masks: DeviceMasks | None = None,
    ) -> None:
        super().__init__(sharing.slot_bytes(program), count, lanes, masks)
        self._stages, self._sharing, self._peers = program.stages, sharing, peers
        self._outgoing = lanes.device_memory(sharing.outgoing_bytes(program)).view(torch.float32)
        self._incoming = lanes.device_memory(sharing.incoming_bytes(program)).view(torch.float32)
        self.resident = [*self._slots, self._outgoing, self._incoming]
        self._sent = lanes.mark("return")  # reached when the content of `_outgoing` has been sent
        self._returns = [memory.view(torch.float32) for memory in returns]
        self._arrived: list[Arrived | None] = [None] * len(returns)
        self._next_return = 0
        self._gradient_shapes: dict[str, tuple[int, ...]] = {}  # of sparse weights, at present

    def load(self, stage: int, weights: Sequence[StreamedWeight]) -> None:
        """Start copying a stage's weights into the next slot.

        The weights must stay valid until the next load has returned.
        """
        # All devices get the same weights, so all know the sizes of what they exchange.
        for weight in weights:
            if isinstance(weight, SparseWeight):
                self._gradient_shapes[weight.name] = gradient_shape(weight)
        super().load(stage, weights)

    def _fill(
        self, slot: torch.Tensor, tensors: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> None:
        """Copy this device's piece of a slot, and gather the other pieces."""
        piece = self._sharing.piece_bytes(sum(aligned(weight.nbytes) for weight in weights))
        first = self._peers.rank * piece
        last, offset = first + piece, 0
        for weight in weights:
            begin, end = max(first, offset), min(last, offset + weight.nbytes)
            if begin < end:
                source = weight.view(-1).view(torch.uint8)[begin - offset : end - offset]
                self._lanes.copy("copy", slot[begin:end], source)
            offset += aligned(weight.nbytes)
        if piece == 0:
            return  # a backward that reads no weights
        whole = slot[: self._peers.size * piece]
        self._lanes.queue("copy", lambda: self._peers.all_gather(whole, whole[first:last]))

    def send_back(self, stage: int, nodes: list[PartialSum]) -> PendingGradients:
        """Exchange the sums of this device's piece, add them, and copy them to the host, without
        waiting. The pieces of all devices together are the sum."""
        if not nodes:
            return Arrived([])
        flat = self._sharing.flat_sums(self._stages[stage], self._gradient_shapes)
        self._pack(flat, nodes)
        return self._exchange(flat, [t is not None for t in nodes[0].tensors])

    def skip_stage(self, stage: int, returns_gradients: bool) -> None:
        """Run a stage's collective operations for a device that has failed.

        The other devices would otherwise wait. The data that this device sends is meaningless, and
        results computed from it must not be used.
        """
        with contextlib.suppress(KeyError):  # it has failed to load
            self._loaded.take(stage)
        if returns_gradients and sends(self._stages[stage]):
            flat = self._sharing.flat_sums(self._stages[stage], self._gradient_shapes)
            self._exchange(flat, [False] * len(flat.shapes))

    def _pack(self, flat: FlatSums, nodes: Sequence[PartialSum]) -> None:
        """Queue the copy of the sums into the outgoing row: by device, by node, one piece each."""
        held = self._sharing.held[self._peers.rank]
        if [(node.level, node.index) for node in nodes] != list(held):
            raise RuntimeError(f"expected the sums {held}, got those of other micro-batches")
        size = self._sharing.devices * len(held) * flat.piece
        parts = self._outgoing[:size].view(self._sharing.devices, len(held), flat.piece)
        self._lanes.wait("compute", self._sent)
        for number, node in enumerate(nodes):
            for place, tensor in enumerate(node.tensors):
                if tensor is None:
                    continue  # a placeholder without meaning: no device has this sum
                for device, begin, first, last in flat.cuts(place):
                    target = parts[device, number, begin : begin + last - first]
                    self._lanes.copy("compute", target, tensor.view(-1)[first:last])

    def _exchange(self, flat: FlatSums, is_there: Sequence[bool]) -> PendingGradients:
        lanes, sharing, rank = self._lanes, self._sharing, self._peers.rank
        incoming_sizes = [len(held) * flat.piece for held in sharing.held]
        outgoing_sizes = [len(sharing.held[rank]) * flat.piece] * sharing.devices
        incoming = self._incoming[: sum(incoming_sizes)]
        outgoing = self._outgoing[: sum(outgoing_sizes)]
        host = self._take_return()[: sharing.devices * flat.piece]
        lanes.wait("return", lanes.mark("compute"))
        lanes.queue(
            "return",
            lambda: self._peers.exchange(incoming, outgoing, incoming_sizes, outgoing_sizes),
        )
        self._sent = lanes.mark("return")
        own = host[rank * flat.piece : (rank + 1) * flat.piece]

        def add_up() -> None:
            own.copy_(self._sum(incoming, flat.piece), non_blocking=True)

        lanes.queue("return", add_up)
        views = flat.views(host)
        level, index = sharing.root
        tensors = [view if there else None for view, there in zip(views, is_there, strict=True)]
        arrived = Arrived([PartialSum(level, index, tuple(tensors))], lanes.mark("return"))
        self._arrived[self._next_return] = arrived
        self._next_return = (self._next_return + 1) % len(self._returns)
        return arrived

    def _sum(self, incoming: torch.Tensor, piece: int) -> torch.Tensor:
        """Return the sum of a piece over all micro-batches; it overwrites the received data."""
        total = TreeReduction(self._sharing.micro_batches)
        places = [place for held in self._sharing.held for place in held]
        for number, (level, index) in enumerate(places):
            part = incoming[number * piece : (number + 1) * piece]
            total.add(PartialSum(level, index, (part,)))
        (root,) = total.root()
        assert root is not None
        return root

    def _take_return(self) -> torch.Tensor:
        """Return the next host buffer; an earlier result in it is lost unless it has been waited
        for."""
        before = self._arrived[self._next_return]
        if before is not None:
            before.overwrite()
        return self._returns[self._next_return]
