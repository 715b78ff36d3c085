"""Lines of `penstock inspect` about weights."""

import math
import re
from collections.abc import Mapping

from penstock.progress import show_count, show_sparsity

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer


def sparse_lines(shapes: Mapping[str, tuple[int, ...]], kept: Mapping[str, int]) -> list[str]:
    """Return a line for all sparse weights together, and one for those of the same name and shape
    in all layers; none if there are none."""
    if not shapes:
        return []
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, shape in shapes.items():
        alike.setdefault((_NUMBER.sub("*", name), shape), []).append(name)
    total, every = sum(kept.values()), sum(map(math.prod, shapes.values()))
    share = show_sparsity(1 - total / every)
    lines = [f"sparse       {len(shapes)} weights: {_entries(share, total, every)}"]
    for (pattern, shape), names in alike.items():
        size = " x ".join(map(str, shape))
        named = f"{pattern} [{size}], {len(names)} weights" if names[1:] else f"{names[0]} [{size}]"
        found, each = [kept[name] for name in names], math.prod(shape)
        least, greatest = (show_sparsity(1 - count / each) for count in (max(found), min(found)))
        shares = least if least == greatest else f"{least} to {greatest}"
        lines.append(f"             {named}: {_entries(shares, sum(found), each * len(names))}")
    return lines


def _entries(sparsity: str, kept: int, elements: int) -> str:
    return f"sparsity {sparsity}, {kept:,} of {elements:,} entries"


def counted(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the numbers of parameters and of weights."""
    parameters = sum(math.prod(shape) for shape in shapes.values())
    return f"{show_count(parameters)} parameters in {len(shapes)} weights"
