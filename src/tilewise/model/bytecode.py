"""What the instructions of a function tell without running it."""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

HANDLERS = {"PUSH_EXC_INFO", "SETUP_FINALLY"}
# which end a handler that does not raise again what it handles
CAUGHT = {"POP_EXCEPT", "RETURN_VALUE", "RETURN_CONST", "CHECK_EXC_MATCH", "CHECK_EG_MATCH",
          "JUMP_IF_NOT_EXC_MATCH", "RAISE_VARARGS"}
LOCALS = ("LOAD_FAST", "LOAD_DEREF")
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
COMPUTED = ("CALL", "BINARY_SUBSCR")  # what is on the right of `is` may be a tensor then
IDENTITY = {"is_", "is_not"}  # of the module operator


class Comparison(NamedTuple):
    """By `is`, with something else than None.

    Args:
        own: The variable, and its attribute, on the left; empty for anything else.
        chain: The global name, and attributes behind it, on the right; empty for anything else.
        local: The variable that is all of the left; empty for anything else.
        line: Where, if there is such a variable.
    """

    own: tuple[str, ...] = ()
    chain: tuple[str, ...] = ()
    local: str = ""
    line: int = 0


class Facts:
    """Of one function; what it does is told by lines."""

    def __init__(self, code: types.CodeType) -> None:
        steps, name = instructions(code), code.co_name
        line_of = _lines(code)
        self.globals = list(_chains(steps))
        self.writes_nonlocal = {line_of[step.offset] for step in steps
                                if step.opname == "STORE_DEREF" and step.argval in code.co_freevars}
        targets = [(_last(before), line_of[step.offset]) for before, step in pairwise(steps)
                   if step.opname in ("STORE_ATTR", "DELETE_ATTR")]
        self.writes_self = {line for target, line in targets if target == "self"}
        self.writes_others = {line for target, line in targets if target != "self"}
        self.compared = [_comparison(steps, i, line_of) for i, step in enumerate(steps)
                         if step.opname == "IS_OP" and not _is_none(steps[i - 1])]
        self.compared += [Comparison()] if IDENTITY.intersection(code.co_names) else []
        self.compared_locals: dict[int, list[str]] = {}  # variables, by lines
        for one in self.compared:
            if one.local:
                self.compared_locals.setdefault(one.line, []).append(one.local)
        # variables that are compared with None
        self.nones = {_last(step) for i, step in enumerate(steps)
                      if step.opname.startswith(LOCALS) and _asks_none(steps[i + 1:i + 3])}
        # not a `finally`, nor what ends a `with`
        handlers = [i for i, step in enumerate(steps) if step.opname in HANDLERS]
        self.catches = any(_is_caught(steps, i) for i in handlers)
        # variables whose classes are asked for, by lines
        self.classes: dict[int, list[str]] = {}
        self.refused: dict[int, str] = {}  # by lines, and why
        for i, step in enumerate(steps):
            line = line_of[step.offset]
            asked = _class_asked(steps, i)
            if asked and not _stores(steps[:i], asked, line, line_of):
                self.classes.setdefault(line, []).append(asked)
            elif reason := _refusal(steps[i - 1], step):
                self.refused[line] = f"{name} {reason}"
        self.refusal = ""  # of the whole
        written = {*self.refused, *self.writes_self, *self.writes_others, *self.writes_nonlocal}
        if any(_is_undone(code, steps, i, written, line_of) for i in handlers):
            self.refusal = f"{name} writes where exceptions pass"
        elif self.catches and inspect.CO_GENERATOR & code.co_flags:
            self.refusal = f"{name} catches exceptions"
        elif inspect.CO_COROUTINE & code.co_flags:
            self.refusal = f"{name} is a coroutine"
        elif name == "__exit__" and any(map(_gives, steps, steps[1:])):
            self.refusal = "an __exit__ may end exceptions"
        self.is_plain = not any((
            self.refusal, self.refused, self.catches, self.compared_locals, self.classes,
            self.writes_self, self.writes_others, self.writes_nonlocal))


@lru_cache(maxsize=4096)
def facts(code: types.CodeType) -> Facts:
    return Facts(code)


@lru_cache(maxsize=1024)
def instructions(code: types.CodeType) -> list[dis.Instruction]:
    return [step for step in dis.get_instructions(code) if step.opname != "CACHE"]


def steps_of(frame: types.FrameType) -> list[dis.Instruction]:
    """The instruction that a frame is at, and those behind it."""
    return [step for step in instructions(frame.f_code) if step.offset >= frame.f_lasti]


def may_ask_none(frame: types.FrameType) -> bool:
    """Whether what a frame gets now is compared with None, at once or by its variable's name."""
    steps, stored = steps_of(frame)[1:], set[str]()
    if _asks_none(steps[:2]):
        return True
    for step in steps:
        if not step.opname.startswith(("STORE_FAST", "UNPACK")):
            break
        stored.update(step.argval if isinstance(step.argval, tuple) else (step.argval,))
    return bool(stored & facts(frame.f_code).nones)


def _lines(code: types.CodeType) -> dict[int, int]:
    """By the offsets of instructions; what has none belongs to what is before it."""
    found, last = dict[int, int](), code.co_firstlineno
    for begin, end, line in code.co_lines():
        last = last if line is None else line
        found.update(dict.fromkeys(range(begin, end, 2), last))
    return found


def _refusal(before: dis.Instruction, step: dis.Instruction) -> str:
    """What an instruction does that no graph can stand for."""
    if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
        return "writes to a global variable"
    if step.opname == "IS_OP" and before.opname.startswith((*LOCALS, *COMPUTED)):
        return "asks whether two values are one"
    if _is_class(step) or _is_type(step):
        return "asks for a class"
    return "matches a pattern" if step.opname.startswith("MATCH_") else ""


def _class_asked(steps: list[dis.Instruction], at: int) -> str:
    """The variable of which `type(x)` or `x.__class__` is read there."""
    step, before = steps[at], steps[at - 1]
    if _is_class(step):
        return _last(before) if _is_variable(before) and not step.is_jump_target else ""
    if not _is_type(step):
        return ""
    after = steps[at + 1:at + 5]
    while after and after[0].opname == "PUSH_NULL":
        after = after[1:]
    is_alone = (len(after) > 1 and _is_variable(after[0]) and after[1].arg == 1
                and after[1].opname.startswith(("CALL", "PRECALL")) and not after[1].is_jump_target)
    return _last(after[0]) if is_alone else ""


def _is_variable(step: dis.Instruction) -> bool:
    """Of the function itself, or the `self` that functions inside of it read, too."""
    return step.opname.startswith("LOAD_FAST") or (
        step.opname == "LOAD_DEREF" and step.argval == "self")


def _last(step: dis.Instruction) -> Any:
    """The name that an instruction ends with: some of Python 3.13 load two variables."""
    is_pair = isinstance(step.argval, tuple) and step.opname.startswith(("LOAD_FAST", "STORE_FAST"))
    return step.argval[-1] if is_pair else step.argval


def _is_none(step: dis.Instruction) -> bool:
    return step.opname == "LOAD_CONST" and step.argval is None


def _asks_none(steps: list[dis.Instruction]) -> bool:
    if steps and steps[0].opname.endswith(("_IF_NONE", "_IF_NOT_NONE")):
        return True
    return len(steps) == 2 and _is_none(steps[0]) and steps[1].opname == "IS_OP"


def _gives(before: dis.Instruction, step: dis.Instruction) -> bool:
    """Whether an instruction returns something else than None or False."""
    if step.opname == "RETURN_CONST":
        return step.argval not in (None, False)
    return step.opname == "RETURN_VALUE" and not (
        before.opname == "LOAD_CONST" and before.argval in (None, False))


def _is_class(step: dis.Instruction) -> bool:
    return step.opname in ATTRIBUTES and step.argval == "__class__"


def _is_type(step: dis.Instruction) -> bool:
    return step.opname == "LOAD_GLOBAL" and step.argval == "type"


def _is_caught(steps: list[dis.Instruction], begin: int) -> bool:
    """Whether a handler may end otherwise than by raising the exception again."""
    if steps[begin].opname == "SETUP_FINALLY":  # Python 3.10
        begin = next(i for i, step in enumerate(steps) if step.offset == steps[begin].argval) - 1
    if steps[begin + 1].opname == "WITH_EXCEPT_START":
        return False
    end = next((i for i, step in enumerate(steps) if i > begin and step.opname in (
        "RERAISE", *CAUGHT)), begin)
    inside = steps[begin + 1:end + 1]
    places = [step.offset for step in inside]
    return steps[end].opname != "RERAISE" or any(
        step.argval not in places for step in inside
        if "JUMP" in step.opname or step.opname == "FOR_ITER")


def _is_undone(code: types.CodeType, steps: list[dis.Instruction], begin: int,
               written: set[int], line_of: dict[int, int]) -> bool:
    """Whether a `finally` has lines that are refused, where a refusal may begin in its body, or
    end a generator: they would run."""
    if not written or _is_caught(steps, begin):
        return False
    handler = begin
    if steps[begin].opname == "SETUP_FINALLY":  # Python 3.10
        handler = next(i for i, step in enumerate(steps) if step.offset == steps[begin].argval)
        body = steps[begin:handler]
    else:
        ranges = [(row.start, row.end) for row in vars(dis.Bytecode(code))["exception_entries"]
                  if row.target == steps[begin].offset]
        body = [step for step in steps if any(a <= step.offset < b for a, b in ranges)]
    end = next((i for i, step in enumerate(steps) if i > handler and step.opname == "RERAISE"),
               len(steps))
    is_written = any(line_of[step.offset] in written for step in steps[handler:end])
    return is_written and (bool(inspect.CO_GENERATOR & code.co_flags) or any(
        line_of[step.offset] in written for step in body))


def _comparison(steps: list[dis.Instruction], end: int, line_of: dict[int, int]) -> Comparison:
    """What stands on both sides of the `is` at `end`, where no branch leads in between."""
    begin, chain = end - 1, list[str]()
    while steps[begin].opname in ATTRIBUTES:
        chain.insert(0, steps[begin].argval)
        begin -= 1
    is_name = steps[begin].opname == "LOAD_GLOBAL"
    if any(step.is_jump_target for step in steps[begin + 1:end + 1]) or not (
            is_name or (steps[begin].opname == "LOAD_CONST" and not chain)):
        return Comparison()
    line = line_of[steps[end].offset]
    chain = [steps[begin].argval, *chain] if is_name else []
    left = steps[max(begin - 2, 0):begin]
    is_own = ([step.opname in ATTRIBUTES for step in left] == [False, True]
              and left[0].opname.startswith("LOAD_FAST")
              and not (left[1].is_jump_target or steps[begin].is_jump_target))
    is_local = (bool(left) and left[-1].opname.startswith("LOAD_FAST")
                and not steps[begin].is_jump_target
                and not _stores(steps[:begin], _last(left[-1]), line, line_of))
    return Comparison((_last(left[0]), left[1].argval) if is_own else (), tuple(chain),
                      *((_last(left[-1]), line) if is_local else ()))


def _stores(steps: list[dis.Instruction], name: str, line: int, line_of: dict[int, int]) -> bool:
    """Whether a variable gets another value on a line, before it is read there."""
    return any("STORE_FAST" in step.opname and line_of.get(step.offset) == line and name in (
        step.argval if isinstance(step.argval, tuple) else (step.argval,)) for step in steps)


def _chains(steps: list[dis.Instruction]) -> Iterator[tuple[str, ...]]:
    """Global names, each with the attributes that are read from it at once."""
    for i, step in enumerate(steps):
        if step.opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
            continue
        chain = [step.argval]
        for after in steps[i + 1:]:
            if after.opname not in ATTRIBUTES:
                break
            chain.append(after.argval)
        if _is_type(step):
            continue
        yield tuple(chain)
