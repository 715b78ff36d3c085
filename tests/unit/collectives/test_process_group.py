"""Devices of one process exchange what they have: gloo between CPUs, NCCL between GPUs."""

import contextlib
import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from penstock.collectives import DeviceRendezvous, GroupFabric
from penstock.collectives.tree_reduce import PartialSum
from penstock.errors import GroupError

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
GROUPS = [("cpu", 1), ("cpu", 2), ("cpu", 3), ("cpu", 5)]
GROUPS += [("cuda", size) for size in (1, GPUS) if 0 < size <= GPUS]


def together(kind, size, act, timeout=timedelta(seconds=60)):
    """Have every device of a group act in a thread of its own; return what each returned."""
    meeting = DeviceRendezvous("nccl" if kind == "cuda" else "gloo", size, timeout)
    found = [None] * size

    def be(rank):
        device = torch.device(kind, rank if kind == "cuda" else None)
        if kind == "cuda":
            torch.cuda.set_device(device)
        try:
            member = meeting.join(rank)
            found[rank] = act(member, device, meeting)
            member.leave()
        except GroupError as error:
            found[rank] = error

    threads = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    return found


@pytest.mark.parametrize(("kind", "size"), GROUPS)
@pytest.mark.parametrize("piece", [1, 3, 512, 70_001])
def test_all_gather_returns_all_pieces(piece, kind, size):
    def act(member, device, _):
        whole = torch.full((size * piece,), 255, dtype=torch.uint8, device=device)
        own = whole[member.rank * piece : (member.rank + 1) * piece]
        own.fill_(member.rank + 1)
        member.all_gather(whole, own)
        return whole.cpu()

    wanted = torch.arange(1, size + 1, dtype=torch.uint8).repeat_interleave(piece)
    for whole in together(kind, size, act):
        assert torch.equal(whole, wanted)


@pytest.mark.parametrize(("kind", "size"), GROUPS)
@pytest.mark.parametrize("piece", [1, 129, 40_000])
def test_exchange_with_unequal_sizes(piece, kind, size):
    sizes = [(1 + rank % 3) * piece for rank in range(size)]  # what a device has for each other

    def act(member, device, _):
        outgoing = torch.cat(
            [
                torch.full((sizes[member.rank],), 100.0 * member.rank + to, device=device)
                for to in range(size)
            ]
        )
        incoming = torch.full((sum(sizes),), -1.0, device=device)
        member.exchange(incoming, outgoing, sizes, [sizes[member.rank]] * size)
        return incoming.cpu()

    for rank, incoming in enumerate(together(kind, size, act)):
        wanted = [torch.full((sizes[of],), 100.0 * of + rank) for of in range(size)]
        assert torch.equal(incoming, torch.cat(wanted))


def test_abort_ends_all_waits():
    def act(member, device, meeting):
        if member.rank == 1:
            time.sleep(0.2)
            meeting.abort()
            raise GroupError("this one does not come")
        whole = torch.zeros(8, dtype=torch.uint8)
        member.all_gather(whole, whole[:4])

    began = time.monotonic()
    # Gloo itself gives up after the time-out, and holds on to the memory until then.
    first, _ = together("cpu", 2, act, timeout=timedelta(seconds=3))
    assert isinstance(first, GroupError)
    assert str(first) == "another device has left the group"
    assert time.monotonic() - began < 30


def test_timeout_is_reported():
    has_failed = threading.Event()

    def act(member, device, meeting):
        if member.rank == 1:
            assert has_failed.wait(timeout=30)
            return
        whole = torch.zeros(8, dtype=torch.uint8)
        try:
            member.all_gather(whole, whole[:4])
        finally:
            has_failed.set()

    first, _ = together("cpu", 2, act, timeout=timedelta(seconds=2))
    assert isinstance(first, GroupError)
    assert "a collective operation of the devices failed" in str(first)


def listening():
    """Return the addresses on which this process listens, as the kernel writes them."""
    ours = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            ours.add(os.readlink(descriptor))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, place, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in ours:
                found.add(place)
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's tables")
def test_group_listens_on_loopback_only():
    before = listening()
    for opened in together("cpu", 2, lambda *_: listening() - before):
        assert opened
        assert all(place.startswith("0100007F:") for place in opened)  # 127.0.0.1


def test_fabric_requires_one_root_per_device_and_counts_bytes_once():
    fabric = GroupFabric(3)
    weights = [torch.zeros(5), torch.zeros(2, 2, dtype=torch.bfloat16)]
    assert fabric.broadcast(weights) == [weights] * 3
    assert fabric.traffic.broadcast_bytes == 28
    sums = (torch.ones(5), None, torch.ones(2))
    root = [PartialSum(3, 0, sums)]
    assert fabric.reduce([root, root, root], 6) is sums
    assert fabric.traffic.reduced_bytes == 28
    for wrong in ([root, root], [root, root, []], [[PartialSum(2, 0, sums)]] * 3):
        with pytest.raises(ValueError, match=r"expected \(3, 0\) of each of 3 devices"):
            fabric.reduce(wrong, 6)


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this PyTorch has NCCL")
def test_gpus_without_nccl_are_refused():
    with pytest.raises(GroupError) as caught:
        DeviceRendezvous("nccl", 1).join(0)
    assert str(caught.value) == (
        "engine.devices: expected a PyTorch with NCCL, which connects the GPUs; this PyTorch was "
        "built without NCCL; install PyTorch for CUDA on Linux, or set engine.device: cuda to use "
        "one GPU"
    )
