"""Explicit vectors for Numba: 16 lanes of float32, uint32 or float64, and masks over them.

Numba's own loops over 16-bit integers run several times slower than memory, and its calls of
`exp` go to the C library one element at a time. These types put `<16 x float>` and the like
straight into LLVM's intermediate representation, from where any machine gets its best code (one
AVX-512 register, two AVX registers, four NEON registers). Nothing here is tied to one processor.

Inside a kernel the vectors behave like numbers: `+ - * / & | ^ <` work lane by lane on two vectors
of one type. A tail of fewer than 16 elements goes through the same code under a mask, so that an
element's result never depends on its position.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import extending, types
from numba.core.datamodel.models import PrimitiveModel
from numba.core.extending import lower_builtin, register_model, type_callable

from penstock.kernels.lanes import LANES as LANES  # also for importers of this module

# Outside kernels, these take the kernel's arguments without a typing context. Type checkers cannot
# know this.
intrinsic: Any = extending.intrinsic

_I1, _I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_SHORTS = ir.VectorType(_I16, LANES)
_BYTES = ir.VectorType(_I8, LANES)
_LONGS = ir.VectorType(_I64, LANES)
_LANE_TYPES = {"float32": ir.FloatType(), "float64": ir.DoubleType(), "uint32": _I32, "mask": _I1}


class Vector(types.Type):
    """The Numba type of a vector of 16 lanes."""

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self.ir = ir.VectorType(_LANE_TYPES[lane], LANES)
        super().__init__(name=f"Vector({lane} x {LANES})")


float32s, float64s, uint32s, mask = (Vector(x) for x in ("float32", "float64", "uint32", "mask"))


@register_model(Vector)
class _VectorModel(PrimitiveModel):
    def __init__(self, manager: Any, front_end_type: Vector) -> None:
        super().__init__(manager, front_end_type, front_end_type.ir)


# --- building blocks of code generation ----------------------------------------------------------


def _all(vector_type: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(vector_type, [value] * LANES)


def splat_scalar(builder: Any, scalar: Any) -> Any:
    """Generate the vector whose lanes all equal a scalar."""
    kind = ir.VectorType(scalar.type, LANES)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_I32, 0))
    lanes = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), lanes)


def call_llvm(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """Call an LLVM intrinsic, declaring it on first use in the module."""
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    function = builder.module.globals.get(name) or ir.Function(builder.module, signature, name)
    return builder.call(function, arguments)


def fetch_lines(builder: Any, pointer: Any, lines: int) -> None:
    """Generate the prefetch of some lines of 64 bytes into the first-level cache, from any address
    on."""
    pointer = builder.bitcast(pointer, _I8.as_pointer())
    # To be read, soon, data: the codes of LLVM's `prefetch`.
    codes = [ir.Constant(_I32, code) for code in (0, 3, 1)]
    for line in range(lines):
        address = builder.gep(pointer, [ir.Constant(_I64, 64 * line)])
        call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [address, *codes])


def element_pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Generate the address of an element of a flat array; also beyond it, for a prefetch."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


def _operator(function: Any, lanes: tuple[str, ...], result: str | None, name: str) -> None:
    """Give `function(vector, vector)` a type and the instruction called `name`."""

    @type_callable(function)
    def _typed(context: Any) -> Callable[..., Any]:
        def resolve(a: Any, b: Any) -> Any:
            if isinstance(a, Vector) and a == b and a.lane in lanes:
                return Vector(result or a.lane)
            return None

        return resolve

    for lane in lanes:

        @lower_builtin(function, Vector(lane), Vector(lane))
        def _lowered(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, b = arguments
            floating = signature.args[0].lane.startswith("float")
            if name == "<":
                compare = builder.fcmp_ordered if floating else builder.icmp_unsigned
                return compare("<", a, b)
            return getattr(builder, f"f{name}" if floating else name)(a, b)


_NUMBERS = ("float32", "float64", "uint32")
_operator(operator.add, _NUMBERS, None, "add")
_operator(operator.iadd, _NUMBERS, None, "add")
_operator(operator.sub, _NUMBERS, None, "sub")
_operator(operator.mul, _NUMBERS, None, "mul")
_operator(operator.truediv, ("float32", "float64"), None, "div")
_operator(operator.and_, ("uint32", "mask"), None, "and_")
_operator(operator.or_, ("uint32", "mask"), None, "or_")
_operator(operator.xor, ("uint32", "mask"), None, "xor")
_operator(operator.lt, _NUMBERS, "mask", "<")


# --- making vectors ------------------------------------------------------------------------------


@intrinsic
def splat(typing_context, value):
    """All lanes equal to a float32, float64 or uint32 scalar."""
    lane = str(value)
    if lane not in _NUMBERS:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return splat_scalar(builder, arguments[0])

    return Vector(lane)(value), generate


@intrinsic
def every_lane(typing_context):
    """The mask that is true everywhere."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _all(mask.ir, 1)

    return mask(), generate


def _lane_numbers() -> ir.Constant:
    return ir.Constant(uint32s.ir, list(range(LANES)))


@intrinsic
def first_lanes(typing_context, count):
    """The mask that is true in the first `count` lanes (an integer from 0 to 16)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = builder.trunc(arguments[0], _I32)
        return builder.icmp_unsigned("<", _lane_numbers(), splat_scalar(builder, number))

    return mask(types.int64), generate


@intrinsic
def lane_numbers(typing_context):
    """The uint32 vector 0, 1, ... 15."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _lane_numbers()

    return uint32s(), generate


# --- memory --------------------------------------------------------------------------------------


@intrinsic
def load(typing_context, array, index, lanes):
    """16 elements of a flat array from `index` on; masked-off lanes give 0 and are not touched.

    A float32 array gives a float32 vector, a uint32, uint16 or uint8 array a uint32 vector
    (zero-extended).
    """
    kinds = {
        "float32": (float32s.ir, "f32"),
        "uint32": (uint32s.ir, "i32"),
        "uint16": (_SHORTS, "i16"),
        "uint8": (_BYTES, "i8"),
    }
    kind = kinds.get(str(array.dtype))
    if kind is None:
        return None
    memory, letters = kind

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = element_pointer(context, builder, signature.args[0], *arguments[:2])
        pointer = builder.bitcast(pointer, memory.as_pointer())
        # Numba guarantees an element's alignment only; no machine asks for more here.
        alignment = ir.Constant(_I32, memory.element.get_abi_size(context.target_data))
        inputs = [pointer, alignment, arguments[2], _all(memory, 0)]
        value = call_llvm(builder, f"llvm.masked.load.v{LANES}{letters}.p0", memory, inputs)
        return value if memory == float32s.ir else builder.zext(value, uint32s.ir)

    return (float32s if memory == float32s.ir else uint32s)(array, types.intp, mask), generate


@intrinsic
def store(typing_context, array, index, value, lanes):
    """Write a vector to a flat array from `index` on; masked-off elements are not touched.

    float32 vectors go to float32 arrays, the low bits of uint32 vectors to uint16 and uint8 arrays,
    masks to bool arrays.
    """
    kinds = {
        ("float32", "float32"): (float32s.ir, "f32"),
        ("uint8", "uint32"): (_BYTES, "i8"),
        ("uint16", "uint32"): (_SHORTS, "i16"),
        ("uint32", "uint32"): (uint32s.ir, "i32"),
        ("bool", "mask"): (_BYTES, "i8"),
    }
    kind = kinds.get((str(array.dtype), getattr(value, "lane", "")))
    if kind is None:
        return None
    memory, letters = kind

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index, value, lanes = arguments
        pointer = element_pointer(context, builder, signature.args[0], array, index)
        pointer = builder.bitcast(pointer, memory.as_pointer())
        if getattr(signature.args[2], "lane", "") == "mask":
            value = builder.zext(value, memory)
        elif memory != signature.args[2].ir:
            value = builder.trunc(value, memory)
        alignment = ir.Constant(_I32, memory.element.get_abi_size(context.target_data))
        name = f"llvm.masked.store.v{LANES}{letters}.p0"
        call_llvm(builder, name, ir.VoidType(), [value, pointer, alignment, lanes])
        return context.get_dummy_value()

    return types.void(array, types.intp, value, mask), generate


@intrinsic
def look_up(typing_context, table, places):
    """The elements of a flat float32 array at the places in a uint32 vector, all of them within."""
    if str(table.dtype) != "float32" or places != uint32s:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, numbers = arguments
        value = ir.Constant(float32s.ir, ir.Undefined)
        for number in range(LANES):
            lane = ir.Constant(_I32, number)
            place = builder.zext(builder.extract_element(numbers, lane), _I64)
            pointer = element_pointer(context, builder, signature.args[0], array, place)
            value = builder.insert_element(value, builder.load(pointer), lane)
        return value

    return float32s(table, uint32s), generate


@intrinsic
def fetch(typing_context, array, index):
    """Prefetch 32 elements of a flat array from `index` on into the first-level cache.

    Harmless for any index, also beyond the end.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type = signature.args[0]
        pointer = element_pointer(context, builder, array_type, *arguments)
        fetch_lines(builder, pointer, array_type.dtype.bitwidth // 16)
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


# --- arithmetic ----------------------------------------------------------------------------------


@intrinsic
def fma(typing_context, a, b, c):
    """`a * b + c`, rounded once."""
    letters = {"float32": "f32", "float64": "f64"}[a.lane]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return call_llvm(builder, f"llvm.fma.v{LANES}{letters}", a.ir, list(arguments))

    return a(a, a, a), generate


@intrinsic
def square_root(typing_context, a):
    """The correctly rounded square root of a float32 vector."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return call_llvm(builder, f"llvm.sqrt.v{LANES}f32", a.ir, list(arguments))

    return float32s(float32s), generate


@intrinsic
def select(typing_context, condition, a, b):
    """`a` in the lanes where the mask is true, `b` elsewhere."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(*arguments)

    return a(mask, a, a), generate


@intrinsic
def greatest(typing_context, a, b):
    """The greater of two float32 vectors; `b` in the lanes where either is NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # One instruction on x86; llvm.maxnum would take three.
        return builder.select(builder.fcmp_ordered(">", *arguments), *arguments)

    return float32s(float32s, float32s), generate


@intrinsic
def is_nan(typing_context, a):
    """The mask of the lanes of a float32 vector that hold a NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fcmp_unordered("uno", arguments[0], arguments[0])

    return mask(float32s), generate


@intrinsic
def shift_left(typing_context, a, count):
    """Shift each lane of a uint32 vector up by `count` bits (0 to 31)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.shl(arguments[0], splat_scalar(builder, builder.trunc(arguments[1], _I32)))

    return uint32s(uint32s, types.int64), generate


@intrinsic
def shift_right(typing_context, a, count):
    """Shift each lane of a uint32 vector down by `count` bits (0 to 31), filling with zeros."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.lshr(arguments[0], splat_scalar(builder, builder.trunc(arguments[1], _I32)))

    return uint32s(uint32s, types.int64), generate


@intrinsic
def sign_extend_half(typing_context, a):
    """Read the low 16 bits of each uint32 lane as a signed number, in 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.sext(builder.trunc(arguments[0], _SHORTS), uint32s.ir)

    return uint32s(uint32s), generate


@intrinsic
def multiply_high(typing_context, a, b):
    """The high 32 bits of the 64-bit product of two uint32 vectors."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = [builder.zext(x, _LONGS) for x in arguments]
        return builder.trunc(builder.lshr(builder.mul(*wide), _all(_LONGS, 32)), uint32s.ir)

    return uint32s(uint32s, uint32s), generate


# --- conversions and sums over lanes -------------------------------------------------------------


@intrinsic
def bits_of(typing_context, a):
    """The bit patterns of a float32 vector."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], uint32s.ir)

    return uint32s(float32s), generate


@intrinsic
def from_bits(typing_context, a):
    """The float32 vector with these bit patterns."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], float32s.ir)

    return float32s(uint32s), generate


@intrinsic
def widened(typing_context, a):
    """A float32 vector as float64, exactly."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(arguments[0], float64s.ir)

    return float64s(float32s), generate


@intrinsic
def sum_lanes(typing_context, a):
    """The sum of the lanes of a float64 vector, added in the order of the lanes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        double = ir.DoubleType()
        start = ir.Constant(double, -0.0)
        return call_llvm(
            builder, f"llvm.vector.reduce.fadd.v{LANES}f64", double, [start, arguments[0]]
        )

    return types.float64(float64s), generate


@intrinsic
def greatest_lane(typing_context, a):
    """Return the greatest lane of a float32 vector; NaNs are ignored if there is a number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        name = f"llvm.vector.reduce.fmax.v{LANES}f32"
        return call_llvm(builder, name, ir.FloatType(), [arguments[0]])

    return types.float32(float32s), generate
