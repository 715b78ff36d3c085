"""What a thread of a core does: a list of instructions, with loops.

Every instruction takes the cycles that the parameters of the core say for it, and a vector
operation those of the closed form. Streams between a core and its router move a word in
`word_cycles`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Unpack

from penstock.errors import MeshError, did_you_mean
from penstock.kernels import mesh_tables as tables
from penstock.wafer.language.arrays import Counter, Part, Register
from penstock.wafer.language.colours import Colour
from penstock.wafer.language.instructions import Instruction, VectorOptions, check_words
from penstock.wafer.parameters import CoreParameters

COMPUTE, RECEIVE, SEND = range(3)
_CELL_KINDS = {"add": 0, "subtract": 1, "multiply": 2, "divide": 3, "root": 4}


class Code:
    """Instructions of one thread; each method adds some.

    Attributes:
        value: the number in the word that started a task (a part of one element).
        index: the register with that word's index.
    """

    def __init__(self, core: CoreParameters, thread: int, rounds: bool, pack: int) -> None:
        self.core = core
        self.thread = thread
        self.rounds = rounds
        self.pack = pack
        self.rows: list[Instruction] = []
        self.value = Part("word", thread, -1, 0, 0, tables.THREADS, 1, 4)
        self.index = Register(thread, "index")
        self.takes: set[int] = set()
        self.sends: set[int] = set()

    # --- vector operations ------------------------------------------------------------------------

    def axpy(self, y: Part, x: Part, a: Part | float, **options: Unpack[VectorOptions]) -> None:
        """y += a x."""
        self._vector("axpy", tables.AXPY, y, x, None, a, **options)

    def linear(
        self, d: Part, c: Part, b: Part, a: Part | float, **options: Unpack[VectorOptions]
    ) -> None:
        """d = c + a b."""
        self._vector("linear", tables.LINEAR, d, b, c, a, **options)

    def add(self, d: Part, b: Part, c: Part, **options: Unpack[VectorOptions]) -> None:
        """d = b + c."""
        self._vector("add", tables.LINEAR, d, b, c, 1.0, **options)

    def scale(
        self, d: Part, b: Part, a: Part | float = 1.0, **options: Unpack[VectorOptions]
    ) -> None:
        """d = a b; a copy where a is 1."""
        self._vector("scale", tables.LINEAR, d, b, None, a, **options)

    def multiply(self, d: Part, b: Part, c: Part, **options: Unpack[VectorOptions]) -> None:
        """d = b c, element by element."""
        self._vector("multiply", tables.MULTIPLY, d, b, c, 1.0, **options)

    def fill(self, d: Part, a: Part | float = 0.0, **options: Unpack[VectorOptions]) -> None:
        """d = a."""
        self._vector("fill", tables.FILL, d, None, None, a, **options)

    def dot(self, cell: Part, b: Part, c: Part, **options: Unpack[VectorOptions]) -> None:
        """cell = the sum of b c, in 32 bits; its cycles are those of `dot_cycles`."""
        self._vector("dot", tables.DOT, cell, b, c, 1.0, **options)

    def _vector(
        self,
        name: str,
        op: int,
        d: Part,
        b: Part | None,
        c: Part | None,
        a: Part | float,
        *,
        factor: float = 1.0,
        set_up: float | None = None,
        elements: int | None = None,
        after: float = 0.0,
    ) -> None:
        """Add a vector operation.

        Args:
            factor: by which `a` is multiplied.
            set_up: cycles instead of `vector_cycles`.
            elements: that take cycles, if not all of them do (padding), or none (hidden).
            after: cycles besides, such as `drain_cycles` where the result is waited for.
        """
        length = b.length if op == tables.DOT and b is not None else d.length
        for part in (b, c):
            if part is not None and part.length != length:
                raise MeshError(
                    f"{name} of {d.name}: expected operands of {length} elements, got "
                    f"{part.length} of {part.name}"
                )
        for single in (d if op == tables.DOT else None, a):
            if isinstance(single, Part) and single.length != 1:
                raise MeshError(
                    f"{name} of {d.name}: expected one element of {single.name}, got "
                    f"{single.length}"
                )
        count = length if elements is None else elements
        width = b.element_bytes if b is not None else d.element_bytes
        cost = self.core.dot_cycles if op == tables.DOT else self.core.elements_cycles
        cycles = self.core.vector_cycles if set_up is None else set_up
        cycles += (cost(count, width) if count else 0.0) + after
        row = Instruction(f"{name} of {d.name}", op, cycles, factor=factor)
        row.fields.update({tables.LENGTH: length, tables.ON_PATH: 1})
        row.fields[tables.ROUNDS] = int(self.rounds and d.element_bytes == 2)
        row.operand(tables.D, d)
        row.operand(tables.B, b)
        row.operand(tables.C, c)
        if isinstance(a, Part):
            row.operand(tables.S, a)
        else:
            row.factor *= a
        self.rows.append(row)

    def cells(self, kind: str, d: Part, a: Part, b: Part | None = None) -> None:
        """d = a `kind` b for single elements: add, subtract, multiply, divide; or root of a."""
        if kind not in _CELL_KINDS:
            raise MeshError(
                f"cells: expected {', '.join(_CELL_KINDS)}, got {kind!r}"
                f"{did_you_mean(kind, _CELL_KINDS)}"
            )
        row = Instruction(f"{kind} to {d.name}", tables.CELL, self.core.scalar_cycles)
        row.fields.update({tables.AMOUNT: _CELL_KINDS[kind], tables.LENGTH: 1, tables.ON_PATH: 1})
        row.operand(tables.D, d)
        row.operand(tables.B, a)
        row.operand(tables.C, b if b is not None else a)
        self.rows.append(row)

    # --- streams ----------------------------------------------------------------------------------

    def stream(
        self,
        count: int | Register,
        *,
        take: Colour | None = None,
        send: Colour | None = None,
        into: Part | None = None,
        source: Part | None = None,
        plus: Part | None = None,
        gates: tuple[Counter, ...] = (),
        signals: tuple[Counter, ...] = (),
        clears: bool = False,
        adds: bool = False,
        is_ring: bool = False,
        pack: int | None = None,
        set_up: float = 0.0,
        hinders: bool = False,
    ) -> None:
        """Move words one after the other: the sum of what is taken, `source` and `plus` goes to
        `send` or `into`.

        Args:
            count: words.
            gates: counters of which each word takes one, and waits for it.
            signals: counters to which each word adds one.
            clears: `source` is zero afterwards.
            adds: `into` keeps what it had, and the word is added.
            is_ring: the parts are rings, used again from their beginning.
            pack: elements per word; 2 of 16 bits, 1 of 32 bits, by default that of the program.
            set_up: cycles before the first word.
            hinders: a wait for a counter counts as blocked, not as starved.

        Raises:
            MeshError: more than two gates or signals, or parts that do not fill words.
        """
        _require_two(gates, signals)
        each = self.pack if pack is None else pack
        for part in (into, source, plus):
            if part is not None:
                check_words(part, each, is_whole=is_ring)
        if set_up:
            self.work(set_up)
        row = Instruction("stream", tables.STREAM)
        fields = row.fields
        if isinstance(count, Register):
            fields[tables.LENGTH_REGISTER] = count.number
        else:
            fields[tables.LENGTH] = count
        if take is not None:
            fields[tables.IN_COLOUR] = take.number
            self.takes.add(take.number)
            row.what += f" from {take.name}"
        if send is not None:
            fields[tables.OUT_COLOUR] = send.number
            self.sends.add(send.number)
            row.what += f" to {send.name}"
        for place, part in ((tables.D, into), (tables.B, source), (tables.C, plus)):
            row.operand(place, part, part.length if part is not None and is_ring else 0)
            if part is not None:
                row.what += f" with {part.name}"
        for place, counter in zip((tables.GATE, tables.SECOND_GATE), gates, strict=False):
            fields[place] = counter.number
        for place, counter in zip((tables.SIGNAL, tables.SECOND_SIGNAL), signals, strict=False):
            fields[place] = counter.number
        fields[tables.CLEARS] = int(clears)
        fields[tables.ADDS] = int(adds)
        fields[tables.PACK] = each
        fields[tables.ROUNDS] = int(self.rounds and each == 2)
        fields[tables.COUNTER_CLASS] = tables.BLOCKED if hinders else tables.STARVED
        self.rows.append(row)

    def receive(
        self, d: Part, take: Colour, *, adds: bool = False, pack: int | None = None
    ) -> None:
        """Store the words of a colour in a part, or add them to it; one vector operation."""
        words, set_up = self._words(d, pack), self.core.vector_cycles
        self.stream(words, take=take, into=d, adds=adds, pack=pack, set_up=set_up)

    def send(self, b: Part, to: Colour, *, pack: int | None = None) -> None:
        """Send a part as words of a colour; one vector operation."""
        words, set_up = self._words(b, pack), self.core.vector_cycles
        self.stream(words, send=to, source=b, pack=pack, set_up=set_up)

    def receive_add_send(
        self, b: Part, take: Colour, to: Colour, *, pack: int | None = None
    ) -> None:
        """Add a part to the words of a colour, and send the sums on; one vector operation."""
        words, set_up = self._words(b, pack), self.core.vector_cycles
        self.stream(words, take=take, send=to, source=b, pack=pack, set_up=set_up)

    def _words(self, part: Part, pack: int | None) -> int:
        """Return the words of a part.

        Raises:
            MeshError: it does not fill its last word.
        """
        each = self.pack if pack is None else pack
        check_words(part, each, is_whole=True)
        return part.length // each

    def send_control(self, to: Colour) -> None:
        """Send a control word."""
        self.sends.add(to.number)
        row = Instruction(f"control to {to.name}", tables.SEND_CONTROL, self.core.scalar_cycles)
        row.fields[tables.OUT_COLOUR] = to.number
        self.rows.append(row)

    def take(self, colour: Colour) -> None:
        """Wait for the next word of a colour; its number is the new `value`."""
        self.takes.add(colour.number)
        self.rows.append(
            Instruction(
                f"take from {colour.name}", tables.TAKE, fields={tables.IN_COLOUR: colour.number}
            )
        )

    # --- counters, registers, control -------------------------------------------------------------

    def work(self, cycles: float) -> None:
        """Take cycles, on the data path of the core."""
        if cycles:
            self.rows.append(Instruction("work", tables.WORK, cycles, {tables.ON_PATH: 1}))

    def wait(self, counter: Counter, amount: int = 1, *, hinders: bool = False) -> None:
        """Wait until a counter has an amount, and take it away; `hinders` as in `stream`."""
        state = tables.BLOCKED if hinders else tables.STARVED
        values = {
            tables.GATE: counter.number,
            tables.AMOUNT: amount,
            tables.COUNTER_CLASS: state,
        }
        self.rows.append(Instruction(f"wait for {counter.name}", tables.WAIT, fields=values))

    def post(self, counter: Counter, amount: int = 1) -> None:
        """Add to a counter."""
        values = {tables.SIGNAL: counter.number, tables.AMOUNT: amount}
        self.rows.append(Instruction(f"post to {counter.name}", tables.POST, fields=values))

    def set(self, register: Register, value: int) -> None:
        """Give a register a value."""
        self._register(tables.SET, register, {tables.AMOUNT: value})

    def advance(self, register: Register, by: int = 1, modulo: int = 0) -> None:
        """Add to a register, modulo a number if one is given."""
        self._register(tables.ADVANCE, register, {tables.AMOUNT: by, tables.MODULO: modulo})

    def _register(self, op: int, register: Register, values: dict[int, int]) -> None:
        values[tables.D + tables.REGISTER] = register.number
        self.rows.append(Instruction(f"register {register.name}", op, fields=values))

    @contextmanager
    def loop(
        self, register: Register, count: int | Register, *, cycles: float | None = None
    ) -> Iterator[None]:
        """Repeat what follows, with the register from 0 up; at least once.

        Args:
            cycles: of an iteration besides its body; by default `loop_cycles`.

        Raises:
            MeshError: a count below 1.
        """
        if isinstance(count, int) and count < 1:
            raise MeshError(f"loop over {register.name}: expected 1 turn or more, got {count}")
        self.set(register, 0)
        start = len(self.rows)
        yield
        each = self.core.loop_cycles if cycles is None else cycles
        row = Instruction(f"loop over {register.name}", tables.LOOP, each, {tables.TARGET: start})
        row.fields[tables.D + tables.REGISTER] = register.number
        if isinstance(count, Register):
            row.fields[tables.LENGTH_REGISTER] = count.number
        else:
            row.fields[tables.LENGTH] = count
        self.rows.append(row)

    @contextmanager
    def when_equal(self, register: Register, value: int) -> Iterator[None]:
        """Do what follows only if a register has a value."""
        values = {tables.D + tables.REGISTER: register.number, tables.AMOUNT: value}
        row = Instruction(f"if {register.name}", tables.JUMP_UNLESS_EQUAL, fields=values)
        self.rows.append(row)
        yield
        row.fields[tables.TARGET] = len(self.rows)

    @contextmanager
    def when_less(self, a: Part, b: Part) -> Iterator[None]:
        """Do what follows only if the element `a` is less than the element `b`."""
        row = Instruction(f"if {a.name}", tables.JUMP_UNLESS_LESS, self.core.scalar_cycles)
        row.operand(tables.B, a)
        row.operand(tables.C, b)
        self.rows.append(row)
        yield
        row.fields[tables.TARGET] = len(self.rows)


def _require_two(gates: tuple[Counter, ...], signals: tuple[Counter, ...]) -> None:
    """An instruction has two fields for either."""
    if len(gates) > 2 or len(signals) > 2:
        raise MeshError(
            f"stream: expected at most 2 gates and 2 signals, got {len(gates)} and {len(signals)}"
        )
