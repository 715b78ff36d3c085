"""What a checkpoint costs a run whose store is in memory: written behind it, or while it stands.

A GPT of 26 M parameters (8 layers, 512 wide, vocabulary 2048), 4 sequences of 256 tokens, fp32,
AdamW: 315 MB of weights and state. One run takes turns between rounds of steps without a
checkpoint, with one written behind them, and with one for which they stop.

    python benchmarks/snapshot_pause.py [--quick] [--rounds N] [--every N] [--folder FOLDER]

`value` is the median ratio of steps/s with a checkpoint behind every round to those without.
`stop_and_save` is the same for stopping; `pause_seconds` is what a round took longer than one
without.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from contract import describe_machine, limits_of_this_machine, print_limits, print_result

VOCABULARY, WIDTH, HEADS, LAYERS = 2048, 512, 8, 8
SEQUENCES, LENGTH, SEED = 4, 256, 0
TARGET = 0.95
BUFFER_BYTES = 128 << 20


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="2 of 8 layers, two rounds of three steps"
    )
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--every", type=int, default=None, help="steps of a round")
    parser.add_argument("--folder", default=None, help="where the checkpoints are written")
    options = parser.parse_args()
    layers, rounds, every = (2, 2, 3) if options.quick else (LAYERS, 5, 8)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    machine = describe_machine(folder)
    try:
        result = measure(folder, layers, options.rounds or rounds, options.every or every)
        limits = limits_of_this_machine(products=["fp32"], folder=folder)
    finally:
        shutil.rmtree(folder)
    print_limits(limits)
    print_result(
        "snapshot_pause",
        result["ratio"]["behind"],
        target=TARGET,
        unit="steps/s with a checkpoint behind every round over without",
        machine=machine | {"limits": limits},
        **result,
    )


def measure(folder: Path, layers: int, rounds: int, every: int) -> dict:
    """Take turns; print a table; return medians."""
    import numpy as np

    from penstock import Trainer
    from penstock.data import ArraySource
    from penstock.store import BackgroundSave, save_checkpoint

    tokens = np.random.default_rng(SEED).integers(0, VOCABULARY, (64, LENGTH + 1))
    rows = {"input_ids": tokens[:, :-1].copy(), "labels": tokens[:, 1:].copy()}
    trainer = Trainer(
        {
            "model": {
                "preset": "gpt2",
                "n_layer": layers,
                "n_embd": WIDTH,
                "n_head": HEADS,
                "vocab_size": VOCABULARY,
                "n_positions": LENGTH,
            },
            "batch": {"size": SEQUENCES, "micro": SEQUENCES},
            "engine": {"device": "cpu"},
            "optimizer": {"schedule": {"name": "constant"}},
            "run": {"dir": str(folder / "run"), "seed": SEED},
        },
        source=ArraySource(rows),
    )
    store, held_up, copied, sizes = trainer.store, [], [], []

    def steps() -> None:
        for _ in range(every):
            held_up.append(trainer.run_step().snapshot_seconds)

    def plain() -> None:
        steps()

    def behind() -> None:
        snapshot = store.snapshot(BUFFER_BYTES)
        saving = BackgroundSave(snapshot, folder / "behind", {}, keep_last=1)
        steps()
        sizes.append(saving.wait().bytes)
        copied.append(snapshot.peak_copied_bytes)

    def stopping() -> None:
        save_checkpoint(store, folder / "stopping", {}, keep_last=1)
        steps()

    loops: dict[str, Callable[[], None]] = {
        "without": plain,
        "behind": behind,
        "stop_and_save": stopping,
    }
    trainer.run_step()
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(rounds):
        for name in loops if number % 2 == 0 else reversed(loops):
            started = time.perf_counter()
            loops[name]()
            seconds[name].append(time.perf_counter() - started)
    result: dict = {"ratio": {}, "pause_seconds": {}, "seconds_per_round": {}}
    print(f"{'checkpoint':15} {every:4} steps {'pause':>9} {'steps/s':>9}")
    for name in loops:
        pairs = list(zip(seconds[name], seconds["without"], strict=True))
        result["ratio"][name] = round(statistics.median(b / a for a, b in pairs), 3)
        result["pause_seconds"][name] = round(statistics.median(a - b for a, b in pairs), 3)
        result["seconds_per_round"][name] = round(statistics.median(seconds[name]), 3)
        print(
            f"{name:15} {result['seconds_per_round'][name]:8.2f} s "
            f"{result['pause_seconds'][name]:7.2f} s {result['ratio'][name]:8.3f}x"
        )
    return result | {
        "checkpoint_bytes": sizes[-1],
        "copied_bytes": max(copied),
        "held_up_seconds": round(sum(held_up), 3),
        "steps_per_checkpoint": every,
        "rounds": rounds,
        "layers": layers,
    }


if __name__ == "__main__":
    main()
