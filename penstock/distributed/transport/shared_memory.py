"""Shared memory between the two ends of a connection within one host.

The memory belongs to the sending end. It is a file without a name (`memfd_create`): no folder lists
it, no mount limits its size, and it ends with the last process that has it, even after a crash. The
other end opens it under /proc by the offer's name, which cannot be guessed. A process on another
host, in another container or of another user cannot open it; then all payloads go over the socket.

A slot is the sender's until the slot's number is sent. Then it is the receiver's, until the
receiver's last view has ended and the sender has received the slot back. So no byte is overwritten
while it is read, and the receiver can use a slot like its own memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from penstock.distributed.protocol import CHUNK_BYTES
from penstock.errors import ProtocolError

SLOTS = 4  # more slots would only evict each other from the processor's cache
SHM_BYTES = SLOTS * CHUNK_BYTES  # the memory of one connection's sender
LEAST_BYTES = 1 << 16  # of a payload; below this size a slot saves nothing
_MOST_BYTES = 1 << 30  # of shared memory that another process offers


class ShmSender:
    """The sender's side: slots for payloads.

    No slot is free until the other end has opened the memory.
    """

    def __init__(self, file: int, name: str, slots: int, slot_bytes: int) -> None:
        self._file, self._name = file, name
        self._slots, self._slot_bytes = slots, slot_bytes
        self._memory = np.frombuffer(mmap.mmap(file, slots * slot_bytes), np.uint8)
        self._free: list[int] = []
        self.is_open = False  # whether the other end has opened it

    @classmethod
    def make(cls, slots: int = SLOTS, slot_bytes: int = CHUNK_BYTES) -> ShmSender | None:
        """Return new shared memory, or None if the system cannot provide it."""
        if not hasattr(os, "memfd_create"):
            return None
        name = f"penstock-{secrets.token_hex(16)}"
        try:
            file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            return None
        try:
            # All pages now: a page that cannot be allocated later would kill the process.
            os.posix_fallocate(file, 0, slots * slot_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
            return cls(file, name, slots, slot_bytes)
        except (OSError, ValueError):
            os.close(file)
            return None

    def offer(self) -> dict[str, Any]:
        """Return the description by which the other end finds the memory."""
        return {
            "process": os.getpid(),
            "file": self._file,
            "name": self._name,
            "slots": self._slots,
            "bytes": self._slot_bytes,
        }

    def accepts(self, size: int) -> bool:
        """Whether a payload of so many bytes goes through shared memory."""
        return self.is_open and LEAST_BYTES <= size <= self._slot_bytes

    @property
    def has_free_slot(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free)

    def claim(self) -> int:
        """Return the number of a free slot, which is then the sender's to fill."""
        return self._free.pop()  # the last returned slot: the cache may still hold it

    def put(self, slot: int, payload: np.ndarray) -> None:
        """Copy a payload into a slot."""
        begin = slot * self._slot_bytes
        self._memory[begin : begin + payload.nbytes] = payload

    def take_back(self, slots: Iterable[int]) -> None:
        """Add returned slots to the free slots; the first return has all slots.

        Raises:
            ProtocolError: a slot does not exist, or is free already.
        """
        for slot in slots:
            if not 0 <= slot < self._slots or slot in self._free:
                raise ProtocolError(
                    f"the peer returned slot {slot} of {self._slots}, which it did not hold; do "
                    "all nodes run the same version of Penstock?"
                )
            self._free.append(slot)
        self.is_open = True
        self._close_file()  # the other end has opened the file

    def close(self) -> None:
        """Release the memory."""
        self.is_open = False
        self._free.clear()
        self._memory = np.zeros(0, np.uint8)
        self._close_file()

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class ShmReceiver:
    """The receiver's side: payloads in slots.

    Args:
        on_return: receives a slot's number after its last view has ended; in any thread.
    """

    def __init__(
        self, memory: mmap.mmap, slots: int, slot_bytes: int, on_return: Callable[[int], None]
    ) -> None:
        self._memory, self.slots, self._slot_bytes = memory, slots, slot_bytes
        self._on_return = on_return
        self._held: dict[int, weakref.ref[np.ndarray]] = {}

    @classmethod
    def open(cls, offer: Mapping[str, Any], on_return: Callable[[int], None]) -> ShmReceiver | None:
        """Open the memory that a peer offers; None if it is on another host or not accessible.

        Raises:
            ProtocolError: the offer is invalid.
        """
        process, number, slots, slot_bytes = (
            _integer(offer, key) for key in ("process", "file", "slots", "bytes")
        )
        name = offer.get("name")
        if not slots or not slot_bytes or slots > 255 or slots * slot_bytes > _MOST_BYTES:
            raise _invalid_offer(offer)
        if not hasattr(fcntl, "F_GET_SEALS"):
            return None
        path = f"/proc/{process}/fd/{number}"
        try:
            # Nothing else is opened, whatever the numbers mean on this host.
            if os.readlink(path) != f"/memfd:{name} (deleted)":
                return None
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (OSError, ValueError):
            return None
        try:
            if os.fstat(file).st_size != slots * slot_bytes or not _is_sealed(file):
                raise _invalid_offer(offer)
            memory = mmap.mmap(file, slots * slot_bytes)
        except OSError:
            return None
        finally:
            os.close(file)
        return cls(memory, slots, slot_bytes, on_return)

    def take(self, slot: int, size: int) -> np.ndarray:
        """Return the bytes in a slot; the slot is returned after the last view has ended.

        Raises:
            ProtocolError: the slot does not exist, is smaller than `size`, or is held already.
        """
        if slot >= self.slots or not 0 < size <= self._slot_bytes or slot in self._held:
            raise ProtocolError(
                f"expected at most {self._slot_bytes} bytes in a free slot of {self.slots}, got "
                f"{size} bytes in slot {slot}; do all nodes run the same version of Penstock?"
            )
        payload = np.frombuffer(self._memory, np.uint8, size, slot * self._slot_bytes)
        held, on_return = self._held, self._on_return

        def view_ended(_: object) -> None:
            del held[slot]
            on_return(slot)

        held[slot] = weakref.ref(payload, view_ended)
        return payload

    @property
    def is_exhausted(self) -> bool:
        """Whether all slots are held: the sender has none until one is returned."""
        return len(self._held) >= self.slots


def _is_sealed(file: int) -> bool:
    """Whether the file cannot shrink; a read behind its end would kill the process."""
    with contextlib.suppress(OSError):
        return bool(fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    return False


def _integer(offer: Mapping[str, Any], key: str) -> int:
    value = offer.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _invalid_offer(offer)
    return value


def _invalid_offer(offer: Mapping[str, Any]) -> ProtocolError:
    return ProtocolError(
        f"expected a valid offer of shared memory, got {str(dict(offer))[:160]}; do all nodes run "
        "the same version of Penstock?"
    )
