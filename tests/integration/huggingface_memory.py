"""Prints, per depth of a model: its bytes, and how far its import and its export raise the memory.

`python huggingface_memory.py FOLDER DEPTH...`; the first depth also loads what all of them use.
"""

import gc
import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.config import Config
from penstock.planning import builders, model_sources, store_factory
from penstock.store.flash import FlashReader
from penstock.training.export import export

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
WIDTH = 512


def resident(field):
    line = next(s for s in STATUS.read_text().splitlines() if s.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def growth(work):
    """Return by how many bytes `work` raises the resident memory at its peak."""
    gc.collect()
    CLEAR.write_text("5")
    before = resident("VmRSS")
    result = work()
    return resident("VmHWM") - before, result


def make(folder, layers):
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=8,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="20MB")


def measure(folder, layers):
    make(folder / "hf", layers)
    config = Config.from_mapping(
        {
            "model": {"hf": str(folder / "hf")},
            "optimizer": {"name": "sgd", "momentum": 0.0},
            "store": {"dram": "1GiB", "flash": {"path": str(folder / "flash"), "keep_steps": 1}},
            "run": {"dir": str(folder / "run")},
        }
    )
    source = model_sources.model_source(config.model)
    program = builders.compile_source(source, micro_batch=1, length=8, precision="bf16")

    def take():
        store = store_factory.make_flash_store(
            config, program, int(config.store.dram), folder / "flash"
        )
        store.load(source.initial_weights(0, list(program.weights)))
        store.close()

    def give():
        with FlashReader(folder / "flash") as reader:
            export(reader, source, None, folder / "out", "bf16", 20_000_000)

    taken, _ = growth(take)
    given, _ = growth(give)
    parameters = source.parameter_count()
    return {"float32_bytes": 4 * parameters, "import": taken, "export": given}


torch.manual_seed(0)
found = [measure(Path(sys.argv[1]) / depth, int(depth)) for depth in sys.argv[2:]]
print(json.dumps(found))
