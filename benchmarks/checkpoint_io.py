"""How much memory and time do Hugging Face checkpoints take on their way in and out?

Makes a sharded bfloat16 Llama checkpoint of random weights, a file at a time (4 GB; 104 MB with
--quick). Then, each in a process of its own whose resident memory is read after its imports and at
its peak: the checkpoint goes into a store on flash, a forward sweep from there gives logits, and
the store is exported again. At last `transformers` loads what was exported and gives its logits,
and every tensor is compared with the one that was made, bit by bit.

    python benchmarks/checkpoint_io.py [--quick] [--dram] [--folder FOLDER]

`value` is the greatest peak of resident memory above that after imports, in GiB, of import, forward
sweep and export (with --dram less the store itself). MB/s are of the checkpoint's bytes. It takes
four times the checkpoint's size on disk, which is given back.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from checkpoints import SEED, VOCABULARY, Size, hash_of, make_llama
from contract import describe_machine, limits_of_this_machine, print_limits, print_result

TARGET_GIB = 1.5
LENGTH = 16
SIZES = {"full": Size(2048, 5632, 36, 500_000_000), "quick": Size(512, 1408, 6, 25_000_000)}
STATUS = Path("/proc/self/status")


def main() -> None:
    """Run the benchmark, or one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="104 MB")
    parser.add_argument("--dram", action="store_true", help="into a store in memory")
    parser.add_argument("--folder", default=None, help="where all files are made")
    parser.add_argument("--worker", nargs=2, metavar=("WHAT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        what, folder = options.worker
        print(json.dumps(WORKERS[what](Path(folder), options)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        machine = describe_machine(folder)
        result = measure(Path(folder), options)
        limits = limits_of_this_machine(folder=folder)
    print_limits(limits)
    print_result("checkpoint_io", **result, machine=machine | {"limits": limits})


def measure(folder: Path, options: argparse.Namespace) -> dict:
    """Run the workers in turn; print a table; return the figures."""

    def run(what: str) -> dict:
        command = [sys.executable, __file__, "--worker", what, str(folder)]
        command += ["--quick"] * options.quick + ["--dram"] * options.dram
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    made = run("make")
    taken = run("take")
    if options.dram:
        given = taken["export"]
    else:
        given = run("give")
        shutil.rmtree(folder / "flash")
    loaded = run("load")
    size = made["bytes"]
    phases = {"import": taken["import"], "forward": taken["forward"], "export": given}
    print(f"{size / 1e9:.2f} GB in {made['files']} files, {made['parameters'] / 1e6:.0f} M weights")
    print(f"{'':8} {'seconds':>8} {'MB/s':>6} {'peak RSS above imports':>23}")
    for name, phase in phases.items():
        rate = size / 1e6 / phase["seconds"]
        print(f"{name:8} {phase['seconds']:8.1f} {rate:6.0f} {phase['peak_gib']:19.2f} GiB")
    import numpy as np

    ours, theirs = (np.load(folder / f"{who}.npy") for who in ("ours", "theirs"))
    distance = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    same = loaded["hashes"] == made["hashes"]
    print(
        f"exported tensors equal those that were made: {same}; largest difference of a logit from "
        f"transformers', of the largest logit: {distance:.1e}"
    )
    return {
        "value": round(max(phase["peak_gib"] for phase in phases.values()), 3),
        "target": TARGET_GIB,
        "unit": "GiB of peak RSS above that after imports",
        "store": "dram" if options.dram else "flash",
        "bytes": size,
        **{f"{n}_mb_per_second": round(size / 1e6 / p["seconds"], 1) for n, p in phases.items()},
        **{f"{n}_peak_gib": round(p["peak_gib"], 3) for n, p in phases.items()},
        "tensors_equal": same,
        "logits_distance": distance,
    }


class Memory:
    """The peak of a process's resident memory above what it was when this was made."""

    def __init__(self) -> None:
        self._start = self._read("VmRSS")

    def peak_gib(self, less_bytes: int = 0) -> float:
        return (self._read("VmHWM") - self._start - less_bytes) / 2**30

    @staticmethod
    def _read(field: str) -> int:
        line = next(s for s in STATUS.read_text().splitlines() if s.startswith(f"{field}:"))
        return int(line.split()[1]) * 1024


def size_of(options: argparse.Namespace) -> str:
    """Which of the two sizes is made."""
    return "quick" if options.quick else "full"


def tokens():
    """The rows whose logits are compared, [1, LENGTH]."""
    import torch

    return torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(SEED))


def make(folder: Path, options: argparse.Namespace) -> dict:
    """Make the checkpoint in folder/made."""
    return make_llama(folder / "made", SIZES[size_of(options)])


def take(folder: Path, options: argparse.Namespace) -> dict:
    """Import folder/made into a store, and stream it once for logits."""
    import numpy as np

    from penstock.config import Config
    from penstock.engine import Batch, EnginePlan, TorchEngine
    from penstock.kernels import adamw  # noqa: F401  (compiled kernels count as imports)
    from penstock.planning import builders, model_sources, store_factory
    from penstock.training.export import export

    memory = Memory()
    # Fine-tuning of the norms alone: frozen weights lie on flash once, without any state.
    config = Config.from_mapping(
        {
            "model": {"hf": str(folder / "made")},
            "data": {"sequence_length": LENGTH},
            "batch": {"size": 1},
            "freeze": ["*proj.weight", "model.embed_tokens.weight", "lm_head.weight"],
            "store": {} if options.dram else {"dram": "512MiB", "flash": {"path": "flash"}},
            "run": {"dir": str(folder / "run")},
        }
    )
    assert config.model is not None
    source = model_sources.model_source(config.model)
    program = builders.compile_source(
        source, micro_batch=1, length=LENGTH, precision="fp32", freeze=config.freeze
    )
    started = time.perf_counter()
    if options.dram:
        store = store_factory.make_store(config, program)
    else:
        store = store_factory.make_flash_store(
            config, program, int(config.store.dram), folder / "flash"
        )
    held = sum(store.memory_bytes.values()) if options.dram else 0
    store.load(source.initial_weights(0, list(program.weights)))
    imported = {"seconds": time.perf_counter() - started, "peak_gib": memory.peak_gib(held)}
    started = time.perf_counter()
    logits = builders.compile_source(
        source, micro_batch=1, length=LENGTH, precision="fp32", goal="logits"
    )
    engine = TorchEngine(logits, EnginePlan(), device="cpu", budget_bytes=2 << 30)
    engine.begin(Batch([{"input_ids": tokens()}], 0, 1, 0, 0))
    for stage in logits.stages:
        engine.load(stage.index, store.stream(stage.weights))
        engine.infer(stage.index)
    np.save(folder / "ours.npy", engine.results()[0][0].detach().numpy())
    seen = {"seconds": time.perf_counter() - started, "peak_gib": memory.peak_gib(held)}
    found = {"import": imported, "forward": seen}
    if options.dram:
        started = time.perf_counter()
        export(store, source, None, folder / "given", "bf16", SIZES[size_of(options)].shard_bytes)
        given = {"seconds": time.perf_counter() - started, "peak_gib": memory.peak_gib(held)}
        found["export"] = given
    store.close()
    return found


def give(folder: Path, options: argparse.Namespace) -> dict:
    """Export the store in folder/flash to folder/given."""
    from penstock.config import HuggingFaceModel
    from penstock.planning import model_sources
    from penstock.store.flash import FlashReader
    from penstock.training.export import export

    memory = Memory()
    started = time.perf_counter()
    source = model_sources.model_source(HuggingFaceModel(hf=str(folder / "made")))
    with FlashReader(folder / "flash") as reader:
        export(reader, source, None, folder / "given", "bf16", SIZES[size_of(options)].shard_bytes)
    return {"seconds": time.perf_counter() - started, "peak_gib": memory.peak_gib()}


def load(folder: Path, options: argparse.Namespace) -> dict:
    """Let transformers load folder/given; hash its weights and compute its logits in float32."""
    import numpy as np
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder / "given", dtype=torch.bfloat16).eval()
    hashes = {name: hash_of(p.detach()) for name, p in model.named_parameters()}

    def widen(module: torch.nn.Module, arguments: object) -> None:
        module.float()

    def narrow(module: torch.nn.Module, arguments: object, output: object) -> None:
        module.bfloat16()  # to the same bits: they were bfloat16 before

    parts = [*model.model.layers, model.model.embed_tokens, model.model.norm, model.lm_head]
    for part in parts:  # one at a time in float32, so that it fits where the checkpoint does
        part.register_forward_pre_hook(widen)
        part.register_forward_hook(narrow)
    with torch.no_grad():
        logits = model(tokens(), use_cache=False).logits
    np.save(folder / "theirs.npy", logits.float().numpy())
    return {"hashes": hashes}


WORKERS: dict[str, Callable[[Path, argparse.Namespace], dict]] = {
    "make": make,
    "take": take,
    "give": give,
    "load": load,
}

if __name__ == "__main__":
    main()
