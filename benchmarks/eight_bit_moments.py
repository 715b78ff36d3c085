"""Whether AdamW with 8-bit moments converges as with float32 ones.

A GPT of 3 layers is trained on the source of Python's standard library, byte by byte, with both
kinds of moments on the same batches, and again with another seed. What counts is the mean loss of
the last fifth of the steps, pair by pair; the spread between seeds says what a difference means.
beta2 is 0.999, where a mean of squares moves least per step and rounding hurts most.

    python benchmarks/eight_bit_moments.py [--quick] [--seeds N] [--steps N]

`value` is the greatest ratio over seeds of the loss with 8 bits to that with 32.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
from contract import describe_machine, print_result

LENGTH, SEQUENCES = 128, 16
TARGET = 1.01


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, 30 steps")
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--steps", type=int, default=None)
    options = parser.parse_args()
    seeds = options.seeds or (1 if options.quick else 3)
    steps = options.steps or (30 if options.quick else 400)
    text = source_text()
    rows = []
    print(f"{'seed':>4} {'fp32':>8} {'8bit':>8} {'ratio':>8} {'optimizer state':>24}")
    for seed in range(seeds):
        exact, exact_bytes = train(text, "fp32", seed, steps)
        coded, coded_bytes = train(text, "8bit", seed, steps)
        rows.append({"seed": seed, "fp32": exact, "8bit": coded, "ratio": coded / exact})
        print(
            f"{seed:4} {exact:8.4f} {coded:8.4f} {coded / exact:8.4f}"
            f" {exact_bytes / 2**20:10.1f} -> {coded_bytes / 2**20:.1f} MiB"
        )
    losses = [row["fp32"] for row in rows]
    print_result(
        "eight_bit_moments",
        round(max(row["ratio"] for row in rows), 5),
        target=TARGET,
        unit="loss with 8-bit moments over loss with float32 moments",
        machine=describe_machine(),
        steps=steps,
        spread_between_seeds=round(max(losses) / min(losses), 5) if seeds > 1 else None,
        mean_ratio=round(statistics.mean(row["ratio"] for row in rows), 5),
        by_seed=[{key: round(value, 5) for key, value in row.items()} for row in rows],
    )


def source_text() -> np.ndarray:
    """Return a few million bytes of Python source, uint8."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    return np.frombuffer(b"\n".join(path.read_bytes() for path in files), np.uint8)


def train(text: np.ndarray, moments: str, seed: int, steps: int) -> tuple[float, int]:
    """Train, and return the mean loss of the last fifth of the steps and the bytes of moments."""
    from penstock.data import ArraySource
    from penstock.training import Trainer

    starts = np.random.default_rng(seed).integers(0, text.size - LENGTH - 1, steps * SEQUENCES)
    tokens = np.stack([text[start : start + LENGTH + 1] for start in starts]).astype(np.int64)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            {
                "model": {
                    "preset": "gpt2",
                    "n_layer": 3,
                    "n_embd": 192,
                    "n_head": 6,
                    "vocab_size": 256,
                    "n_positions": LENGTH,
                },
                "data": {"sequence_length": LENGTH},
                "batch": {"size": SEQUENCES, "micro": SEQUENCES},
                "optimizer": {
                    "learning_rate": 2e-3,
                    "betas": [0.9, 0.999],
                    "moments": moments,
                    "schedule": {"name": "cosine", "warmup_steps": max(1, steps // 20)},
                },
                "engine": {"device": "cpu"},
                "run": {"dir": folder, "seed": seed, "steps": steps},
            },
            source=ArraySource({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}),
        )
        losses = [trainer.run_step().loss for _ in range(steps)]
        memory = trainer.store.memory_bytes
        trainer.close()
    state = sum(size for role, size in memory.items() if role.startswith("exp_avg"))
    return statistics.mean(losses[-steps // 5 :]), state


if __name__ == "__main__":
    main()
