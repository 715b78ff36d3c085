"""The fabric of several devices in one process: each takes its part, and they exchange the parts.

The devices are ranks of a `torch.distributed` process group, each driven by a thread of its own:
NCCL for GPUs, which moves bytes from GPU to GPU; gloo for CPUs, over the loopback interface, to try
the same without GPUs. The host sends each byte once and gets each once, whatever their number.

One group does all of it, weights and sums: operations of two NCCL groups on the same devices may
wait for each other in a circle, and every device calls in the same order here anyhow.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from penstock.collectives.interface import CollectiveTraffic
from penstock.collectives.tree_reduce import PartialSum, root_level
from penstock.errors import GroupError

TIMEOUT = timedelta(minutes=10)
"""How long a device may wait for another: longer than any stage should compute."""

_LOOK_SECONDS = 1e-4

Backend = Literal["gloo", "nccl"]


class DeviceRendezvous:
    """Where the devices of one group find each other, by memory of this process.

    Args:
        backend: "nccl" between GPUs, "gloo" between parts of a CPU.
        size: devices.
        timeout: how long one may wait for another.
    """

    def __init__(self, backend: Backend, size: int, timeout: timedelta = TIMEOUT) -> None:
        self.backend, self.size, self.timeout = backend, size, timeout
        self.store = dist.HashStore()
        self.is_broken = threading.Event()
        self._groups: list[Any] = []

    def join(self, rank: int) -> GroupMember:
        """Join as one of the devices; returns when all have. Called by the device's own thread,
        whose current device is the one.

        Raises:
            GroupError: they cannot find each other.
        """
        try:
            group = self._nccl(rank) if self.backend == "nccl" else self._gloo(rank)
        except RuntimeError as error:
            raise GroupError(
                f"the devices of engine.devices do not find each other: {error}"
            ) from (error)
        self._groups.append(group)
        return GroupMember(self, group, rank)

    def abort(self) -> None:
        """Let no device wait for another any more; from any thread."""
        self.is_broken.set()
        if self.backend == "nccl":
            for group in self._groups:
                group.abort()

    def _nccl(self, rank: int) -> Any:
        if not dist.is_nccl_available():
            raise GroupError(
                "engine.devices: GPUs find each other through NCCL, which this PyTorch was built "
                "without; install one for CUDA on Linux, or set engine.device: cuda for one GPU"
            )
        # All of the group is on this host: nothing of it need listen to others.
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
    """One device of a group, as its own thread sees the others. Made by `DeviceRendezvous.join`."""

    def __init__(self, meeting: DeviceRendezvous, group: Any, rank: int) -> None:
        self.rank, self.size = rank, meeting.size
        self._meeting, self._group = meeting, group

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Fill `whole`, uint8 [size * piece], with everyone's `own` [piece], by rank; `own` is
        this device's place in `whole`."""
        self._finish(lambda: self._group._allgather_base(whole, own))

    def exchange(
        self,
        incoming: torch.Tensor,
        outgoing: torch.Tensor,
        incoming_sizes: Sequence[int],
        outgoing_sizes: Sequence[int],
    ) -> None:
        """Send each device its part of `outgoing`, float32 [sum of sizes], and put what each
        has for this one into `incoming`, by rank."""
        self._finish(
            lambda: self._group.alltoall_base(
                incoming, outgoing, list(incoming_sizes), list(outgoing_sizes)
            )
        )

    def leave(self) -> None:
        """Let go of the group; the others need not be there any more."""
        if self._meeting.backend == "nccl" and not self._meeting.is_broken.is_set():
            self._group.shutdown()
        self._group = None

    def _finish(self, begin: Any) -> None:
        """Begin an operation; return when it is done or, on a GPU, queued in the current stream.

        Raises:
            GroupError: it was aborted, or has failed.
        """
        if self._meeting.is_broken.is_set():
            raise GroupError("another device has left the group")
        try:
            work = begin()
            # Gloo knows no abort: who waits for it would wait until the time-out.
            while self._meeting.backend == "gloo" and not work.is_completed():
                if self._meeting.is_broken.is_set():
                    raise GroupError("another device has left the group")
                time.sleep(_LOOK_SECONDS)
            work.wait()
        except RuntimeError as error:
            raise GroupError(f"an operation of the devices together has failed: {error}") from error


class GroupFabric:
    """Passes references to the store's memory, of which each device of a group takes its part;
    counts the bytes that the host sends and gets."""

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self.traffic = CollectiveTraffic()

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        """Hand the same tensors to every engine; each byte leaves host memory once."""
        self.traffic.broadcast_bytes += sum(t.nbytes for t in tensors)
        return [tensors] * self._devices

    def reduce(
        self, parts: Sequence[Sequence[PartialSum]], leaves: int
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the sum that the devices have made, each of them its part of the same memory."""
        roots = [node for nodes in parts for node in nodes]
        places = {(node.level, node.index) for node in roots}
        whole = (root_level(leaves), 0)
        if len(roots) != self._devices or places != {whole}:
            raise ValueError(
                f"expected {whole} of each of {self._devices} devices, the sum over {leaves} "
                f"micro-batches, got {sorted(places)} of {len(roots)}"
            )
        self.traffic.reduced_bytes += sum(t.nbytes for t in roots[0].tensors if t is not None)
        return roots[0].tensors

    def close(self) -> None:
        """Nothing is held: the devices leave by themselves."""
