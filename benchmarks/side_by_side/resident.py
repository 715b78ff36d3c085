"""Plain PyTorch with everything resident: the loop beside which Penstock's loops are measured.

Nothing of Penstock is imported, and PyTorch late: `gpt` imports this file, and a worker under
another Python imports that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from penstock.data import ArraySource


def gpt2_config(**shape: int) -> Any:
    """Return a GPT-2 without dropout as a configuration of `transformers`.

    Args:
        shape: what differs from GPT-2 of 124 M parameters.
    """
    from transformers import GPT2Config

    return GPT2Config(
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, **shape
    )


def initial_gpt2(config: Any, seed: int) -> Any:
    """Return the model with the weights that Penstock's trainer begins with for the same seed."""
    import torch
    from transformers import GPT2LMHeadModel

    torch.manual_seed(seed)
    return GPT2LMHeadModel(config)


class Resident:
    """An eager training loop: fused AdamW, one clip of the global norm, bf16 by autocast.

    Args:
        model: in float32, in training mode; compiled or not.
        source: of `input_ids` and `labels`.
        sequences: of a step.
        precision: `fp32` or `bf16`.
        optimizer: `lr`, `betas` and `weight_decay` of AdamW, for all weights.
        clip: the limit of the global norm.
    """

    def __init__(
        self,
        model: Any,
        source: ArraySource,
        *,
        sequences: int,
        precision: str,
        optimizer: Mapping[str, Any],
        clip: float,
    ) -> None:
        import torch

        self._model = model
        self._source = source
        self._sequences = sequences
        self._precision = precision
        self._clip = clip
        self._steps = 0
        self._optimizer = torch.optim.AdamW(model.parameters(), fused=True, **optimizer)

    def step(self) -> float:
        """Do one step and return its loss."""
        import torch

        batch = self._source.batch(self._steps, range(self._sequences), self._sequences)
        ids, labels = (torch.from_numpy(batch[name]) for name in ("input_ids", "labels"))
        with torch.autocast("cpu", torch.bfloat16, enabled=self._precision == "bf16"):
            logits = self._model(input_ids=ids, use_cache=False).logits
            loss = cross_entropy(logits, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._steps += 1
        return loss.item()

    def save(self, folder: Path) -> None:
        """Write weights, moments and the number of steps."""
        import torch

        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        torch.save({**state, "steps": self._steps}, folder / "resident.pt")

    def resume(self, folder: Path) -> None:
        """Go on from what `save` wrote."""
        import torch

        state = torch.load(folder / "resident.pt", weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._steps = state["steps"]


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of logits [sequences, length, words] under labels."""
    import torch

    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
