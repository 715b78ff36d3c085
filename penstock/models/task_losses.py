"""From a model to a scalar loss: the modules that are captured.

Language-model losses are sums over the tokens of a micro-batch; the trainer divides by the number
of labelled tokens of the whole global batch. A micro-batch's share of the gradient then does not
depend on how the batch was cut. The auxiliary loss of a mixture of experts is a mean over the
tokens of one forward call, and is multiplied by the labelled tokens of its micro-batch: a step's
auxiliary loss is the mean over its micro-batches, weighted by their labelled tokens.
Custom losses are the user's own, usually means.
Each wrapper holds the user's model as `model`, so exported names are the user's after `model.`.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from penstock.constants import IGNORED_LABEL
from penstock.errors import CompileError
from penstock.models.masks import fixed_shape_masks
from penstock.models.router_loss import router_loss

WEIGHT_PREFIX = "model."


class LanguageModel(nn.Module):
    """Base of the losses of language models: calls a model that maps token ids to logits."""

    def __init__(self, model: nn.Module, *, hugging_face: bool, options: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self._options = options
        self._masks = fixed_shape_masks if hugging_face else nullcontext

    def run(self, inputs: dict[str, torch.Tensor]) -> tuple[Any, torch.Tensor]:
        """Run the model on its inputs; returns its output, and [batch, tokens, vocabulary]."""
        with self._masks():
            output = self.model(**inputs, **self._options)
        logits = getattr(output, "logits", output)
        if isinstance(logits, (tuple, list)):
            logits = logits[0]
        if not isinstance(logits, torch.Tensor) or logits.dim() != 3:
            shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits)
            raise CompileError(
                f"expected a language model that returns logits of shape [batch, tokens, "
                f"vocabulary] (or an object with .logits), {type(self.model).__name__} returned "
                f"{shape}; set task: custom and give a loss"
            )
        return output, logits

    def loss_and_logits(
        self, inputs: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss [] over `labels` that are not -100, and the logits.

        These are float32 [batch * tokens, vocabulary].
        """
        output, logits = self.run(inputs)
        if logits.dtype != torch.float32:  # an unneeded .float() would leave nodes in the graph
            logits = logits.float()
        if not logits.is_contiguous():  # a part of the model's result, as in ProphetNet
            logits = logits.contiguous()
        logits = logits.view(-1, logits.size(-1))
        loss = F.cross_entropy(logits, labels.view(-1), ignore_index=IGNORED_LABEL, reduction="sum")
        of_routers = router_loss(self.model, output)
        if of_routers is not None:
            loss = loss + of_routers * (labels != IGNORED_LABEL).sum()
        return loss, logits


class Logits(LanguageModel):
    """`model` as a function from token ids to logits [batch, tokens, vocabulary]."""

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits for `input_ids` [batch, tokens] and the model's other inputs."""
        return self.run(inputs)[1]


class CausalLMLoss(LanguageModel):
    """Sum of the next-token losses; `labels[t]` is already the token after `t`."""

    def forward(self, *, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """Return the summed loss [] over `labels` [batch, tokens] that are not -100."""
        return self.loss_and_logits(inputs, labels)[0]


class MaskedLMLoss(CausalLMLoss):
    """Sum of the cross-entropies at masked tokens; `labels` are -100 everywhere else."""


# A kind of language model with another loss has a class above and a line here.
LANGUAGE_MODEL_LOSSES: dict[str, type[LanguageModel]] = {
    "causal_lm": CausalLMLoss,
    "masked_lm": MaskedLMLoss,
}
TASKS = (*LANGUAGE_MODEL_LOSSES, "custom")


def language_model_inputs(task: str, *, hugging_face: bool) -> tuple[str, ...]:
    """Return the names of the inputs of a language model's loss."""
    masked = hugging_face and task != "causal_lm"
    return ("input_ids", *(("attention_mask",) if masked else ()), "labels")


class Scores(LanguageModel):
    """The outputs of an evaluation: the training loss sum, and the predicted tokens."""

    def forward(
        self, *, labels: torch.Tensor, **inputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss [] and the most likely labels, int64 [batch * tokens].

        The loss comes first in the graph, so that the compiler can fuse both into one operator.
        """
        loss, logits = self.loss_and_logits(inputs, labels)
        return loss, logits.argmax(-1)


class CustomLoss(nn.Module):
    """The user's module, with the user's `loss(output, **targets)` if there is one."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., torch.Tensor] | None,
        target_names: Iterable[str],
    ) -> None:
        super().__init__()
        self.model = model
        # Not a submodule, since buffers are collected from submodules: tensors of a loss are
        # constants.
        self._loss = loss.__call__ if isinstance(loss, nn.Module) else loss
        self._target_names = tuple(target_names)

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Return the loss [] of one micro-batch."""
        targets = {name: inputs.pop(name) for name in self._target_names}
        with fixed_shape_masks() if _is_hugging_face(self.model) else nullcontext():
            output = self.model(**inputs)
        loss = output if self._loss is None else self._loss(output, **targets)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            actual = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            advice = "give loss: package.module:function" if self._loss is None else "reduce it"
            raise CompileError(
                f"expected a scalar loss from {type(self.model).__name__}, got {actual}; {advice}"
            )
        return loss


class Outputs(nn.Module):
    """The user's module alone, for tasks without logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> Any:
        """Return what the module returns."""
        return self.model(**inputs)


def _is_hugging_face(model: nn.Module) -> bool:
    return any(base.__module__.startswith("transformers.") for base in type(model).__mro__)
