"""Broadcast of weights and reduction of gradients between engines; nothing here knows models."""

from penstock.collectives.interface import Fabric, Traffic
from penstock.collectives.local import LocalFabric
from penstock.collectives.process_group import GroupFabric, GroupMember, Meeting

__all__ = ["Fabric", "GroupFabric", "GroupMember", "LocalFabric", "Meeting", "Traffic"]
