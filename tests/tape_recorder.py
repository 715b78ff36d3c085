"""A recorder without a device: a tape of the operators that PyTorch dispatches.

Its repetition writes to the tensors of the recorded step, as that of a CUDA graph does. It sees no
kernel that is called directly, and frees no memory.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Tape(TorchDispatchMode):
    """The operators of a call, with all their arguments and results."""

    def __init__(self):
        super().__init__()
        self.entries = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.entries.append((function, args, kwargs or {}, made))
        return made

    def repeat(self):
        for function, args, kwargs, made in self.entries:
            again = function(*args, **kwargs)
            for new, old in zip(tensors_of(again), tensors_of(made), strict=True):
                if new.data_ptr() != old.data_ptr():  # else a view, or a change in place
                    old.copy_(new)


def tensors_of(made):
    found = made if isinstance(made, tuple | list) else [made]
    return [each for each in found if isinstance(each, torch.Tensor)]


class TapeRecorder:
    """Records on tapes; counts what the engine asks for."""

    def __init__(self, has_room=True):
        self.has_room, self.started, self.recorded, self.dropped = has_room, [], 0, 0

    def start(self, step_bytes):
        self.started.append(step_bytes)
        return self.has_room

    def record(self, act):
        self.recorded += 1
        with Tape() as tape:
            result = act()
        return result, tape.repeat

    def unowned(self, tensor):
        return tensor

    def drop(self):
        self.dropped += 1
