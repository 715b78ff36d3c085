"""What it costs that weights and optimizer state are on flash instead of in memory.

A GPT of 219 M parameters (16 layers, 1024 wide, vocabulary 8192), 4 sequences of 256 tokens, bf16,
AdamW with clipping. Three loops, each in a process of its own, take turns step by step: plain
PyTorch with everything resident (autocast, fused AdamW), Penstock with its store in memory, and
Penstock with its store on flash and a quarter of the store's bytes in memory.

    python benchmarks/out_of_core.py [--quick] [--rounds N] [--folder FOLDER]

`value` is the median ratio of tokens/s on flash to those in memory. `to_resident` is the ratio to
plain PyTorch (target 0.90, with a peak resident memory below 1.5 GiB). The disk is looked at: bytes
per step are counted, and a plain loop of direct reads and writes of as many bytes runs beside.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from streaming_tax import Worker, serve

LOOPS = ("flash", "memory", "resident")
VOCABULARY, WIDTH, HEADS = 8192, 1024, 16
SEQUENCES, LENGTH, SEED = 4, 256, 0
TARGET, TARGET_RESIDENT, TARGET_RSS_GIB = 0.95, 0.90, 1.5


@dataclasses.dataclass(frozen=True)
class Job:
    """What one worker does."""

    loop: str
    layers: int
    folder: str

    @property
    def parameters(self) -> int:
        return self.layers * 12 * WIDTH * WIDTH + (VOCABULARY + 1024) * WIDTH


def main() -> None:
    """Run the benchmark, or one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="4 of 16 layers, two rounds")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--folder", default=None, help="where the store on flash is made")
    parser.add_argument("--worker", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        job = Job(**json.loads(options.worker))
        serve(resident_loop(job) if job.loop == "resident" else penstock_loop(job))
        return
    layers, rounds = (4, 2) if options.quick else (16, 7)
    rounds = options.rounds or rounds
    folder = tempfile.mkdtemp(dir=options.folder)
    try:
        workers = {loop: Worker(Job(loop, layers, folder), __file__) for loop in LOOPS}
        result = measure(workers, rounds)
        metrics = [json.loads(line) for line in (Path(folder) / "steps").read_text().splitlines()]
        result |= disk(metrics[-rounds:], folder)
    finally:
        shutil.rmtree(folder)
    result = {
        "benchmark": "out_of_core",
        "value": result["ratio"]["memory"],
        "target": TARGET,
        "unit": "tokens/s on flash over in memory",
        "to_resident": result["ratio"]["resident"],
        "target_to_resident": TARGET_RESIDENT,
        "target_peak_rss_gib": TARGET_RSS_GIB,
        "layers": layers,
        "rounds": rounds,
        **result,
    }
    print(json.dumps(result))


def measure(workers: dict[str, Worker], rounds: int) -> dict:
    """Take turns; print a table; return medians, ratios and peak memory."""
    for worker in workers.values():
        worker.step()
        worker.step()
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    for number in range(rounds):
        for name in LOOPS if number % 2 == 0 else reversed(LOOPS):
            seconds[name].append(workers[name].step())
    finals = {name: worker.finish() for name, worker in workers.items()}
    print(f"{'loop':10} {'tokens/s':>9} {'peak RSS':>10} {'flash is':>9} {'last loss':>10}")
    result: dict = {"tokens_per_second": {}, "ratio": {}, "peak_rss_gib": {}, "loss": {}}
    for name in LOOPS:
        rate = statistics.median(SEQUENCES * LENGTH / s for s in seconds[name])
        ratios = [a / b for a, b in zip(seconds[name], seconds["flash"], strict=True)]
        result["tokens_per_second"][name] = round(rate, 1)
        result["ratio"][name] = round(statistics.median(ratios), 3)
        result["peak_rss_gib"][name] = round(finals[name]["peak_rss_bytes"] / 2**30, 2)
        result["loss"][name] = finals[name]["loss"]
        print(
            f"{name:10} {rate:9.1f} {result['peak_rss_gib'][name]:6.2f} GiB"
            f" {result['ratio'][name]:8.3f}x {finals[name]['loss']:10.5f}"
        )
    return result


def disk(steps: list[dict], folder: str) -> dict:
    """Compare what the steps moved with a plain loop that reads and writes as much."""
    import threading

    import numpy as np

    from penstock.kernels.memory import allocate
    from penstock.store.flash.medium import ExtentFile

    read = int(statistics.mean(step["read"] for step in steps))
    written = int(statistics.mean(step["written"] for step in steps))
    waited = statistics.mean(step["waited"] / step["seconds"] for step in steps)
    chunk = 8 << 20
    file = ExtentFile(Path(folder) / "plain", 2 << 30, create=True)
    content = allocate(chunk)
    content[:] = np.random.default_rng(0).integers(0, 256, chunk, np.uint8)
    for offset in range(0, 2 << 30, chunk):
        file.write(offset, content)
    file.sync()

    def loop(move: Callable[[int, np.ndarray], None], amount: int) -> None:
        buffer = allocate(chunk)
        for number in range(amount // chunk):
            move(number * chunk % (2 << 30), buffer)

    threads = [
        threading.Thread(target=loop, args=(file.read, read)),
        threading.Thread(target=loop, args=(file.write, written)),
    ]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    plain = time.perf_counter() - started
    file.close()
    print(
        f"per step {read / 1e9:.2f} GB read and {written / 1e9:.2f} GB written, {waited:.0%} of it "
        f"waiting; a plain loop moves as much in {plain:.2f} s"
    )
    return {
        "read_bytes": read,
        "written_bytes": written,
        "share_waiting": round(waited, 3),
        "plain_loop_seconds": round(plain, 2),
    }


def rows() -> dict:
    """Return the training tokens as arrays: input_ids and labels, 256 rows."""
    import numpy as np

    tokens = np.random.default_rng(SEED).integers(0, VOCABULARY, (256, LENGTH + 1))
    return {"input_ids": tokens[:, :-1].copy(), "labels": tokens[:, 1:].copy()}


def penstock_loop(job: Job) -> Callable[[], float]:
    """Return a step of Penstock's trainer, its store in memory or on flash."""
    from penstock.data import ArraySource
    from penstock.trainer import Trainer

    store: dict = {}
    if job.loop == "flash":
        quarter = job.parameters * 14 // 4
        store = {"dram": quarter, "flash": {"path": f"{job.folder}/flash", "keep_steps": 1}}
    trainer = Trainer(
        {
            "model": {
                "preset": "gpt2",
                "n_layer": job.layers,
                "n_embd": WIDTH,
                "n_head": HEADS,
                "vocab_size": VOCABULARY,
                "n_positions": 1024,
            },
            "precision": "bf16",
            "data": {"sequence_length": LENGTH},
            "batch": {"size": SEQUENCES, "micro": SEQUENCES},
            "optimizer": {"learning_rate": 3e-4, "schedule": {"name": "constant"}},
            "engine": {"device": "cpu"},
            "store": store,
            "run": {"dir": f"{job.folder}/{job.loop}", "seed": SEED},
        },
        source=ArraySource(rows()),
    )

    def step() -> float:
        done = trainer.run_step()
        if job.loop == "flash":
            figures = {
                "read": done.flash_read_bytes,
                "written": done.flash_written_bytes,
                "waited": done.flash_wait_seconds,
                "seconds": done.seconds,
            }
            with (Path(job.folder) / "steps").open("a") as file:
                file.write(json.dumps(figures) + "\n")
        return done.loss

    return step


def resident_loop(job: Job) -> Callable[[], float]:
    """Return a step of the plain PyTorch loop, everything resident, bf16 by autocast."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from penstock.data import ArraySource

    torch.manual_seed(SEED)
    config = GPT2Config(
        n_layer=job.layers,
        n_embd=WIDTH,
        n_head=HEADS,
        vocab_size=VOCABULARY,
        n_positions=1024,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    source = ArraySource(rows())
    steps = iter(range(1_000_000))

    def step() -> float:
        batch = source.batch(next(steps), range(SEQUENCES), SEQUENCES)
        ids, labels = (torch.from_numpy(batch[name]) for name in ("input_ids", "labels"))
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


if __name__ == "__main__":
    main()
