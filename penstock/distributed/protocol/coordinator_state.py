"""What the trainer's process asks of a coordinator and sets: the nodes, and how many are wanted."""

from collections.abc import Sequence

from penstock.distributed.protocol.epoch import EpochManager
from penstock.distributed.protocol.membership import Membership


class CoordinatorState:
    """The nodes of a run and its epoch.

    Args:
        membership: the nodes.
        epochs: the epoch.
    """

    def __init__(self, membership: Membership, epochs: EpochManager) -> None:
        self.membership, self._epochs = membership, epochs

    @property
    def ready(self) -> Sequence[int]:
        """The engines that may take part, including spare engines."""
        return self.membership.engines

    @property
    def engines(self) -> tuple[int, ...]:
        """The engines of the current view."""
        return self._epochs.view.engines

    @property
    def shard_nodes(self) -> tuple[int, ...]:
        """The replicas of the current view."""
        return self._epochs.view.shard_nodes

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._epochs.epoch

    @property
    def wanted(self) -> int:
        """How many engines are to take part, from the next step on."""
        return self.membership.wanted

    @wanted.setter
    def wanted(self, engines: int) -> None:
        self.membership.wanted = engines

    @property
    def wanted_relays(self) -> int:
        """How many relays are to take part, from the next step on."""
        return self.membership.wanted_relays

    @wanted_relays.setter
    def wanted_relays(self, relays: int) -> None:
        self.membership.wanted_relays = relays

    @property
    def holders(self) -> Sequence[Sequence[int]]:
        """The replicas of every shard, the streaming replica first."""
        return self.membership.holders.shards

    @property
    def learners(self) -> Sequence[int]:
        """The nodes that wait for a copy of a shard."""
        return tuple(self.membership.holders.learners)

    @property
    def is_agreed(self) -> bool:
        """Whether all replicas of all shards are known to be at one step."""
        return self._epochs.is_agreed
