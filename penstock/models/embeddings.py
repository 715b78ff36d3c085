"""The weights of a model that sparse training leaves dense by default: embeddings and heads.

An embedding is looked up by row and takes no product; sparsity of embeddings and of the output
head costs most quality per saved entry, so the literature leaves them dense (Evci et al., 2020;
Thangarasa et al., 2023).
"""

from typing import Any

from torch import nn


def embeddings_and_head(module: nn.Module) -> list[str]:
    """Return the names of the weights of all embeddings of a model, and of its output head.

    The head is known for models of `transformers`. A tied weight may have any of its names.
    """
    head = _output_head(module)
    chosen = {
        path: child
        for path, child in module.named_modules()
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) or id(child) == id(head)
    }
    return [
        f"{path}.{name}" if path else name
        for path, child in chosen.items()
        for name, _ in child.named_parameters(recurse=False)
    ]


def _output_head(module: nn.Module) -> nn.Module | None:
    find: Any = getattr(module, "get_output_embeddings", None)
    found = find() if callable(find) else None
    return found if isinstance(found, nn.Module) else None
