"""Trains a small model on flash under a cap, and prints what the system says the process had.

Arguments: a folder, and the cap.
"""

import json
import sys

import numpy as np

from penstock import Trainer
from penstock.data import ArraySource

folder, cap = sys.argv[1:]
rows = np.random.default_rng(0).integers(0, 512, (32, 129))
source = ArraySource({"input_ids": rows[:, :-1].copy(), "labels": rows[:, 1:].copy()})
trainer = Trainer(
    {
        "model": {
            "preset": "gpt2",
            "n_layer": 6,
            "n_embd": 384,
            "n_head": 6,
            "vocab_size": 512,
            "n_positions": 128,
        },
        "memory": cap,
        "precision": "bf16",
        "batch": {"size": 16, "micro": 8},
        "optimizer": {"schedule": {"name": "constant"}},
        "engine": {"device": "cpu"},
        "store": {"flash": {"path": f"{folder}/flash"}},
        "run": {"dir": folder, "steps": 3},
        "evaluation": {"every": 2, "batches": 1},
    },
    source=source,
    held_out=source,
)
summary = trainer.train()
shares = trainer._layout.shares
with open("/proc/self/status") as status:
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
print(
    json.dumps(
        {
            "peak": peak,
            "told": summary["peak_rss_bytes"],
            "store": shares.store,
            "engine": shares.engines,
            "engine_used": summary["engine_peak_bytes"],
        }
    )
)
trainer.close()
