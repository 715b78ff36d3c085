"""Prints the bytes of a store's state, and how far saving and loading it raise the peak memory."""

import resource
import sys
from pathlib import Path

import torch
from store_programs import make_program, send, training_store

from penstock.store import load_checkpoint, save_checkpoint


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


program = make_program([{f"w{i}": (4 << 20,)} for i in range(8)])
store = training_store(program)
# One storage for all weights and gradients, so that the state itself sets the peak.
values = torch.ones(4 << 20)
store.load((name, values) for name in program.weights)
send(store, {stage: [values] for stage in range(8)})
store.commit()
store.flush()
before = peak_bytes()
folder = save_checkpoint(store, Path(sys.argv[1]), {}).folder
saved = peak_bytes()
load_checkpoint(store, folder)
print(sum(store.memory_bytes.values()), saved - before, peak_bytes() - saved)
