"""Lines of `penstock inspect` about weights."""

import math
from collections.abc import Mapping

from penstock.progress import show_count, show_sparsity


def sparse_lines(shapes: Mapping[str, tuple[int, ...]], kept: Mapping[str, int]) -> list[str]:
    """Return a line for all sparse weights together and one for each; none if there are none."""
    if not shapes:
        return []
    elements = {name: math.prod(shape) for name, shape in shapes.items()}
    lines = [
        f"sparse       {len(elements)} weights: "
        f"{_entries(sum(kept.values()), sum(elements.values()))}"
    ]
    for name, shape in shapes.items():
        size = " x ".join(map(str, shape))
        lines.append(f"             {name} [{size}]: {_entries(kept[name], elements[name])}")
    return lines


def _entries(kept: int, elements: int) -> str:
    return f"sparsity {show_sparsity(1 - kept / elements)}, {kept:,} of {elements:,} entries"


def counted(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the numbers of parameters and of weights."""
    parameters = sum(math.prod(shape) for shape in shapes.values())
    return f"{show_count(parameters)} parameters in {len(shapes)} weights"
