"""Loops of other trainers on one GPU: plain PyTorch with everything resident, as it is and tuned,
and two that keep parameters and optimizer state in host memory (FSDP2 with `CPUOffloadPolicy`,
DeepSpeed's ZeRO-3).

All train the same Hugging Face model in bfloat16 with float32 master weights and AdamW. The tuned
loop is compiled by `torch.compile`, and its vocabulary is padded to a multiple of 64, without
which cuBLAS has slow kernels only. In the others nothing is tuned.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from penstock.data import ArraySource

RESIDENT, COMPILED = "resident", "compiled"
FSDP, ZERO = "fsdp2-offload", "zero3-offload"
PADDING = 64  # the vocabulary of the compiled loop is a multiple of it


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model's preset and its training.

    Attributes:
        rows: the source of `input_ids` and `labels`.
        size: sequences per step.
        micro: sequences per micro-batch.
        optimizer: `lr`, `weight_decay` and `betas` of AdamW.
        clip: the limit of the global norm.
        seed: of the weights that the model's own initialiser draws.
    """

    preset: str
    rows: ArraySource
    size: int
    micro: int
    optimizer: dict[str, Any]
    clip: float
    seed: int

    def model(self) -> torch.nn.Module:
        """Return the model in host memory, in float32."""
        import torch
        from transformers import AutoModelForCausalLM

        from penstock.models import ModelSource

        config = ModelSource.from_preset(self.preset, {}).hf_config
        assert config is not None
        torch.manual_seed(self.seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()

    def micro_batches(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the tokens and the labels of each micro-batch, on the GPU."""
        import torch

        batch = self.rows.batch(step, range(self.size), self.size)
        ids, labels = (torch.from_numpy(batch[name]).cuda() for name in ("input_ids", "labels"))
        return list(zip(ids.split(self.micro), labels.split(self.micro), strict=True))


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy, in float32."""
    from torch.nn.functional import cross_entropy

    from penstock.constants import IGNORED_LABEL

    found = logits.float().flatten(0, 1)
    return cross_entropy(found, labels.flatten(), ignore_index=IGNORED_LABEL)


def resident_loop(setup: Setup) -> Callable[[], float]:
    """Return a step of plain PyTorch under autocast, with everything on the device."""
    import torch

    net = setup.model().cuda()
    return step_of(setup, net, lambda is_last: torch.autocast("cuda", torch.bfloat16))


def compiled_loop(setup: Setup) -> Callable[[], float]:
    """Return a step of compiled PyTorch under autocast, with everything on the device."""
    import torch

    model: Any = setup.model()
    labels_in_use = model.config.vocab_size
    model.resize_token_embeddings(pad_to_multiple_of=PADDING)
    net = model.cuda()

    @torch.compile
    def loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = net(input_ids=ids, use_cache=False).logits
        return loss_of(logits[..., :labels_in_use], labels)

    return step_of(setup, net, lambda is_last: torch.autocast("cuda", torch.bfloat16), loss)


def step_of(
    setup: Setup,
    net: torch.nn.Module,
    around: Callable[[bool], AbstractContextManager[Any]],
    mean_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> Callable[[], float]:
    """Return a step with PyTorch's AdamW.

    Args:
        setup: the training.
        net: the model.
        around: returns a context for a micro-batch's forward; it is told whether that is the last
            one of the step.
        mean_loss: returns the loss of a micro-batch from tokens and labels.
    """
    import torch

    def plain_loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss_of(net(input_ids=ids, use_cache=False).logits, labels)

    mean_loss = mean_loss or plain_loss
    optimizer = torch.optim.AdamW(net.parameters(), fused=True, **setup.optimizer)
    steps = iter(range(1_000_000))

    def step() -> float:
        parts = setup.micro_batches(next(steps))
        total = torch.zeros((), device="cuda")
        for number, (ids, labels) in enumerate(parts, 1):
            with around(number == len(parts)):
                loss = mean_loss(ids, labels) / len(parts)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(net.parameters(), setup.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total.item()

    return step


def fsdp_loop(setup: Setup) -> Callable[[], float]:
    """Return a step of FSDP2 whose shards are in page-locked host memory.

    Each block is a group of its own. Gradients of all micro-batches but the last are summed on the
    device, as `set_requires_gradient_sync` allows, and AdamW runs on the processor.
    """
    import torch
    from torch.distributed import HashStore, init_process_group
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    net = setup.model()
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
    }
    for block in blocks_of(net):
        fully_shard(block, **options)
    fully_shard(net, **options)
    for buffer in net.buffers():
        buffer.data = buffer.data.cuda()

    def return_gradients(is_last: bool) -> AbstractContextManager[None]:
        net.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        return nullcontext()

    return step_of(setup, net, return_gradients)


def zero_loop(setup: Setup) -> Callable[[], float]:
    """Return a step of ZeRO-3 with parameters and optimizer state in page-locked host memory."""
    import deepspeed
    import torch

    place = {"device": "cpu", "pin_memory": True}
    settings = {
        "train_micro_batch_size_per_gpu": setup.micro,
        "gradient_accumulation_steps": setup.size // setup.micro,
        "gradient_clipping": setup.clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": setup.optimizer},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_param": place,
            "offload_optimizer": place,
        },
    }
    net = setup.model()
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), config=settings, dist_init_required=True
    )
    steps = iter(range(1_000_000))

    def step() -> float:
        parts = setup.micro_batches(next(steps))
        total = torch.zeros((), device="cuda")
        for ids, labels in parts:
            loss = loss_of(engine(input_ids=ids, use_cache=False).logits, labels)
            engine.backward(loss)
            engine.step()  # acts at the last micro-batch of a step
            total += loss.detach() / len(parts)
        return total.item()

    return step


LOOPS = {RESIDENT: resident_loop, COMPILED: compiled_loop, FSDP: fsdp_loop, ZERO: zero_loop}


def has_zero() -> bool:
    """Return whether DeepSpeed is installed in this Python."""
    return importlib.util.find_spec("deepspeed") is not None


def blocks_of(net: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the blocks of a model: the members of its longest list of modules."""
    import torch

    lists = [module for module in net.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=len))
