"""Instructions of x86's matrix units as plain functions, for processors that lack them.

In a module of an emulated row, `Function.intrinsic` finds these instead. Each does what Intel's
manual says of its instruction: products of bfloat16 are added to float32 sums by fused
multiply-adds, rounded to nearest even; denormals count as zero, whatever the control register says.
Tiles are memory of the thread that has configured them. All others are stopped by an illegal
instruction, as the processor does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from .values import F32, I8, I16, I32, I64, PTR, VOID

ROWS, LINE, TILES = 16, 64, 8  # rows of a tile, bytes of a row, tiles of a thread
TILE = ROWS * LINE
SEATS = 32  # threads that can have tiles at once in a kernel; others wait
LANES = 16
FLOATS, WORDS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
EXPONENT, SIGN, UPPER = 0x7F80_0000, -1 << 31, -1 << 16
# palette one; of all eight tiles, bytes of a row, and rows
WHOLE = (1, 0, 0x0040_0040_0040_0040, 0x0040_0040_0040_0040, 0, 0, 0x1010_1010_1010_1010, 0)


def named(module: Any, name: str, result: Any, types: Sequence[Any]) -> str:
    """What an intrinsic is called in an emulated module: a function that is there from now on, or
    the intrinsic itself."""
    instruction = name.removeprefix("llvm.x86.")
    if instruction not in BODIES:
        return name
    ours = f"emulated.{instruction}"
    if ours not in module.globals:
        BODIES[instruction](_Body(module, ours, result, types))
    return ours


class _Body:
    """A function in the making."""

    def __init__(self, module: Any, name: str, result: Any, types: Sequence[Any]) -> None:
        self.module = module
        self.ir = ir.Function(module, ir.FunctionType(result, types), name)
        self.ir.linkage = "internal"
        for attribute in ("nounwind", "noinline"):
            self.ir.attributes.add(attribute)
        self.ll, self.args = ir.IRBuilder(self.ir.append_basic_block("entry")), self.ir.args

    def call(self, name: str, result: Any, types: Sequence[Any], args: Sequence[Any]) -> Any:
        known = self.module.globals.get(name)
        return self.ll.call(known or ir.Function(self.module, ir.FunctionType(result, types), name),
                            args)

    def loop(self, count: int, body: Callable[[Any], None]) -> None:
        """body(i) so many times."""
        before, turn, after = (self.ll.block, self.ir.append_basic_block(),
                               self.ir.append_basic_block())
        self.ll.branch(turn)
        self.ll.position_at_end(turn)
        i = self.ll.phi(I64)
        i.add_incoming(_word(0), before)
        body(i)
        following = self.ll.add(i, _word(1))
        i.add_incoming(following, self.ll.block)
        self.ll.cbranch(self.ll.icmp_unsigned("<", following, _word(count)), turn, after)
        self.ll.position_at_end(after)

    def stop_unless(self, good: Any) -> None:
        """An illegal instruction."""
        with self.ll.if_then(self.ll.not_(good)):
            self.call("llvm.trap", VOID, [], [])

    def at(self, base: Any, *offsets: Any) -> Any:
        """So many bytes behind a place."""
        for offset in offsets:
            base = self.ll.gep(base, [offset], source_etype=I8)
        base.type = PTR  # llvmlite types globals
        return base

    def load(self, place: Any, kind: Any) -> Any:
        return self.ll.load(place, align=1, typ=kind)

    # numbers

    def flushed(self, value: Any) -> Any:
        """Zero with its sign where a value is denormal."""
        words = self.ll.bitcast(value, WORDS)
        small = self.ll.icmp_unsigned("==", self.masked(words, EXPONENT), _same(0))
        return self.ll.bitcast(self.ll.select(small, self.masked(words, SIGN), words), FLOATS)

    def masked(self, words: Any, bits: int) -> Any:
        return self.ll.and_(words, _same(bits))

    def halves(self, pairs: Any) -> tuple[Any, Any]:
        """The lower and the upper bfloat16 of every word, as floats."""
        return (self.flushed(self.ll.shl(pairs, _same(16))),
                self.flushed(self.masked(pairs, UPPER)))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.flushed(self.call("llvm.fma.v16f32", FLOATS, [FLOATS] * 3, [a, b, c]))

    def sum(self, a: Any, b: Any) -> Any:
        return self.flushed(self.ll.fadd(self.flushed(a), self.flushed(b)))

    def splat(self, word: Any) -> Any:
        undefined = ir.Constant(WORDS, ir.Undefined)
        first = self.ll.insert_element(undefined, word, ir.Constant(I32, 0))
        return self.ll.shuffle_vector(first, undefined, _same(0))

    def rounded(self, value: Any) -> Any:
        """The nearest bfloat16s as 16-bit integers; NaN stays NaN, and is quiet."""
        ll, words = self.ll, self.ll.bitcast(self.flushed(value), WORDS)
        even = ll.and_(ll.lshr(words, _same(16)), _same(1))
        near = ll.lshr(ll.add(words, ll.add(even, _same(0x7FFF))), _same(16))
        quiet = ll.or_(ll.lshr(words, _same(16)), _same(0x40))
        nan = ll.fcmp_unordered("uno", value, value)
        return ll.trunc(ll.select(nan, quiet, near), ir.VectorType(I16, LANES))

    # tiles

    def seats(self) -> Any:
        """The owner of every seat, and behind them their tiles."""
        name = "emulated.tiles"
        if name not in self.module.globals:
            kind = ir.ArrayType(I8, SEATS * (8 + TILES * TILE))
            made = ir.GlobalVariable(self.module, kind, name)
            made.linkage, made.align, made.initializer = "internal", 64, ir.Constant(kind, None)
        return self.module.globals[name]

    def me(self) -> Any:
        """A number of this thread: the address of its control block."""
        return self.ll.ptrtoint(self.call("llvm.thread.pointer.p0", PTR, [], []), I64)

    def owner(self, seat: Any) -> Any:
        return self.at(self.seats(), self.ll.shl(seat, _word(3)))

    def mine(self) -> Any:
        """This thread's seat, as a number; an illegal instruction where it has none."""
        name = "emulated.mine"
        if name not in self.module.globals:
            _find(_Body(self.module, name, I64, []))
        return self.ll.call(self.module.globals[name], [])

    def tiles(self) -> Any:
        """Where this thread's begin."""
        return self.tiles_of(self.mine())

    def tiles_of(self, seat: Any) -> Any:
        return self.at(self.seats(), _word(8 * SEATS), self.ll.mul(seat, _word(TILES * TILE)))

    def tile(self, tiles: Any, number: Any) -> Any:
        return self.at(tiles, self.ll.mul(self.ll.zext(number, I64), _word(TILE)))


def _word(value: int) -> Any:
    return ir.Constant(I64, value)


def _same(value: int) -> Any:
    return ir.Constant(WORDS, [value] * LANES)


def _find(f: _Body) -> None:
    """The seat whose owner is this thread."""
    me = f.me()

    def look(i: Any) -> None:
        found = f.ll.icmp_unsigned("==", f.ll.load_atomic(
            f.owner(i), "monotonic", 8, typ=I64), me)
        with f.ll.if_then(found):
            f.ll.ret(i)

    f.loop(SEATS, look)
    f.call("llvm.trap", VOID, [], [])
    f.ll.unreachable()


def _configure(f: _Body) -> None:
    """Take a free seat, and clear its tiles; kernels use whole tiles alone."""
    table, = f.args
    for i, word in enumerate(WHOLE):
        found = f.load(f.at(table, _word(8 * i)), I64)
        f.stop_unless(f.ll.icmp_unsigned("==", found, _word(word)))
    me, end = f.me(), f.ir.append_basic_block("taken")
    place = f.ll.alloca(I64)
    again = f.ir.append_basic_block("again")
    f.ll.branch(again)
    f.ll.position_at_end(again)

    def take(i: Any) -> None:
        answer = f.ll.cmpxchg(f.owner(i), _word(0), me, "acquire", "monotonic")
        f.ll.store(i, place)
        following = f.ir.append_basic_block()
        f.ll.cbranch(f.ll.extract_value(answer, 1), end, following)
        f.ll.position_at_end(following)

    f.loop(SEATS, take)
    f.ll.branch(again)  # until one is free
    f.ll.position_at_end(end)
    tiles = f.tiles_of(f.ll.load(place))
    f.loop(TILES * ROWS, lambda i: _clear(f, f.at(tiles, f.ll.mul(i, _word(LINE)))))
    f.ll.ret_void()


def _clear(f: _Body, row: Any) -> None:
    f.ll.store(_same(0), row, align=1)


def _release(f: _Body) -> None:
    f.ll.atomic_rmw("xchg", f.owner(f.mine()), _word(0), "release")
    f.ll.ret_void()


def _zero(f: _Body) -> None:
    tile = f.tile(f.tiles(), f.args[0])
    f.loop(ROWS, lambda i: _clear(f, f.at(tile, f.ll.mul(i, _word(LINE)))))
    f.ll.ret_void()


def _rows(f: _Body) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Where the i-th row is: of the tile, and in memory."""
    number, memory, pitch = f.args
    tile = f.tile(f.tiles(), number)
    return (lambda i: f.at(tile, f.ll.mul(i, _word(LINE))),
            lambda i: f.at(memory, f.ll.mul(i, pitch)))


def _load(f: _Body) -> None:
    held, memory = _rows(f)
    f.loop(ROWS, lambda i: f.ll.store(f.load(memory(i), WORDS), held(i), align=1))
    f.ll.ret_void()


def _store(f: _Body) -> None:
    held, memory = _rows(f)
    f.loop(ROWS, lambda i: f.ll.store(f.load(held(i), WORDS), memory(i), align=1))
    f.ll.ret_void()


def _multiply_tiles(f: _Body) -> None:
    """Sums of lower and of upper products from zero, then both together, then to what was there."""
    tiles = f.tiles()
    c, a, b = (f.tile(tiles, number) for number in f.args)

    def row(i: Any) -> None:
        line = f.ll.mul(i, _word(LINE))
        sums = [ir.Constant(FLOATS, [0.0] * LANES)] * 2
        for k in range(LINE // 4):
            left = f.halves(f.splat(f.load(f.at(a, line, _word(4 * k)), I32)))
            right = f.halves(f.load(f.at(b, _word(LINE * k)), WORDS))
            sums = [f.fma(x, y, z) for x, y, z in zip(left, right, sums, strict=True)]
        here = f.at(c, line)
        f.ll.store(f.sum(f.load(here, FLOATS), f.sum(*sums)), here, align=1)

    f.loop(ROWS, row)
    f.ll.ret_void()


def _multiply_pairs(f: _Body) -> None:
    """The upper products first."""
    sums, a, b = f.args
    left, right = (f.halves(f.ll.bitcast(pairs, WORDS)) for pairs in (a, b))
    for half in (1, 0):
        sums = f.fma(left[half], right[half], f.flushed(sums))
    f.ll.ret(sums)


def _narrow(f: _Body) -> None:
    f.ll.ret(f.ll.bitcast(f.rounded(f.args[0]), f.ir.function_type.return_type))


def _narrow_both(f: _Body) -> None:
    """The second operand's come first."""
    high, low = (f.rounded(value) for value in f.args)
    every = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(2 * LANES)))
    f.ll.ret(f.ll.bitcast(f.ll.shuffle_vector(low, high, every), f.ir.function_type.return_type))


BODIES: dict[str, Callable[[_Body], None]] = {
    "ldtilecfg": _configure,
    "tilerelease": _release,
    "tilezero": _zero,
    "tileloadd64": _load,
    "tileloaddt164": _load,  # the same, with a hint
    "tilestored64": _store,
    "tdpbf16ps": _multiply_tiles,
    "avx512bf16.dpbf16ps.512": _multiply_pairs,
    "avx512bf16.cvtneps2bf16.512": _narrow,
    "avx512bf16.cvtne2ps2bf16.512": _narrow_both,
}
