"""Bounds checks in generated code, for the mode `TILEWISE_CHECK=1`.

Every pointer has a home: the memory that it may touch. A load or store that leaves it goes to a
sink instead, and its site and offset go to the table that the frame names. No branches: code keeps
its form. Without the mode, nothing is emitted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llvmlite import ir

from .values import BOOL, I64, PTR

if TYPE_CHECKING:
    from .function import Function
    from .pointers import Pointer

FRAME = 48  # words of a frame
CHECKS = 14  # the word of a frame that has the table's address
# words of the table: what was found, where the same goes for accesses that are right, the start
# and bytes of the memory of each of the frame's first words, zeros to load, and a sink for stores
REPORT, UNUSED, ROWS, ZEROS, SINK, WORDS = 0, 2, 4, 32, 32 + 512, 32 + 1024
LARGEST = 8 * 512  # bytes of an access
SHIFT = 44  # of the site in a report; below it the offset, moved so that it is positive
MIDDLE = 1 << (SHIFT - 1)

_checked: ContextVar[bool] = ContextVar("checked", default=False)
_HERE = str(Path(__file__).parent)


class Site(NamedTuple):
    """A load or store in generated code, and the line that wrote it."""

    function: str
    verb: str
    bytes: int  # at most
    line: str


class Home(NamedTuple):
    """The memory of a pointer, in code.

    Addresses that lie in it: of a "frame", they have rows of the table; in one that "keeps" homes,
    those lie behind it; in "plain" memory, they point into the same.
    """

    start: Any
    bytes: Any
    kind: str = "plain"


@contextmanager
def checking(on: bool) -> Iterator[None]:
    """Modules that are begun meanwhile have checks, or not."""
    before = _checked.set(on)
    try:
        yield
    finally:
        _checked.reset(before)


def new_sites() -> list[Site] | None:
    """A module's accesses; None for one without checks."""
    return [] if _checked.get() else None


# how homes travel between functions: as arguments behind the written ones

def more_types(kinds: dict[str, str]) -> list[Any]:
    """Of the table, where there is no frame to find it in, and two words for every pointer."""
    table = [] if "frame" in kinds else [PTR]
    return table + [I64, I64] * sum(_has_home(*one) for one in kinds.items())


def receive(f: Function, kinds: dict[str, str]) -> None:
    more = iter(f.ir.args[len(kinds):])
    if "frame" in kinds:
        frame = f.args["frame"]
        frame.home = Home(f.ll.ptrtoint(frame.ir, I64), _word(8 * FRAME), "frame")
        f.table = f.ll.load(_at(f, frame.ir, _word(8 * CHECKS)), align=8, typ=PTR)
    else:
        f.table = next(more)
    for name, kind in kinds.items():
        if _has_home(name, kind):
            f.args[name].home = Home(next(more), next(more), "keeps")


def given(f: Function, callee: Function, args: Sequence[Any]) -> list[Any]:
    """What `receive` finds."""
    values = [] if "frame" in callee.kinds else [f.table]
    for (name, kind), arg in zip(callee.kinds.items(), args, strict=True):
        if _has_home(name, kind):
            values += [arg.home.start, arg.home.bytes]
    return values


def _has_home(name: str, kind: str) -> bool:
    return kind == "pointer" and name != "frame"


# homes of pointers that come from memory

def stack_home(f: Function, at: Any, bytes_: int) -> Home | None:
    """Of words on the stack; see `stack_bytes`."""
    if f.module.sites is None:
        return None
    return Home(f.ll.ptrtoint(at, I64), _word(bytes_), "keeps")


def stack_bytes(f: Function, bytes_: int) -> int:
    """With room for the homes of addresses."""
    return bytes_ if f.module.sites is None else 3 * bytes_


def loaded_home(table: Pointer, i: int) -> Home | None:
    """Of the address that is the i-th word of a table."""
    f, home = table.f, table.home
    if home is None or home.kind == "plain":
        return home
    if home.kind == "frame":
        at = _at(f, f.table, _word(8 * (ROWS + 2 * i)))
    else:
        at = _behind(table, i)
    start, bytes_ = (f.ll.load(_at(f, at, _word(8 * j)), align=8, typ=I64) for j in range(2))
    return Home(start, bytes_)


def keep_home(table: Pointer, i: int, value: Pointer) -> None:
    """Beside an address that is stored."""
    if table.home is None or value.home is None:
        return
    at = _behind(table, i)
    for j, word in enumerate((value.home.start, value.home.bytes)):
        table.f.ll.store(word, _at(table.f, at, _word(8 * j)), align=8)


def _behind(table: Pointer, i: int) -> Any:
    """Where the home of the i-th address lies."""
    assert table.home is not None
    f, (start, bytes_, _) = table.f, table.home
    offset = f.ll.sub(f.ll.ptrtoint(table._word(i), I64), start)
    behind = f.ll.add(f.ll.add(start, bytes_), f.ll.shl(offset, _word(1)))
    return f.ll.inttoptr(behind, PTR)


def chosen_home(where: Any, yes: Pointer, no: Pointer) -> Home | None:
    """Of one of two pointers."""
    if yes.home is None or no.home is None or yes.home is no.home:
        return yes.home
    start, bytes_ = (yes.f.ll.select(where, a, b)
                     for a, b in zip(yes.home[:2], no.home[:2], strict=True))
    return Home(start, bytes_, yes.home.kind)


# the checks

def safe(at: Pointer, bytes_: int | Any, verb: str, most: int = 0) -> Any:
    """The address itself, or a place where nothing is harmed; `most` where bytes are not constant.
    """
    if at.f.module.sites is None:
        return at.ir
    return _redirected(at, _is_outside(at, bytes_, verb, most), verb)


def safe_lanes(at: Pointer, bits: Any, size: int, verb: str) -> Any:
    """The same for lanes that have a bit, from the first such to the last."""
    f = at.f
    if f.module.sites is None:
        return at.ir
    lanes = bits.type.count
    packed = f.ll.zext(f.ll.bitcast(bits, ir.IntType(lanes)), I64)
    first, behind = (f.ll.call(f.intrinsic(f"llvm.{name}.i64", I64, [I64, BOOL]),
                               [packed, ir.Constant(BOOL, 0)]) for name in ("cttz", "ctlz"))
    span = f.ll.sub(_word(64), f.ll.add(first, behind))
    any_ = f.ll.icmp_unsigned("!=", packed, _word(0))
    start = at.like(_at(f, at.ir, f.ll.mul(f.ll.select(any_, first, _word(0)), _word(size))))
    count = f.ll.select(any_, f.ll.mul(span, _word(size)), _word(0))
    return _redirected(at, _is_outside(start, count, verb, size * lanes), verb)


def safe_rows(at: Pointer, pitch: int, rows: int, width: int, verb: str) -> tuple[Any, Any]:
    """Address and pitch of rows that one instruction reads or writes."""
    if at.f.module.sites is None:
        return at.ir, _word(pitch)
    outside = _is_outside(at, (rows - 1) * pitch + width, verb, width)
    return (_redirected(at, outside, verb),
            at.f.ll.select(outside, _word(0), _word(pitch)))


def safe_places(at: Pointer, places: Any, bytes_: int, verb: str) -> Any:
    """A vector of addresses, each by itself."""
    f = at.f
    if f.module.sites is None:
        return places
    for lane in range(places.type.count):
        number = ir.Constant(I64, lane)
        one = at.like(f.ll.inttoptr(f.ll.extract_element(places, number), PTR))
        good = f.ll.ptrtoint(safe(one, bytes_, verb), I64)
        places = f.ll.insert_element(places, good, number)
    return places


def _is_outside(at: Pointer, bytes_: int | Any, verb: str, most: int) -> Any:
    """Whether an access leaves its home, which is reported; none of no bytes does."""
    f, home = at.f, at.home
    assert home is not None, "a pointer of checked code has no home"
    most = most or int(bytes_)
    assert most <= LARGEST
    size = _word(bytes_) if isinstance(bytes_, int) else bytes_
    offset = f.ll.sub(f.ll.ptrtoint(at.ir, I64), home.start)
    room = f.ll.sub(home.bytes, size)
    outside = f.ll.or_(f.ll.icmp_signed("<", room, _word(0)),
                       f.ll.icmp_unsigned(">", offset, room))
    if not isinstance(bytes_, int):
        outside = f.ll.and_(outside, f.ll.icmp_signed(">", size, _word(0)))
    _report(f, outside, offset, home, verb, most)
    return outside


def _report(f: Function, outside: Any, offset: Any, home: Home, verb: str, bytes_: int) -> None:
    """Two stores, which go elsewhere if there is nothing to tell."""
    assert f.module.sites is not None
    f.module.sites.append(Site(f.name, verb, bytes_, _line()))
    low = f.ll.and_(f.ll.add(offset, _word(MIDDLE)), _word((1 << SHIFT) - 1))
    word = f.ll.or_(low, _word(len(f.module.sites) << SHIFT))
    place = f.ll.select(outside, _word(8 * REPORT), _word(8 * UNUSED))
    to = _at(f, f.table, place)
    f.ll.store(word, to, align=8)
    f.ll.store(home.start, _at(f, to, _word(8)), align=8)


def _redirected(at: Pointer, outside: Any, verb: str) -> Any:
    instead = _at(at.f, at.f.table, _word(8 * (ZEROS if verb == "loads" else SINK)))
    return at.f.ll.select(outside, instead, at.ir)


def _line() -> str:
    """Of the generator: the first that is not of this room."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"


def _at(f: Function, base: Any, offset: Any) -> Any:
    return f.ll.gep(base, [offset], source_etype=ir.IntType(8))


def _word(value: int) -> Any:
    return ir.Constant(I64, value)
