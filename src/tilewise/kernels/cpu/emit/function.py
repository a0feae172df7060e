"""A small typed layer over LLVM's IR builder: a Python loop unrolls, `f.loop` emits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from ....core.isa import Isa
from . import checks, emulation
from .elements import Element
from .pointers import Pointer
from .values import (
    BOOL,
    F32,
    F64,
    I8,
    I32,
    I64,
    PTR,
    VOID,
    Flag,
    Index,
    Vector,
)


class Loop:
    """An emitted loop: `i` counts, `values` are carried from turn to turn and out of it."""

    def __init__(self, i: Index, values: list[Any]) -> None:
        self.i, self.values = i, values


class Function:
    """A function under construction; its arguments are attributes of `args`."""

    KINDS = {"pointer": (PTR, Pointer), "index": (I64, Index)}

    def __init__(self, module: Module, name: str, exported: bool, **kinds: str | Element) -> None:
        self.module, self.isa, self.name = module, module.isa, name
        self.kinds = {name_: "pointer" if isinstance(kind, Element) else kind
                      for name_, kind in kinds.items()}
        types = [self.KINDS[kind][0] for kind in self.kinds.values()]
        if module.sites is not None:
            types += checks.more_types(self.kinds)
        self.ir = ir.Function(module.ir, ir.FunctionType(VOID, types), name)
        self.ir.linkage = "external" if exported else "internal"
        for attribute in ("nounwind", "noinline"):
            self.ir.attributes.add(attribute)
        for attribute in self.isa.attributes:
            set.add(self.ir.attributes, attribute)  # llvmlite's own method knows only some
        self.ll = ir.IRBuilder(self.ir.append_basic_block("entry"))
        self.args: dict[str, Any] = {}
        for (name_, kind), value in zip(kinds.items(), self.ir.args):
            value.name = name_
            if kind != "index":
                value.add_attribute("noalias")
            self.args[name_] = (Pointer(self, value, kind) if isinstance(kind, Element)
                                else self.KINDS[kind][1](self, value))
        self.table: Any = None  # of checks
        if module.sites is not None:
            checks.receive(self, self.kinds)

    def __enter__(self) -> Function:
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        if failure is None:
            self.ll.ret_void()

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["args"][name]
        except KeyError:
            raise AttributeError(name) from None

    def intrinsic(self, name: str, result: Any, types: list[Any]) -> Any:
        if self.isa.emulated:
            name = emulation.named(self.module.ir, name, result, types)
        known = self.module.ir.globals.get(name)
        return known or ir.Function(self.module.ir, ir.FunctionType(result, types), name)

    def index(self, value: Index | int) -> Index:
        return value if isinstance(value, Index) else Index(self, ir.Constant(I64, value))

    def vector(self, value: float, lanes: int | None = None, work: Any = F32) -> Vector:
        """A constant in every lane."""
        lanes = lanes or self.isa.lanes
        return Vector(self, ir.Constant(ir.VectorType(work, lanes), value))

    def splat(self, scalar: Any, lanes: int | None = None) -> Vector:
        lanes = lanes or self.isa.lanes
        undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
        first = self.ll.insert_element(undefined, scalar, ir.Constant(I32, 0))
        everywhere = ir.Constant(ir.VectorType(I32, lanes), 0)
        return Vector(self, self.ll.shuffle_vector(first, undefined, everywhere))

    def leading(self, count: Index | int, lanes: int) -> Any:
        """A mask of the first `count` lanes."""
        if isinstance(count, int):
            return ir.Constant(ir.VectorType(BOOL, lanes), [int(i < count) for i in range(lanes)])
        kind = ir.VectorType(I64, lanes)
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.ll.insert_element(undefined, count.ir, ir.Constant(I32, 0))
        everywhere = ir.Constant(ir.VectorType(I32, lanes), 0)
        counts = self.ll.shuffle_vector(first, undefined, everywhere)
        return self.ll.icmp_signed("<", ir.Constant(kind, list(range(lanes))), counts)

    def fma(self, a: Vector, b: Vector, c: Vector) -> Vector:
        """a * b + c, rounded once where the instruction set can."""
        if not self.isa.fma:
            return a * b + c
        kind = a.ir.type
        bits = {F32: 32, F64: 64}[kind.element]
        fused = self.intrinsic(f"llvm.fma.v{a.lanes}f{bits}", kind, [kind] * 3)
        return Vector(self, self.ll.call(fused, [a.ir, b.ir, c.ir]))

    def words(self, count: int) -> Pointer:
        """A table of 64-bit words on the stack."""
        place = self.slot(checks.stack_bytes(self, 8 * count))
        return Pointer(self, place, home=checks.stack_home(self, place, 8 * count))

    def slot(self, bytes_: int = 8) -> Any:
        """A few bytes on the stack."""
        with self.ll.goto_entry_block():
            space = self.ll.alloca(I8, bytes_)
            space.align = 8
            opaque = self.ll.gep(space, [ir.Constant(I64, 0)], source_etype=I8)
        opaque.type = PTR  # llvmlite types allocations
        return opaque

    def call(self, callee: Function, *args: Any) -> None:
        values = [self.index(arg).ir if isinstance(arg, int) else arg.ir for arg in args]
        if self.module.sites is not None:
            values += checks.given(self, callee, args)
        self.ll.call(callee.ir, values)

    @contextmanager
    def loop(self, stop: Index | int, start: Index | int = 0, step: int = 1,
             carry: Sequence[Any] = ()) -> Iterator[Loop]:
        """for i in range(start, stop, step), with carried values."""
        last = self.index(stop)
        with self.repeat(lambda i: i < last, [self.index(start), *carry]) as turn:
            loop = Loop(turn.values[0], turn.values[1:])
            yield loop
            turn.values = [loop.i + step, *loop.values]
        loop.values = turn.values[1:]

    @contextmanager
    def repeat(self, test: Callable[[Any], Flag], carry: Sequence[Any]) -> Iterator[Loop]:
        """while test(first carried value), with carried values."""
        b, before = self.ll, self.ll.block
        head, body, after = (self.ir.append_basic_block(name) for name in ("head", "body", "after"))
        b.branch(head)
        b.position_at_end(head)
        phis = [b.phi(value.ir.type) for value in carry]
        for phi, value in zip(phis, carry, strict=True):
            phi.add_incoming(value.ir, before)
        entering = [value.like(phi) for value, phi in zip(carry, phis, strict=True)]
        b.cbranch(test(entering[0]).ir, body, after)
        b.position_at_end(body)
        loop = Loop(entering[0], list(entering))
        yield loop
        for phi, value in zip(phis, loop.values, strict=True):
            phi.add_incoming(value.ir, b.block)
        b.branch(head)
        b.position_at_end(after)
        loop.values = entering

    @contextmanager
    def when(self, condition: Flag) -> Iterator[None]:
        """Emit a branch taken where the condition holds."""
        with self.ll.if_then(condition.ir):
            yield

    @contextmanager
    def maybe(self, condition: Flag, carry: Sequence[Any]) -> Iterator[Loop]:
        """A branch taken where the condition holds; carried values leave it, or pass it by."""
        before = self.ll.block
        with self.ll.if_then(condition.ir):
            taken = Loop(self.index(0), list(carry))
            yield taken
            end = self.ll.block
        for i, (passed, made) in enumerate(zip(carry, taken.values, strict=True)):
            phi = self.ll.phi(passed.ir.type)
            phi.add_incoming(passed.ir, before)
            phi.add_incoming(made.ir, end)
            taken.values[i] = passed.like(phi)

    def either(self, condition: Flag) -> Any:
        """Two emitted branches: `with f.either(c) as (yes, no)`."""
        return self.ll.if_else(condition.ir)


class Module:
    """A compilation unit for one instruction set."""

    def __init__(self, isa: Isa) -> None:
        self.isa, self.ir = isa, ir.Module("tilewise")
        self.sites = checks.new_sites()

    def function(self, name: str, exported: bool = False, **kinds: str | Element) -> Function:
        """A new function; arguments are named with their kind: `pointer`, which is one to float32,
        an element, which is a pointer to such, or `index`."""
        return Function(self, name, exported, **kinds)
