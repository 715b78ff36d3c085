"""Who is who among the processes of a run: those who are about to join, and those who have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.distributed.control_messages import Opens
from penstock.distributed.replication.replica_assignment import Place
from penstock.distributed.transport import Address, Link


@dataclass(frozen=True)
class Guest:
    """A process that has joined: its node, and what it is known by."""

    number: int
    link: Link
    worker: str
    listens: Address
    place: Place | None  # of a shard; None for an engine
    opens: Opens  # what it does with its store, as a shard

    @property
    def is_shard(self) -> bool:
        """Whether it holds a shard, or is to."""
        return self.place is not None

    @property
    def waits_for_copy(self) -> bool:
        """Whether it holds a shard only once it has been given a copy."""
        return self.opens == "empty"

    def __str__(self) -> str:
        if self.place is None:
            return f"engine {self.number}"
        which = f"replica {self.place.replica} of " if self.place.replica else ""
        return f"{which}shard {self.place.shard}"


class Guests:
    """Changed in the endpoint's thread only."""

    def __init__(self) -> None:
        self.joining: dict[Link, Guest] = {}  # they have a place, and are not ready yet
        self.addresses: dict[int, Address] = {}  # where those who are here listen, by node
        self._here: dict[int, Guest] = {}

    @property
    def here(self) -> Sequence[Guest]:
        """Those who have joined."""
        return list(self._here.values())

    @property
    def all(self) -> Sequence[Guest]:
        """Those who have joined, and those who are about to."""
        return [*self.here, *self.joining.values()]

    @property
    def carried_bytes(self) -> int:
        """What this process has sent to all others and taken from them, frames' heads apart."""
        return sum(guest.link.sent_bytes + guest.link.taken_bytes for guest in self.here)

    def admit(self, guest: Guest) -> None:
        """Let one who is ready be here."""
        self._here[guest.number] = guest
        self.addresses[guest.number] = guest.listens

    def find(self, node: int) -> Guest | None:
        """Return who a node is; None if it is not here."""
        return self._here.get(node)

    def at(self, link: Link) -> Guest | None:
        """Return who is here at the other end of a link."""
        guest = None if link.peer is None else self.find(link.peer)
        return guest if guest is not None and guest.link is link else None

    def lose(self, node: int) -> Guest | None:
        """Let a node be here no more; return who it was."""
        self.addresses.pop(node, None)
        return self._here.pop(node, None)
