"""Prefetches the rows of a panel that later segments read.

Segments are ordered by length, so the hardware prefetcher cannot predict the addresses of their
rows. The prefetch was measured on Zen 3 and Zen 5, and not on Arm.
"""

from typing import Any

from llvmlite import ir
from numba.core import types

from penstock.kernels.vectors import LANES, element_pointer, fetch_lines, intrinsic

_I64 = ir.IntType(64)
_SEGMENTS_AHEAD = 4  # 1 to 4 made no clear difference on Zen 3, 2 to 8 none on Zen 5


@intrinsic
def fetch_row_ahead(typing_context, panel, at, segment_rows, segment, end_segment, width):
    """In a kernel: prefetch the row of a later segment.

    Arguments: the panel and where the first row begins there; the row of each segment; the segment
    that is multiplied now and the end of the segments; `width`.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds, (panel, at, segment_rows, segment, end_segment, _) = signature.args, arguments
        later = builder.add(segment, ir.Constant(_I64, _SEGMENTS_AHEAD))
        is_within = builder.icmp_signed("<", later, end_segment)
        later = builder.select(is_within, later, segment)
        row = builder.load(element_pointer(context, builder, kinds[2], segment_rows, later))
        row_tokens = width.count * LANES
        first = builder.mul(builder.sext(row, _I64), ir.Constant(_I64, row_tokens))
        place = element_pointer(context, builder, kinds[0], panel, builder.add(at, first))
        row_bytes = row_tokens * kinds[0].dtype.bitwidth // 8
        fetch_lines(builder, place, row_bytes // 64)
        return context.get_dummy_value()

    places = (segment_rows, types.intp, types.intp)
    return types.void(panel, types.intp, *places, width), generate
