"""One instruction of a thread, and the checks that streams and their shorter forms share."""

from dataclasses import dataclass, field
from typing import TypedDict

from penstock.errors import MeshError
from penstock.wafer.language.arrays import Part


class VectorOptions(TypedDict, total=False):
    """Of a vector operation: what it takes besides its operands."""

    factor: float
    set_up: float | None
    elements: int | None
    after: float


@dataclass
class Instruction:
    """One row of the code: fields by number, and what they are in words."""

    what: str
    op: int
    cycles: float = 0.0
    fields: dict[int, int] = field(default_factory=dict)
    factor: float = 1.0
    parts: list[Part] = field(default_factory=list)

    def operand(self, place: int, part: Part | None, ring: int = 0) -> None:
        """Set one of the operands."""
        if part is None:
            return
        values = (part.base, part.register, part.stride, part.low, part.high, ring)
        self.fields.update({place + number: value for number, value in enumerate(values)})
        self.parts.append(part)


def check_words(part: Part, each: int, *, is_whole: bool) -> None:
    """Refuse a part whose elements do not fit words of `each` elements."""
    if each == 2 and part.element_bytes != 2:
        raise MeshError(
            f"{part.name}: expected elements of 16 bits, two in a word, got elements of "
            f"{8 * part.element_bytes} bits; pass pack=1"
        )
    if is_whole and part.length % each:
        raise MeshError(
            f"{part.name}: expected elements that fill words of {each}, got {part.length}; add "
            "zeros (`program.padded`)"
        )
