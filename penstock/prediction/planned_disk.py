"""Whether the disk of a run is the one whose rates a plan uses, and holds its store."""

from __future__ import annotations

from penstock.calibration import device_of
from penstock.config import Config
from penstock.machines import FLASH_DEVICE, MachineDescription
from penstock.progress import show_bytes
from penstock.store import free_bytes


def other_disk_note(config: Config, machine: MachineDescription) -> str | None:
    """Return what to do if this host's measured disk is not that of the run's store; else None.

    It is also None if the run has no store on flash, or it is not known which disk was measured.
    """
    path, measured = config.store.flash.path, machine.sources.get(FLASH_DEVICE)
    if path is None or measured is None:
        return None
    folder = next(place for place in (path, *path.absolute().parents) if place.is_dir())
    found = device_of(folder)
    if found == measured:
        return None
    return (
        f"store.flash.path: {path} is on {found}, and the disk that was measured is {measured}, "
        f"whose rates this plan uses; measure the other with `penstock calibrate --flash-dir "
        f"{folder}`"
    )


def full_disk_note(config: Config, flash_bytes: int) -> str | None:
    """Return what to do if the disk of this host lacks room for a new store; else None.

    It is also None for a folder with files, perhaps the store's, whose bytes are not free any more,
    and for shards that may be on other hosts.

    **Arguments:** `flash_bytes` are those of all shards and replicas.
    """
    path = config.store.flash.path
    if path is None or config.cluster.shards == "apart":
        return None
    if path.is_dir() and any(path.iterdir()):
        return None
    free = free_bytes(path.absolute())
    if flash_bytes <= free:
        return None
    return (
        f"store.flash.path: the store needs {show_bytes(flash_bytes)}, and the disk of {path} has "
        f"{show_bytes(free)} free: the run does not fit there; free some space, or choose a folder "
        "on a larger disk"
    )
