"""Which mode a model's modules train in: train or eval, as PyTorch's `module.training` says.

The mode of the whole says nothing: `from_pretrained` returns models in eval mode, and training
begins with `model.train()`. A part in eval mode within a model in train mode was put there by its
author, as of a frozen backbone or of a batch norm, and stays there.
"""

from torch import nn


def put_in_train_mode(module: nn.Module) -> None:
    """Put a model in eval mode in train mode as a whole; in one in train mode, leave every part."""
    if not module.training:
        module.train()


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
