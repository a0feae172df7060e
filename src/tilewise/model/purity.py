"""What a model's Python code reads and does besides its tensors, watched while it is traced.

Values that can be compared later become guards. What a graph cannot repeat is refused: writes,
output, clocks, random numbers of Python, exceptions that are caught around operators.
"""

from __future__ import annotations

import builtins
import io
import logging
import os
import random
import sys
import sysconfig
import types
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from .bytecode import Comparison, Facts, facts
from .closures import Closures
from .contents import CODE, FIXED, Refused
from .guards import Guards
from .reaching import Followed, Reaching

TORCH = os.path.dirname(torch.__file__) + os.sep
OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
PACKAGES = tuple(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib"))
SEEDS = os.path.join(TORCH, "random.py")  # seeds the generators that graphs draw from
HOOKED = {os.path.join(TORCH, "nn", "modules", "module.py"),
          os.path.join(TORCH, "utils", "hooks.py")}  # where hooks come and go
STATES = (torch.is_grad_enabled, torch.get_default_dtype, torch.get_num_threads,
          torch.is_inference_mode_enabled)
SWITCHES = {os.path.join(TORCH, *names) for names in (
    ("autograd", "grad_mode.py"), ("amp", "autocast_mode.py"))}
EFFECTS = (print, input, open, exec, eval, setattr, delattr, breakpoint, warnings.warn)
OUTSIDE = ("time", "posix", "nt", "_io", "_socket", "_datetime", "_warnings", "_thread")
QUIET = (*CODE, Tensor, logging.Logger)
# functions of others that look like what is refused
HARMLESS = {("torchvision.utils", "_log_api_usage_once"),
            ("transformers.utils.generic", "infer_framework_from_repr"),  # what to look for first
            ("segmentation_models_pytorch.base.utils", "is_torch_compiling")}
LEGACY = type(torch.FloatTensor)  # asks a stand-in for its memory
HOMES = (types.ModuleType, type)
ANSWERS = (torch.dtype, torch.device, torch.layout, bool, type(None))
MAKERS = ("__init__", "__post_init__", "__new__", "__setattr__", "__setitem__", "__setstate__")


def autocast() -> tuple[Any, ...]:
    """Whether operators are cast, and to what."""
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


@dataclass(frozen=True)
class Named:
    """Of the process's environment: variable()."""

    name: str

    def __call__(self) -> Any:
        return os.environ.get(self.name)


@dataclass(frozen=True)
class InContext:
    """Of one of Python's contexts: variable()."""

    variable: ContextVar[Any]

    def __call__(self) -> Any:
        return self.variable.get(None)


ENVIRON = type(os.environ).__getitem__.__code__
READING = {code.co_filename for code in (ENVIRON, Mapping.get.__code__)}  # which are frozen
MODES = (torch.is_grad_enabled, torch.is_inference_mode_enabled, autocast)


class Watch:
    """with Watch(guards): what runs meanwhile in this thread is pure but for torch's operators."""

    def __init__(self, guards: Guards) -> None:
        self._guards = guards
        self._seen: set[types.CodeType] = set()
        self._inner: set[types.CodeType] = set()  # functions made by functions that were seen
        self._before: Any = None
        self.names: set[str] = set()  # that the model's code has
        self.calling: list[Any] = []  # functions of C that the model's code is in
        self._is_unsure = False  # whether the model's code has an answer that is not known
        self.reaching, self.closures = Reaching(self._follow), Closures(guards)
        self._set: Counter[ContextVar[Any]] = Counter()  # how often, and not put back
        self._tokens: dict[ContextVar[Any], Token[Any]] = {}  # of what variables were before

    def __enter__(self) -> None:
        self._before = sys.getprofile()
        sys.setprofile(self._note)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)
        self.reaching.ends()
        for variable, token in self._tokens.items():
            variable.reset(token)
        self._tokens = {}

    def _follow(self) -> None:
        """See calls: Python drops the hook that raised."""
        if sys.getprofile() is None:
            sys.setprofile(self._note)

    def check(self) -> None:
        """What can be told only at the end."""
        self.reaching.check()
        if any(self._set.values()):
            raise Refused("a variable of the context is set")

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What the tracer itself does, and torch for it, is not looked at."""
        before, calling = sys.getprofile(), self.calling
        sys.setprofile(None)
        self.calling = []
        try:
            yield
        finally:
            self.calling = calling
            sys.setprofile(before)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever is called meanwhile, the model's code is where it was."""
        before = list(self.calling)
        try:
            yield
        finally:
            self.calling = before

    def unsure(self, what: str) -> None:
        """The model's code gets a stand-in for an answer, which `is` compares wrongly."""
        self._is_unsure = True
        frame: Any = sys._getframe(1)
        while frame is not None and not (frame.f_code.co_name == "_traced"
                                         and frame.f_code.co_filename.startswith(OURS)):
            if is_models(frame) and self._compares(frame):
                raise Refused(f"{what} is compared")
            frame = frame.f_back

    def _note(self, frame: types.FrameType, event: str, called: Any) -> None:
        if event == "call":
            self._enters(frame, frame.f_code)
        elif event == "c_call" and not _is_trusted(frame.f_code.co_filename):
            self.calling.append(called)
            self._calls(frame, called)
        elif event in ("c_return", "c_exception") and not _is_trusted(frame.f_code.co_filename):
            del self.calling[-1:]
        elif event == "return":
            self.reaching.leaves(frame)

    def _enters(self, frame: types.FrameType, code: types.CodeType) -> None:
        if code.co_filename == SEEDS:
            raise Refused("torch's random generators are seeded")
        if code.co_filename in HOOKED and code.co_name.startswith(("register_", "remove")) and (
                "hook" in code.co_name or code.co_name == "remove"):
            raise Refused("a hook is registered, or removed")
        if code.co_name == "__enter__" and code.co_filename in SWITCHES:
            for state in MODES:  # what is put back is what was there
                self._guards.asks(state)
        if code is ENVIRON and is_models(_reader(frame)):
            self._guards.asks(Named(frame.f_locals["key"]))
        if self._is_unsure and is_models(frame) and self._compares(frame):
            raise Refused(f"{code.co_name} compares what is not known")
        if (_is_trusted(code.co_filename) or _is_standard(code.co_filename)
                or (frame.f_globals.get("__name__"), code.co_name) in HARMLESS):
            return
        found = facts(code)
        if not found.is_plain:
            self._follows(frame, code, found)
        if code.co_freevars and code not in self._inner:
            self.closures.guard(frame)
        if code not in self._seen:
            self._seen.add(code)
            self._looks_at(frame, code)

    def _looks_at(self, frame: types.FrameType, code: types.CodeType) -> None:
        """A function of the model that runs for the first time."""
        self.names.update(code.co_names)
        self._inner.update(const for const in code.co_consts if isinstance(const, types.CodeType))
        if isinstance(frame.f_locals.get("ctx"), torch.autograd.function.FunctionCtx):
            raise Refused(f"{code.co_qualname if hasattr(code, 'co_qualname') else code.co_name} "
                          "has a gradient of its own")
        is_method = "self" in code.co_varnames[:code.co_argcount]  # else it is that of another
        owner = frame.f_locals.get("self") if is_method else None
        if not isinstance(owner, nn.Module | type(None)) and code.co_name not in MAKERS:
            self._guards.knows_object(owner)
        if code.co_name == "__enter__" and code.co_argcount:
            self._looks_at_exit(frame.f_locals.get(code.co_varnames[0]))
        chains = facts(code).globals
        for chain in chains:
            self._guard_global(frame.f_globals, chain)
        if ("isinstance",) in chains and any(
                type(_meant(frame.f_globals, chain)) is LEGACY for chain in chains):
            raise Refused(f"{code.co_name} asks for tensors of a type")

    def _looks_at_exit(self, manager: Any) -> None:
        """What ends a `with` would run where something is refused inside."""
        ends: Any = getattr(type(manager), "__exit__", None)
        if isinstance(ends, types.FunctionType) and not facts(ends.__code__).is_plain:
            raise Refused("an __exit__ writes, or ends exceptions")

    def _follows(self, frame: types.FrameType, code: types.CodeType, found: Facts) -> None:
        """A function that may come to what must not run."""
        lines = self._refused(frame, code, found)
        if not (found.catches or lines or found.compared_locals or found.classes):
            return
        if self.reaching.is_free():
            self.reaching.enters(frame, Followed(found, lines, lambda: self._is_unsure,
                                                 self._guards.knows_class))
        elif found.catches or lines or found.classes:
            raise Refused(next(iter(lines.values()), f"{code.co_name} catches exceptions, or asks "
                               "for a class"))

    def _compares(self, frame: types.FrameType) -> bool:
        """Whether a function may compare a type, a device or a truth that is not known by `is`,
        and it would not be noticed when it does."""
        is_free = self.reaching.is_free()
        return any(not (one.chain and not isinstance(_meant(frame.f_globals, one.chain), ANSWERS))
                   and not (one.local and is_free) and not _is_plain(frame, one)
                   for one in facts(frame.f_code).compared)

    def _refused(self, frame: types.FrameType, code: types.CodeType,
                 found: Facts) -> dict[int, str]:
        """Lines that must not run, and why."""
        if found.refusal:
            raise Refused(found.refusal)
        lines = dict(found.refused)
        written = found.writes_others | (found.writes_self if not _is_own(frame, found) else set())
        lines.update(dict.fromkeys(written, f"{code.co_name} writes to attributes"))
        if code not in self._inner:
            lines.update(dict.fromkeys(found.writes_nonlocal, f"{code.co_name} writes to a "
                                       "variable of another function"))
        return lines

    def _guard_global(self, names: dict[str, Any], chain: tuple[str, ...]) -> None:
        """A global name, and attributes of modules and classes behind it."""
        space, name = (names if chain[0] in names else vars(builtins)), chain[0]
        value = space.get(name)
        for attribute in chain[1:]:
            if isinstance(value, type):
                home = getattr(sys.modules.get(value.__module__), "__file__", None)
                if not _is_trusted(home or ""):
                    self._guards.asks_class(value, attribute)
                return
            if not isinstance(value, types.ModuleType):
                break
            if _is_trusted(getattr(value, "__file__", None) or ""):
                return
            space, name, value = vars(value), attribute, vars(value).get(attribute)
        if value is suppress:
            raise Refused("exceptions are suppressed")
        if value is type:
            raise Refused("the type of a value is asked for")
        self._guards.fills(value)
        if not isinstance(value, QUIET) and name in space:
            self._guards.knows(space, name, value)

    def _calls(self, frame: types.FrameType, called: Any) -> None:
        if any(called is state for state in STATES):
            self._guards.asks(called)
            return
        if called is id and is_models(frame):
            raise Refused("the identity of a value is asked for")
        owner = getattr(called, "__self__", None)
        if isinstance(owner, ContextVar) and _is_asked_by_model(frame):
            self._uses(owner, called.__name__)
        home = (called.__module__ if isinstance(owner, types.ModuleType | None)
                else type(owner).__module__) or ""
        if (any(called is effect for effect in EFFECTS) or home.partition(".")[0] in OUTSIDE
                or isinstance(owner, io.IOBase | random.Random)
                or home.startswith("numpy.random")) and _is_asked_by_model(frame):
            raise Refused(f"{getattr(called, '__name__', called)} is called")

    def _uses(self, variable: ContextVar[Any], done: str) -> None:
        """What the model's code does with a variable of the context; what it set, it knows."""
        if done == "set" and variable not in self._tokens:
            self._tokens[variable] = variable.set(variable.get(None))
        self._set[variable] += {"set": 1, "reset": -1}.get(done, 0)
        if self._set[variable] < 0:
            raise Refused("a variable of the context is reset")
        if done == "get" and not self._set[variable]:
            self._guards.asks(InContext(variable))
            if not isinstance(variable.get(None), FIXED):
                raise Refused(f"{variable.name} is read, which the context changes")


def _is_own(frame: types.FrameType, found: Facts) -> bool:
    """Whether what a method writes to itself is noticed, or is what it is for."""
    return not found.writes_self or frame.f_code.co_name in MAKERS or isinstance(
        frame.f_locals.get("self"), nn.Module)


def _meant(names: dict[str, Any], chain: tuple[str, ...]) -> Any:
    """What a global name and the attributes behind it are now, if they are."""
    value = names.get(chain[0])
    for attribute in chain[1:]:
        value = getattr(value, attribute, None) if isinstance(value, HOMES) else None
    return value


def _is_plain(frame: types.FrameType, one: Comparison) -> bool:
    """Whether it compares an attribute of a module that is no stand-in: the tracer reads it."""
    if not one.own:
        return False
    name, attribute = one.own
    own = frame.f_locals.get(name)
    return isinstance(own, nn.Module) and isinstance(own.__dict__.get(attribute, own), FIXED)


def _reader(frame: Any) -> Any:
    """The function that reads the environment."""
    while frame.f_code.co_filename in READING:
        frame = frame.f_back
    return frame


def _is_asked_by_model(frame: Any) -> bool:
    """Whether a function of the standard library runs for the model, not for torch."""
    while frame is not None and _is_standard(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and not _is_trusted(frame.f_code.co_filename)


def is_models(frame: types.FrameType) -> bool:
    """Whether code is neither torch's nor ours nor of the standard library."""
    file = frame.f_code.co_filename
    return not (_is_trusted(file) or _is_standard(file))


@lru_cache(maxsize=4096)
def _is_trusted(file: str) -> bool:
    """Torch's own code, which goes by its operators, and ours."""
    return file.startswith((TORCH, OURS, "<frozen", "<fx_generated", "<eval_with_key>"))


@lru_cache(maxsize=4096)
def _is_standard(file: str) -> bool:
    return file.startswith(STANDARD) and not file.startswith(PACKAGES)
