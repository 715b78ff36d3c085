"""The training mode of a model's modules: train or eval, as in PyTorch's `module.training`.

The mode of the whole model has no meaning: `from_pretrained` returns models in eval mode, and
training begins with `model.train()`. A part in eval mode within a model in train mode was set by
its author, for example a frozen backbone or a batch norm, and keeps its mode.
"""

from torch import nn


def put_in_train_mode(module: nn.Module) -> nn.Module:
    """Put a model in eval mode completely into train mode; leave a model in train mode unchanged.

    The model is returned.
    """
    return module if module.training else module.train()


def parts_in_eval_mode(module: nn.Module) -> list[str]:
    """Return the paths of the outermost modules in eval mode."""
    found: list[str] = []

    def look(path: str, owner: nn.Module) -> None:
        if not owner.training:
            found.append(path)
            return
        for name, child in owner.named_children():
            look(f"{path}.{name}" if path else name, child)

    look("", module)
    return found
