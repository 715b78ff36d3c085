"""What weight streaming costs against the plain PyTorch loop that holds everything resident.

GPT-2 from `transformers` with random weights, 4 sequences of 512 tokens, AdamW with clipping, in
fp32 and bf16. Three loops, each in a process of its own, take turns step by step: plain PyTorch
(fused AdamW, foreach clipping, autocast for bf16), the same under `torch.compile`, and Penstock.
The ratio of a round is Penstock's tokens/s over the other's in the same round; the median counts.
A fourth process takes turns with them that does nothing but dense products: the share of its rate
is what a loop's products alone make of the machine, counted by the formula of `flops_per_token`.
The loops begin with the same weights, and losses that differ by more than rounding are an error.

    python benchmarks/streaming_tax.py [--quick] [--rounds N] [--precision fp32|bf16]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

from contract import (
    PRODUCT_FLOPS,
    describe_machine,
    plain_precisions,
    print_result,
    start_products,
)
from side_by_side import (
    Worker,
    check_losses,
    print_table,
    serve,
    speeds_over,
    summarize,
    take_turns,
)
from side_by_side.resident import Resident, gpt2_config, initial_gpt2

VOCABULARY, WIDTH, PRODUCTS = 50257, 768, "products"
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP, SEED = 3e-4, (0.9, 0.999), 0.1, 1.0, 0
TARGETS = {"eager": 1.15, "compiled": 1.0}


def main() -> None:
    """Run the benchmark, or one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one layer, one sequence of 256, eager only: within 50 s",
    )
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--precision", choices=["fp32", "bf16"], action="append")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--worker", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        job = Job(**json.loads(options.worker))
        loops = {"penstock": penstock_loop, "eager": eager_loop, "compiled": compiled_loop}
        serve(loops[job.loop](job))
        return
    layers = options.layers or (1 if options.quick else 12)
    sequences, length = (1, 256) if options.quick else (4, 512)
    rounds = options.rounds or (3 if options.quick else 7)
    machine = describe_machine()
    loops = ["penstock", "eager"]
    if not options.quick and shutil.which("gcc"):
        loops.append("compiled")
    results = [
        compare(loops, Job("", precision, layers, sequences, length), rounds)
        for precision in options.precision or plain_precisions()
    ]
    print_result("streaming_tax", **summary(results), machine=machine, layers=layers, rounds=rounds)


@dataclasses.dataclass(frozen=True)
class Job:
    """What one worker does: which loop, on what."""

    loop: str
    precision: str
    layers: int
    sequences: int
    length: int


def compare(loops: list[str], job: Job, rounds: int) -> dict:
    """Take turns for `rounds` rounds; print a table; return medians, ratios and peak memory."""
    workers = {name: Worker(dataclasses.replace(job, loop=name), __file__) for name in loops}
    tokens = job.sequences * job.length
    seconds = take_turns({**workers, PRODUCTS: (products := start_products(job.precision))}, rounds)
    products.finish()
    product_seconds = seconds.pop(PRODUCTS)
    result: dict = {"precision": job.precision}
    result |= summarize(workers, seconds, tokens)
    losses = {name: worker.losses for name, worker in workers.items()}
    result["loss_difference"] = check_losses(losses, job.precision)
    result["ratio"] = speeds_over(seconds, "penstock")
    result["products_gflop_per_second"] = round(
        PRODUCT_FLOPS / statistics.median(product_seconds) / 1e9, 1
    )
    result["share_of_products"] = {
        name: share_of_products(tokens * flops_per_token(job), own, product_seconds)
        for name, own in seconds.items()
    }
    print(
        f"\n{job.precision}, {job.layers} layers, {rounds} rounds, "
        f"{job.sequences} x {job.length} tokens; dense products alone: "
        f"{result['products_gflop_per_second']:,.0f} GFLOP/s"
    )
    print_table(
        {
            "loop": 10,
            "tokens/s": 9,
            "slowest": 8,
            "fastest": 8,
            "peak RSS": 10,
            "penstock is": 12,
            "of products": 12,
            "last loss": 10,
        },
        (
            (
                name,
                f"{result['tokens_per_second'][name]:.1f}",
                f"{tokens / max(seconds[name]):.1f}",
                f"{tokens / min(seconds[name]):.1f}",
                f"{result['peak_rss_gib'][name]:.2f} GiB",
                f"{result['ratio'][name]:.3f}x",
                f"{result['share_of_products'][name]:.1%}",
                f"{result['loss'][name]:.5f}",
            )
            for name in loops
        ),
    )
    return result


def flops_per_token(job: Job) -> int:
    """Return the floating-point operations of a step per token: products forward and backward.

    Of every block 12 matrices of width x width, and attention in which every token sees every
    other, as such figures are usually counted (Chowdhery et al. 2022, "PaLM", appendix B): causal
    attention needs half of that, 4 % of all operations of GPT-2 at 512 tokens. Of the head one
    matrix of vocabulary x width.
    """
    matrices = job.layers * 12 * WIDTH * WIDTH + VOCABULARY * WIDTH
    attention = job.layers * 2 * job.length * WIDTH  # scores, and their sums of values
    return 3 * 2 * (matrices + attention)


def share_of_products(flops: int, seconds: list[float], product_seconds: list[float]) -> float:
    """Return the median over rounds of a loop's rate over that of dense products alone."""
    pairs = zip(seconds, product_seconds, strict=True)
    shares = [flops / own / (PRODUCT_FLOPS / products) for own, products in pairs]
    return round(statistics.median(shares), 4)


def summary(results: list[dict]) -> dict:
    """Return what the benchmark's JSON line says: the least ratio to eager counts."""
    return {
        "value": min(r["ratio"]["eager"] for r in results),
        "target": TARGETS["eager"],
        "unit": "tokens/s over eager PyTorch's",
        "least_ratio_to_compiled": min(
            (r["ratio"]["compiled"] for r in results if "compiled" in r["ratio"]), default=None
        ),
        "target_compiled": TARGETS["compiled"],
        "by_precision": results,
    }


def batches(length: int):  # type: ignore[no-untyped-def]
    """Return the training tokens as arrays: input_ids and labels, 256 rows."""
    import numpy as np

    tokens = np.random.default_rng(SEED).integers(0, VOCABULARY, (256, length + 1))
    return {"input_ids": tokens[:, :-1].copy(), "labels": tokens[:, 1:].copy()}


def penstock_loop(job: Job) -> Callable[[], float]:
    """Return a step of Penstock's trainer on the CPU."""
    from penstock.data import ArraySource
    from penstock.training import Trainer

    trainer = Trainer(
        {
            "model": {"preset": "gpt2", "n_layer": job.layers},
            "precision": job.precision,
            "data": {"sequence_length": job.length},
            "batch": {"size": job.sequences, "micro": job.sequences},
            "optimizer": {
                "learning_rate": LEARNING_RATE,
                "weight_decay": WEIGHT_DECAY,
                "clip_norm": CLIP,
                "decay_1d": True,
                "betas": BETAS,
                "schedule": {"name": "constant"},
            },
            "engine": {"device": "cpu"},
            "run": {"dir": tempfile.mkdtemp(), "seed": SEED},
        },
        source=ArraySource(batches(job.length)),
    )
    return lambda: trainer.run_step().loss


def eager_loop(job: Job) -> Callable[[], float]:
    """Return a step of the plain PyTorch loop: everything resident, fused AdamW, one clip."""
    return resident_loop(job, initial_gpt2(gpt2_config(n_layer=job.layers), SEED).train())


def compiled_loop(job: Job) -> Callable[[], float]:
    """Return the same step with the model under `torch.compile`."""
    import torch

    model = initial_gpt2(gpt2_config(n_layer=job.layers), SEED).train()
    return resident_loop(job, torch.compile(model))


def resident_loop(job: Job, model: Any) -> Callable[[], float]:
    """Return a step of plain PyTorch with a model."""
    from penstock.data import ArraySource

    return Resident(
        model,
        ArraySource(batches(job.length)),
        sequences=job.sequences,
        precision=job.precision,
        optimizer={"lr": LEARNING_RATE, "betas": BETAS, "weight_decay": WEIGHT_DECAY},
        clip=CLIP,
    ).step


if __name__ == "__main__":
    main()
