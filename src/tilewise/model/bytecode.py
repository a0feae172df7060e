"""What the instructions of a function tell without running it."""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

CATCHES = {"PUSH_EXC_INFO", "SETUP_FINALLY"}
WITHS = {"WITH_EXCEPT_START"}
LOCALS = ("LOAD_FAST", "LOAD_DEREF")
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
COMPUTED = ("CALL", "BINARY_SUBSCR")  # what is on the right of `is` may be a tensor then
IDENTITY = {"is_", "is_not"}  # of the module operator


class Comparison(NamedTuple):
    """By `is`, with something else than None.

    Args:
        own: The variable, and its attribute, on the left; empty for anything else.
        chain: The global name, and attributes behind it, on the right; empty for anything else.
    """

    own: tuple[str, ...] = ()
    chain: tuple[str, ...] = ()


class Facts:
    """Of one function."""

    def __init__(self, code: types.CodeType) -> None:
        steps = instructions(code)
        names = [step.opname for step in steps]
        self.globals = list(_chains(steps))
        self.writes_nonlocal = any(step.opname == "STORE_DEREF" and step.argval in code.co_freevars
                                   for step in steps)
        targets = [_last(before) for before, step in pairwise(steps)
                   if step.opname in ("STORE_ATTR", "DELETE_ATTR")]
        self.writes_self = "self" in targets
        self.writes_others = any(target != "self" for target in targets)
        self.compared = [_comparison(steps, i) for i, step in enumerate(steps)
                         if step.opname == "IS_OP" and not _is_none(steps[i - 1])]
        self.compared += [Comparison()] if IDENTITY.intersection(code.co_names) else []
        # variables that are compared with None
        self.nones = {_last(step) for i, step in enumerate(steps)
                      if step.opname.startswith(LOCALS) and _asks_none(steps[i + 1:i + 3])}
        self.refusal = ""
        if "STORE_GLOBAL" in names or "DELETE_GLOBAL" in names:
            self.refusal = f"{code.co_name} writes to a global variable"
        elif sum(name in CATCHES for name in names) > sum(name in WITHS for name in names):
            self.refusal = f"{code.co_name} catches exceptions"
        elif any(step.opname == "IS_OP" and before.opname.startswith((*LOCALS, *COMPUTED))
                 for before, step in pairwise(steps)):
            self.refusal = f"{code.co_name} asks whether two values are one"
        elif any(step.argval == "__class__" and step.opname == "LOAD_ATTR" for step in steps):
            self.refusal = f"{code.co_name} asks for a class"
        elif any(name.startswith("MATCH_") for name in names):
            self.refusal = f"{code.co_name} matches a pattern"
        elif inspect.CO_COROUTINE & code.co_flags:
            self.refusal = f"{code.co_name} is a coroutine"


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


def _last(step: dis.Instruction) -> Any:
    """The name that an instruction ends with: some of Python 3.13 load two variables."""
    return step.argval[-1] if isinstance(step.argval, tuple) else step.argval


def _is_none(step: dis.Instruction) -> bool:
    return step.opname == "LOAD_CONST" and step.argval is None


def _asks_none(steps: list[dis.Instruction]) -> bool:
    if steps and steps[0].opname.endswith(("_IF_NONE", "_IF_NOT_NONE")):
        return True
    return len(steps) == 2 and _is_none(steps[0]) and steps[1].opname == "IS_OP"


def _comparison(steps: list[dis.Instruction], end: int) -> Comparison:
    """What stands on both sides of the `is` at `end`, where no branch leads in between."""
    begin, chain = end - 1, list[str]()
    while steps[begin].opname in ATTRIBUTES:
        chain.insert(0, steps[begin].argval)
        begin -= 1
    is_name = steps[begin].opname == "LOAD_GLOBAL"
    if any(step.is_jump_target for step in steps[begin + 1:end + 1]) or not (
            is_name or (steps[begin].opname == "LOAD_CONST" and not chain)):
        return Comparison()
    left = steps[max(begin - 2, 0):begin]
    is_own = ([step.opname in ATTRIBUTES for step in left] == [False, True]
              and left[0].opname.startswith("LOAD_FAST")
              and not (left[1].is_jump_target or steps[begin].is_jump_target))
    return Comparison((_last(left[0]), left[1].argval) if is_own else (),
                      (steps[begin].argval, *chain) if is_name else ())


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
        if chain == ["type"] and steps[i + 1].argval == "self":
            continue
        yield tuple(chain)
