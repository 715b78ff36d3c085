"""The fabric: broadcast of weights, reduction of gradients; it knows nothing of models."""

from penstock.fabric.group import GroupFabric, GroupMember, Meeting
from penstock.fabric.interface import Fabric, Traffic
from penstock.fabric.local import LocalFabric

__all__ = ["Fabric", "GroupFabric", "GroupMember", "LocalFabric", "Meeting", "Traffic"]
