"""Memory that the two ends of a link see, where both are processes of one host.

A ring belongs to the end that sends. It is a file without a name (`memfd_create`): no folder shows
it, no mount's size binds it, and it is gone with the last process that has it, however that ends.
The other end finds it under /proc as what the offer says, which nobody can guess; an end on another
host, in another container or of another user does not, and then all goes over the socket.

A slot is the sender's until its number is on its way, then the receiver's until nobody there has
the bytes any more and the sender has been told. So no byte is overwritten that somebody reads, and
what is read is as good as memory of the receiver's own.
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

SLOTS = 4  # more would only push each other out of the processor's cache
RING_BYTES = SLOTS * CHUNK_BYTES  # the memory of one ring
LEAST_BYTES = 1 << 16  # of a payload: below it a slot saves nothing
_MOST_BYTES = 1 << 30  # of a ring that another process offers


class ShmSender:
    """The sender's side: where payloads are put.

    One that nobody has opened yet has no room.
    """

    def __init__(self, file: int, name: str, slots: int, slot_bytes: int) -> None:
        self._file, self._name = file, name
        self._slots, self._slot_bytes = slots, slot_bytes
        self._memory = np.frombuffer(mmap.mmap(file, slots * slot_bytes), np.uint8)
        self._free: list[int] = []
        self.is_open = False  # whether the other end has it

    @classmethod
    def make(cls, slots: int = SLOTS, slot_bytes: int = CHUNK_BYTES) -> ShmSender | None:
        """Return a ring, or None where the system has none to give."""
        if not hasattr(os, "memfd_create"):
            return None
        name = f"penstock-{secrets.token_hex(16)}"
        try:
            file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            return None
        try:
            # All of it now: a page that cannot be had later would end the process.
            os.posix_fallocate(file, 0, slots * slot_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
            return cls(file, name, slots, slot_bytes)
        except (OSError, ValueError):
            os.close(file)
            return None

    def offer(self) -> dict[str, Any]:
        """Return what the other end finds it by."""
        return {
            "process": os.getpid(),
            "file": self._file,
            "name": self._name,
            "slots": self._slots,
            "bytes": self._slot_bytes,
        }

    def takes(self, size: int) -> bool:
        """Whether a payload of so many bytes goes through it."""
        return self.is_open and LEAST_BYTES <= size <= self._slot_bytes

    @property
    def has_room(self) -> bool:
        """Whether a payload can be put into it now."""
        return bool(self._free)

    def claim(self) -> int:
        """Return the number of a slot that is now the sender's to fill."""
        return self._free.pop()  # the last that came back: the cache may still have it

    def put(self, slot: int, payload: np.ndarray) -> None:
        """Copy a payload into a slot."""
        begin = slot * self._slot_bytes
        self._memory[begin : begin + payload.nbytes] = payload

    def come_back(self, slots: Iterable[int]) -> None:
        """Take slots of which the other end has no use any more; at first, all.

        Raises:
            ProtocolError: they are not there, or are free already.
        """
        for slot in slots:
            if not 0 <= slot < self._slots or slot in self._free:
                raise ProtocolError(
                    f"slot {slot} of {self._slots} was given back, which the peer did not have; do "
                    "all nodes run the same version of Penstock?"
                )
            self._free.append(slot)
        self.is_open = True
        self._shut()  # the other end has it open

    def close(self) -> None:
        """Let go of it."""
        self.is_open = False
        self._free.clear()
        self._memory = np.zeros(0, np.uint8)
        self._shut()

    def _shut(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class ShmReceiver:
    """The receiver's side: where payloads are found.

    Args:
        given_back: is told of a slot when nobody has its bytes any more; by any thread.
    """

    def __init__(
        self, memory: mmap.mmap, slots: int, slot_bytes: int, given_back: Callable[[int], None]
    ) -> None:
        self._memory, self.slots, self._slot_bytes = memory, slots, slot_bytes
        self._given_back = given_back
        self._held: dict[int, weakref.ref[np.ndarray]] = {}

    @classmethod
    def open(
        cls, offer: Mapping[str, Any], given_back: Callable[[int], None]
    ) -> ShmReceiver | None:
        """Return the ring that a peer offers; None if it is not on this host, or not ours to see.

        Raises:
            ProtocolError: it is none that a node would offer.
        """
        process, number, slots, slot_bytes = (
            _integer(offer, key) for key in ("process", "file", "slots", "bytes")
        )
        name = offer.get("name")
        if not slots or not slot_bytes or slots > 255 or slots * slot_bytes > _MOST_BYTES:
            raise _no_ring(offer)
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
                raise _no_ring(offer)
            memory = mmap.mmap(file, slots * slot_bytes)
        except OSError:
            return None
        finally:
            os.close(file)
        return cls(memory, slots, slot_bytes, given_back)

    def take(self, slot: int, size: int) -> np.ndarray:
        """Return the bytes that have been put into a slot; it is given back with the last view.

        Raises:
            ProtocolError: there is no such slot, it has no such bytes, or is held already.
        """
        if slot >= self.slots or not 0 < size <= self._slot_bytes or slot in self._held:
            state = "held here" if slot in self._held else f"one of {self.slots}"
            raise ProtocolError(
                f"{size} bytes were announced in slot {slot}, which is {state}, of "
                f"{self._slot_bytes} bytes; do all nodes run the same version of Penstock?"
            )
        payload = np.frombuffer(self._memory, np.uint8, size, slot * self._slot_bytes)
        held, given_back = self._held, self._given_back

        def is_gone(_: object) -> None:
            del held[slot]
            given_back(slot)

        held[slot] = weakref.ref(payload, is_gone)
        return payload

    @property
    def is_short(self) -> bool:
        """Whether all its slots are held: the sender has none until one is given back."""
        return len(self._held) >= self.slots


def _is_sealed(file: int) -> bool:
    """Whether nobody can cut the file: who reads behind its end would be ended by the system."""
    with contextlib.suppress(OSError):
        return bool(fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    return False


def _integer(offer: Mapping[str, Any], key: str) -> int:
    value = offer.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _no_ring(offer)
    return value


def _no_ring(offer: Mapping[str, Any]) -> ProtocolError:
    return ProtocolError(
        f"shared memory was offered as {str(dict(offer))[:160]}, which no node would do; do all "
        "nodes run the same version of Penstock?"
    )
