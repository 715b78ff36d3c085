"""The GPT that loops train side by side: its shape, its rows, Penstock's trainer, plain PyTorch.

1024 wide with 8192 words, so 16 layers are 219 M parameters. AdamW with clipping, bf16. Whatever
is not in the standard library is imported late: a worker's parent needs little of it, and a worker
under another Python has no Penstock.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from side_by_side.resident import Resident, gpt2_config, initial_gpt2

if TYPE_CHECKING:
    from penstock.data import ArraySource
    from penstock.training import Trainer

VOCABULARY, WIDTH, HEADS, POSITIONS, SEED = 8192, 1024, 16, 1024, 0
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0
CHECKED_STEPS = 5
"""First steps of a run, whose gradients are checked; the last of them makes its updates early."""
_ROWS = 256


@dataclass(frozen=True)
class Gpt:
    """How deep the model is, and the sequences and their tokens in a step."""

    layers: int
    sequences: int
    length: int

    @property
    def parameters(self) -> int:
        """The weights of blocks and embeddings; norms and biases are a thousandth of them."""
        return self.layers * 12 * WIDTH * WIDTH + (VOCABULARY + POSITIONS) * WIDTH

    @property
    def tokens(self) -> int:
        """The tokens of a step."""
        return self.sequences * self.length

    def source(self) -> ArraySource:
        """Return random tokens, the same for all loops."""
        import numpy as np

        from penstock.data import ArraySource

        tokens = np.random.default_rng(SEED).integers(0, VOCABULARY, (_ROWS, self.length + 1))
        return ArraySource({"input_ids": tokens[:, :-1].copy(), "labels": tokens[:, 1:].copy()})

    def write_batches(self, path: Path, steps: int) -> None:
        """Write the rows of the first steps, for a loop that cannot import Penstock.

        The file is in NumPy's format, int64 [steps, 2, sequences, length]: inputs and labels.
        """
        import numpy as np

        source = self.source()
        batches = [source.batch(n, range(self.sequences), self.sequences) for n in range(steps)]
        np.save(path, np.stack([np.stack([b["input_ids"], b["labels"]]) for b in batches]))


def initial_model(gpt: Gpt) -> Any:
    """Return the model of `transformers` with the weights that all loops begin with."""
    return initial_gpt2(transformers_config(gpt), SEED)


def write_initial_weights(gpt: Gpt, path: Path) -> None:
    """Write these weights as safetensors, for a loop that cannot hold the model whole."""
    from safetensors.torch import save_file

    save_file(dict(initial_model(gpt).named_parameters()), path)


def transformers_config(gpt: Gpt) -> Any:
    """Return the model as a configuration of `transformers`."""
    return gpt2_config(
        n_layer=gpt.layers,
        n_embd=WIDTH,
        n_head=HEADS,
        vocab_size=VOCABULARY,
        n_positions=POSITIONS,
    )


def warm_up(rounds: int) -> int:
    """Return the steps before so many that are measured: none of these is the last checked one."""
    return 2 if 2 + rounds < CHECKED_STEPS else CHECKED_STEPS


def make_trainer(
    gpt: Gpt,
    run_dir: Path,
    moments: str,
    store: dict[str, Any],
    clip_norm: float = CLIP,
    memory: str | None = None,
    recompute: str = "auto",
) -> Trainer:
    """Return Penstock's trainer; `moments` and what follows are as in its configuration."""
    from penstock.training import Trainer

    return Trainer(
        {
            "model": {
                "preset": "gpt2",
                "n_layer": gpt.layers,
                "n_embd": WIDTH,
                "n_head": HEADS,
                "vocab_size": VOCABULARY,
                "n_positions": POSITIONS,
            },
            "precision": "bf16",
            "data": {"sequence_length": gpt.length},
            "batch": {"size": gpt.sequences, "micro": gpt.sequences},
            "optimizer": {
                "learning_rate": LEARNING_RATE,
                "betas": BETAS,
                "weight_decay": WEIGHT_DECAY,
                "clip_norm": clip_norm,
                "moments": moments,
                "schedule": {"name": "constant"},
            },
            "engine": {"device": "cpu", "recompute": recompute},
            "store": store,
            "memory": memory,
            "run": {"dir": str(run_dir), "seed": SEED},
        },
        source=gpt.source(),
    )


def resident_loop(gpt: Gpt) -> Resident:
    """Return plain PyTorch with everything resident, in bf16 where the processor has products of
    bfloat16."""
    from contract.precisions import fastest_precision

    return Resident(
        initial_model(gpt).train(),
        gpt.source(),
        sequences=gpt.sequences,
        precision=fastest_precision(),
        optimizer={"lr": LEARNING_RATE, "betas": BETAS, "weight_decay": WEIGHT_DECAY},
        clip=CLIP,
    )
