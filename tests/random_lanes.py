"""Lanes that do what devices may do at worst: nothing that is queued happens until somebody waits
for it, and then the lanes take turns at random, as far as the marks allow. A copy reads its source
when it happens, not when it is queued. Several devices of one world may do things together, which
happen when the last of them has come to it.
"""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np
import torch

LANES = ("compute", "copy", "return")


class World:
    """The queues of all devices, of which a random one goes on, by a seed."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.queues = []

    def go_on(self):
        """Do one thing in a lane that need not wait."""
        free = [q for q in self.queues if q and (q[0][0] is None or q[0][0].passed)]
        assert free, "every lane waits for another"
        queue = free[self.random.integers(len(free))]
        _, action = queue.popleft()
        result = action()
        if isinstance(result, Place):  # the lane goes on behind it
            queue.appendleft((result, lambda: None))

    def go_on_a_little(self):
        for _ in range(int(self.random.integers(12))):
            if any(q and (q[0][0] is None or q[0][0].passed) for q in self.queues):
                self.go_on()


class Place:
    """A mark: `passed` once the lane has come to it."""

    def __init__(self, world):
        self._world, self.passed = world, False

    def synchronize(self):
        while not self.passed:
            self._world.go_on()


class RandomLanes:
    """The three queues of a device in a world of its own, or in one with others."""

    def __init__(self, seed=0, world=None):
        self.world = world or World(seed)
        self._queues = {lane: deque() for lane in LANES}
        self.world.queues += self._queues.values()

    def device_memory(self, size_bytes):
        return torch.full((size_bytes,), 255, dtype=torch.uint8)

    host_memory = device_memory

    def copy(self, lane, target, source):
        self.queue(lane, lambda: target.copy_(source))

    def queue(self, lane, action):
        self._queues[lane].append((None, action))

    def mark(self, lane):
        place = Place(self.world)
        self._queues[lane].append((None, lambda: setattr(place, "passed", True)))
        return place

    def wait(self, lane, mark):
        self._queues[lane].append((mark, lambda: None))

    def go_on_a_little(self):
        self.world.go_on_a_little()


class Crowd:
    """What the devices of a world do together."""

    def __init__(self, world, size):
        self._world, self.size = world, size
        self._waiting = defaultdict(dict)

    def peers(self):
        return [RandomPeers(self, rank) for rank in range(self.size)]

    def arrive(self, operation, rank, given, happen):
        """Let one device come to an operation; the last one makes it happen."""
        place = Place(self._world)
        here = self._waiting[operation]
        here[rank] = (given, place)
        if len(here) == self.size:
            happen([here[each][0] for each in range(self.size)])
            for _, other in here.values():
                other.passed = True
        return place


class RandomPeers:
    """The others as one device sees them."""

    def __init__(self, crowd, rank):
        self._crowd, self.rank, self.size = crowd, rank, crowd.size
        self._done = defaultdict(int)

    def all_gather(self, whole, own):
        def happen(given):
            pieces = torch.cat([piece.clone() for _, piece in given])
            for target, _ in given:
                target.copy_(pieces)

        return self._arrive("gather", (whole, own), happen)

    def exchange(self, incoming, outgoing, incoming_sizes, outgoing_sizes):
        assert incoming.numel() == sum(incoming_sizes)
        assert outgoing.numel() == sum(outgoing_sizes)

        def happen(given):
            for rank, (target, _, sizes, _) in enumerate(given):
                parts = [source.split(cut)[rank] for _, source, _, cut in given]
                assert [part.numel() for part in parts] == sizes
                target.copy_(torch.cat(parts))

        return self._arrive(
            "exchange", (incoming, outgoing, incoming_sizes, outgoing_sizes), happen
        )

    def _arrive(self, what, given, happen):
        self._done[what] += 1
        return self._crowd.arrive((what, self._done[what]), self.rank, given, happen)
