"""The same GPT under ZeRO-Infinity: DeepSpeed's ZeRO-3, parameters and optimizer state on NVMe.

Runs under a Python that has DeepSpeed, and need not have Penstock. The settings are the ones that
were found to work on a processor: bf16, no page-locked memory, buffers for the largest parameter.
"""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

from side_by_side.gpt import (
    BETAS,
    CLIP,
    LEARNING_RATE,
    VOCABULARY,
    WEIGHT_DECAY,
    WIDTH,
    Gpt,
    transformers_config,
)
from side_by_side.resident import cross_entropy

HOW_TO_INSTALL = """\
DeepSpeed is not installed in {python}. In a Python environment of its own (PyTorch's build for
processors; ninja and a C++ compiler build its operators at first use, libaio serves the disk):
  apt-get install libaio-dev
  python3 -m venv VENV
  VENV/bin/pip install torch numpy psutil wheel setuptools ninja transformers
  VENV/bin/pip install --no-build-isolation deepspeed==0.19.8
then name it: --deepspeed-python VENV/bin/python"""
_BUFFERS, _SUB_GROUP_ELEMENTS = 16, 10_000_000


def installed_version(python: str) -> str | None:
    """Return the version of DeepSpeed in an interpreter, None where there is none.

    Raises:
        SystemExit: the interpreter cannot be run.
    """
    script = (
        "from importlib import metadata as m\n"
        "try: m.version('transformers'); print(m.version('deepspeed'))\n"
        "except m.PackageNotFoundError: pass"
    )
    try:
        done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"--deepspeed-python: expected a Python interpreter, {python} cannot be run: {error}"
        ) from None
    return done.stdout.strip() or None


def environment(python: str, accelerator: str = "cpu") -> dict[str, str]:
    """Return the variables that DeepSpeed reads in a process that is alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "DS_ACCELERATOR": accelerator,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PATH": f"{Path(python).absolute().parent}{os.pathsep}{os.environ['PATH']}",  # ninja
    }


class ZeroInfinity:
    """A training loop whose parameters and optimizer state are on NVMe.

    Args:
        folder: swap files and checkpoints go below it.
        batches: what `Gpt.write_batches` wrote.
        weights: what `write_initial_weights` wrote.
    """

    def __init__(
        self, gpt: Gpt, folder: Path, batches: Path, weights: Path, precision: str
    ) -> None:
        import deepspeed
        import numpy as np
        from safetensors import safe_open
        from transformers import GPT2LMHeadModel

        settings = self._settings(gpt, folder / "nvme", precision)
        self._batches = np.load(batches)
        self._steps = 0
        deepspeed.init_distributed(dist_backend="gloo")
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = GPT2LMHeadModel(transformers_config(gpt)).train()
        # The model's own initialiser has run on parameters whose content is elsewhere: embeddings
        # would keep a deviation of 1.
        with safe_open(weights, "pt") as file:
            for name, parameter in model.named_parameters():
                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    parameter.data.copy_(file.get_tensor(name))
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=settings
        )

    def _settings(self, gpt: Gpt, nvme: Path, precision: str) -> dict[str, Any]:
        nvme.mkdir(parents=True, exist_ok=True)
        place = {
            "device": "nvme",
            "nvme_path": str(nvme),
            "pin_memory": False,
            "buffer_count": _BUFFERS,
        }
        largest = max(VOCABULARY * WIDTH, 4 * WIDTH * WIDTH)
        return {
            "train_micro_batch_size_per_gpu": gpt.sequences,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": CLIP,
            "bf16": {"enabled": precision == "bf16"},
            "optimizer": {
                "type": "AdamW",
                "params": {
                    "lr": LEARNING_RATE,
                    "betas": list(BETAS),
                    "weight_decay": WEIGHT_DECAY,
                },
            },
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": _SUB_GROUP_ELEMENTS,
                "offload_param": {**place, "buffer_size": largest},
                "offload_optimizer": place,
            },
        }

    def step(self) -> float:
        """Do one step and return its loss."""
        import torch

        ids, labels = torch.from_numpy(self._batches[self._steps])
        logits = self._engine(input_ids=ids, use_cache=False).logits
        loss = cross_entropy(logits.float(), labels)
        self._engine.backward(loss)
        self._engine.step()
        self._steps += 1
        return loss.item()

    def save(self, folder: Path) -> None:
        """Write a checkpoint as DeepSpeed does."""
        self._engine.save_checkpoint(
            str(folder / "checkpoint"), tag="saved", client_state={"steps": self._steps}
        )

    def resume(self, folder: Path) -> None:
        """Go on from what `save` wrote."""
        found, state = self._engine.load_checkpoint(str(folder / "checkpoint"), tag="saved")
        if found is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint in {folder / 'checkpoint'}")
        self._steps = state["steps"]
