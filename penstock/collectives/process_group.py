"""The fabric of several devices in one process: each loads a part, and they exchange the parts.

The devices are ranks of a `torch.distributed` process group, and each has a thread of its own. GPUs
use NCCL, which moves bytes from GPU to GPU. CPUs use gloo over the loopback interface, to test the
same code without GPUs. The host sends and receives each byte once, whatever the number of devices.

One group carries both weights and sums: operations of two NCCL groups on the same devices may
deadlock. Every device calls the operations of the group in the same order.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from penstock.collectives.interface import CollectiveTraffic
from penstock.collectives.tree_reduce import PartialSum, root_level
from penstock.errors import GroupError

if TYPE_CHECKING:
    from penstock.sparsity import StreamedWeight

TIMEOUT = timedelta(minutes=10)
"""The longest wait of a device for another device; no stage should compute for longer."""

_POLL_SECONDS = 1e-4

Backend = Literal["gloo", "nccl"]


class DeviceRendezvous:
    """The rendezvous of one group's devices, in the memory of this process.

    Args:
        backend: "nccl" between GPUs, "gloo" between parts of a CPU.
        size: the number of devices.
        timeout: the longest wait of a device for another device.
    """

    def __init__(self, backend: Backend, size: int, timeout: timedelta = TIMEOUT) -> None:
        self.backend, self.size, self.timeout = backend, size, timeout
        self.store = dist.HashStore()
        self.is_broken = threading.Event()
        self._groups: list[Any] = []

    def join(self, rank: int) -> GroupMember:
        """Join the group as one device; returns when all devices have joined.

        The device's own thread calls this, with the device as its current device.

        Raises:
            GroupError: the devices cannot connect to each other.
        """
        try:
            group = self._nccl(rank) if self.backend == "nccl" else self._gloo(rank)
        except RuntimeError as error:
            raise GroupError(
                f"the devices of engine.devices cannot connect to each other: {error}"
            ) from (error)
        self._groups.append(group)
        return GroupMember(self, group, rank)

    def abort(self) -> None:
        """Abort all waits of the devices; from any thread."""
        self.is_broken.set()
        if self.backend == "nccl":
            for group in self._groups:
                group.abort()

    def _nccl(self, rank: int) -> Any:
        if not dist.is_nccl_available():
            raise GroupError(
                "engine.devices: expected a PyTorch with NCCL, which connects the GPUs; this "
                "PyTorch was built without NCCL; install PyTorch for CUDA on Linux, or set "
                "engine.device: cuda to use one GPU"
            )
        # The whole group is on this host, so NCCL need not listen to other hosts.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        return dist.ProcessGroupNCCL(self.store, rank, self.size, options)

    def _gloo(self, rank: int) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = self.timeout
        options._threads = 1
        return gloo(self.store, rank, self.size, options)


class GroupMember:
    """One device of a group, for use in its own thread. Made by `DeviceRendezvous.join`."""

    def __init__(self, rendezvous: DeviceRendezvous, group: Any, rank: int) -> None:
        self.rank, self.size = rank, rendezvous.size
        self._rendezvous, self._group = rendezvous, group

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Fill `whole`, uint8 [size * piece], with every device's `own` [piece], by rank.

        `own` is this device's part of `whole`.
        """
        self._finish(lambda: self._group._allgather_base(whole, own))

    def exchange(
        self,
        incoming: torch.Tensor,
        outgoing: torch.Tensor,
        incoming_sizes: Sequence[int],
        outgoing_sizes: Sequence[int],
    ) -> None:
        """Send each device its part of `outgoing`, float32 [sum of sizes].

        The parts for this device are written to `incoming`, by rank.
        """
        self._finish(
            lambda: self._group.alltoall_base(
                incoming, outgoing, list(incoming_sizes), list(outgoing_sizes)
            )
        )

    def leave(self) -> None:
        """Leave the group; the other devices may have left already."""
        if self._rendezvous.backend == "nccl" and not self._rendezvous.is_broken.is_set():
            self._group.shutdown()
        self._group = None

    def _finish(self, begin: Any) -> None:
        """Begin an operation; return when it is done or, on a GPU, queued in the current stream.

        Raises:
            GroupError: the operation was aborted, or has failed.
        """
        if self._rendezvous.is_broken.is_set():
            raise GroupError("another device has left the group")
        try:
            work = begin()
            # Gloo has no abort: a plain wait would last until the timeout.
            while self._rendezvous.backend == "gloo" and not work.is_completed():
                if self._rendezvous.is_broken.is_set():
                    raise GroupError("another device has left the group")
                time.sleep(_POLL_SECONDS)
            work.wait()
        except RuntimeError as error:
            raise GroupError(f"a collective operation of the devices failed: {error}") from error


class GroupFabric:
    """Passes references to the store's memory, of which each device of a group loads its part.

    Counts the bytes that the host sends and receives.
    """

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self.traffic = CollectiveTraffic()

    def broadcast(self, weights: Sequence[StreamedWeight]) -> list[Sequence[StreamedWeight]]:
        """Pass the same weights to every engine; each byte leaves host memory once."""
        self.traffic.broadcast_bytes += sum(weight.nbytes for weight in weights)
        return [weights] * self._devices

    def reduce(
        self, parts: Sequence[Sequence[PartialSum]], leaves: int
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the sum, of which each device has written its part to the same memory."""
        roots = [node for nodes in parts for node in nodes]
        positions = {(node.level, node.index) for node in roots}
        whole = (root_level(leaves), 0)
        if len(roots) != self._devices or positions != {whole}:
            raise ValueError(
                f"expected {whole} of each of {self._devices} devices, the sum over {leaves} "
                f"micro-batches, got {sorted(positions)} of {len(roots)}"
            )
        self.traffic.reduced_bytes += sum(t.nbytes for t in roots[0].tensors if t is not None)
        return roots[0].tensors

    def close(self) -> None:
        """Do nothing: the devices leave the group themselves."""
