"""How much memory and disk do frozen weights take in the type of their checkpoint?

Makes a bfloat16 Llama checkpoint of random weights (1.35 G parameters; 46 M with --quick) and the
same values in float32. Two steps of LoRA (rank 16 on the query and value projections, bf16
products, one sequence of 64 tokens) run from each, in a process of its own: frozen weights are
stored in 2 bytes from the first folder and in 4 from the second.

    python benchmarks/lora_memory.py [--quick] [--folder FOLDER]

`value` is the bytes of the tensor files of a checkpoint over those of the adapters and their
moments. Losses and the hash of all weights must be the same in both runs. It takes 10 GB of disk
(0.4 GB with --quick), which is given back.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from checkpoints import VOCABULARY, Size, make_llama, widen
from contract import describe_machine, print_result
from side_by_side import peak_rss_bytes

TARGET = 1.1
SIZES = {"full": Size(2048, 5632, 24, 500_000_000), "quick": Size(512, 1408, 4, 25_000_000)}
RANK, LENGTH, STEPS = 16, 64, 2
WAYS = {"bf16": "frozen in 2 bytes", "fp32": "frozen in 4 bytes"}


def main() -> None:
    """Run the benchmark, or one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="46 M parameters")
    parser.add_argument("--folder", default=None, help="where all files are made")
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(train(Path(options.worker))))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        machine = describe_machine(folder)
        result = measure(Path(folder), SIZES["quick" if options.quick else "full"])
    print_result("lora_memory", **result, machine=machine)


def measure(folder: Path, size: Size) -> dict:
    """Run both ways; print a table; return the figures."""
    made = make_llama(folder / "bf16", size)
    widen(folder / "bf16", folder / "fp32")
    found = {}
    for way in WAYS:
        command = [sys.executable, __file__, "--worker", str(folder / way)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[way] = json.loads(done.stdout.splitlines()[-1])
    narrow, wide = found["bf16"], found["fp32"]
    print(
        f"Llama with {made['parameters'] / 1e6:,.0f} M parameters, LoRA of rank {RANK}: "
        f"{narrow['trained'] / 1e6:.1f} M trained"
    )
    print(f"{'':18} {'store':>10} {'checkpoint':>12} {'over adapters':>14} {'peak RSS':>12}")
    for way, name in WAYS.items():
        row = found[way]
        ratio = row["checkpoint_bytes"] / row["adapter_bytes"]
        mib = {key: row[f"{key}_bytes"] / 2**20 for key in ("store", "checkpoint", "peak_rss")}
        print(
            f"{name:18} {mib['store']:6,.0f} MiB {mib['checkpoint']:8,.1f} MiB {ratio:14.3f} "
            f"{mib['peak_rss']:8,.0f} MiB"
        )
    same = all(narrow[key] == wide[key] for key in ("losses", "hash"))
    print(f"losses and the hash of all weights are the same: {same}")
    return {
        "value": round(narrow["checkpoint_bytes"] / narrow["adapter_bytes"], 4),
        "target": TARGET,
        "unit": "bytes of a checkpoint over those of adapters and moments",
        "parameters": made["parameters"],
        "trained": narrow["trained"],
        "same_losses_and_weights": same,
        **{f"{way}_{key}": row[key] for way, row in found.items() for key in row if "bytes" in key},
    }


def train(model: Path) -> dict:
    """Train the adapters of a checkpoint for some steps; return what the run takes."""
    import numpy as np

    from penstock import Trainer
    from penstock.data import ArraySource
    from penstock.store import find_checkpoint
    from penstock.telemetry import StepDone

    losses: list[float] = []
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (STEPS, LENGTH + 1))
    run = model.parent / f"run-{model.name}"
    trainer = Trainer(
        {
            "model": {"hf": str(model)},
            "lora": {"rank": RANK, "targets": ["*.q_proj.weight", "*.v_proj.weight"]},
            "precision": "bf16",
            "data": {"sequence_length": LENGTH},
            "batch": {"size": 1},
            "evaluation": {"every": None},
            "run": {"dir": str(run), "steps": STEPS},
        },
        source=ArraySource({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}),
        on_event=lambda e: losses.append(e.loss) if isinstance(e, StepDone) else None,
        quiet=True,
    )
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    checkpoint = find_checkpoint(run / "checkpoints", "latest")
    assert checkpoint is not None
    tensor_files = checkpoint.rglob("*.safetensors")
    trained = trainer.program.trainable_parameters
    found = {
        "losses": losses,
        "hash": trainer.store.content_hash(),
        "trained": trained,
        "seconds": seconds,
        "store_bytes": sum(trainer.store.memory_bytes.values()),
        "checkpoint_bytes": sum(path.stat().st_size for path in tensor_files),
        "adapter_bytes": trained * 3 * 4,  # a master and two moments in float32
        "peak_rss_bytes": peak_rss_bytes(),
    }
    trainer.close()
    return found


if __name__ == "__main__":
    main()
