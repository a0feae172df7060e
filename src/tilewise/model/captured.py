"""The forward of an optimised module: its graph where guards hold, else its own Python."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from ..conv.again import PLAIN, is_transformed
from ..conv.checks import CannotScript
from ..conv.running import ENGINE
from ..core.errors import TilewiseError
from ..core.isa import KNOWN
from ..core.problem import Problem
from ..core.target import Target
from ..kernels.cpu.emit.threads import alone_after_fork, is_forked
from .ahead import look as look_ahead
from .capture import Capture, tensors_of
from .contents import FIXED, Refused
from .deciding import forms_of
from .guards import Passing
from .nn import Block
from .patterns import CONVOLUTIONS
from .values import Mismatch

MOST = 8  # captures of one module: more of them mean that it changes with every call
SIZED = 4  # of these, graphs for one size each
LATER = 4  # times as many calls in a row are asked for with each of them
LONGEST = 64  # calls in a row from which on twice as many are
FRUITLESS = 16  # times as many where none can
# before, torch.export takes a layer's parameters for inputs if its forward is an object's
EXPORTS_LAYERS = torch.__version__ >= (2, 8)


class Learned:
    """Problems that were measured for a model; what is known of them goes into its file."""

    def __init__(self, problems: Iterable[tuple[Problem, Target]] = ()) -> None:
        self.problems = list(dict.fromkeys(problems))

    def __getstate__(self) -> dict[str, Any]:
        wisdom = ENGINE.planner.wisdom.about(self.problems).to_json() if self.problems else ""
        return {"problems": self.problems, "wisdom": wisdom}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.problems = state["problems"]
        if state["wisdom"]:
            ENGINE.read_wisdom(state["wisdom"], "of the model that is loaded")

    def __deepcopy__(self, memo: dict[int, Any]) -> Learned:
        return Learned(self.problems)


class Captured:
    """Takes the place of a module's forward; copied and saved without its captures.

    What was measured for it is saved with it, and known where it is loaded.
    """

    def __init__(self, module: nn.Module, max_error: float | None) -> None:
        self.module, self.max_error = module, max_error
        self.tuned = Learned()
        self._forget()

    def _forget(self) -> None:
        self.captures: dict[Any, list[Capture]] = {}
        self.refusals: dict[Any, str] = {}
        self._passing: set[Any] = set()  # which of them may pass
        # the forms of the last call that had no graph of its own, and calls like it before
        self._last: dict[Any, tuple[Any, int]] = {}
        # calls in a row with the same sizes, before a graph for them is made
        self._patience: dict[Any, int] = {}
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "max_error": self.max_error, "tuned": self.tuned}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def __code__(self) -> Any:
        return type(self.module).forward.__code__

    @property
    def __globals__(self) -> Any:
        raise CannotScript  # torch.jit.script asks for them, to read a function's source

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(type(self.module).forward)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_forked():  # some of its steps may be torch's, which would wait for lost threads
            with alone_after_fork():
                return self._run(args, kwargs)
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        capture, tensors = self.find(args, kwargs)
        if capture is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        try:
            return capture(tensors)
        except Mismatch:  # a tensor is cut into fewer pieces than was taken for granted
            return type(self.module).forward(self.module, *args, **kwargs)

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Capture | None, Any]:
        """The graph for these arguments, and the tensors among them."""
        if is_traced():
            return None, ()
        key: Any = 1
        tensors: Any = args
        if kwargs or len(args) != 1 or type(args[0]) is not Tensor:
            leaves, spec = tree_flatten((args, kwargs))
            key, tensors = form_of(leaves, spec), [x for x in leaves if isinstance(x, Tensor)]
        if key is None:
            return None, ()
        capture = self._held(key, tensors)
        if capture is not None and not (capture.is_passing and self._comes_again(key, tensors)):
            return capture, tensors
        if capture is not None:
            return self._for_these_sizes(key, args, kwargs) or capture, tensors
        return self._anew(key, args, kwargs, tensors), tensors

    def _held(self, key: Any, tensors: Any) -> Capture | None:
        for capture in self.captures.get(key, ()):
            if capture.suits(tensors) and capture.guards.hold():
                return capture
        return None

    def _comes_again(self, key: Any, tensors: Any) -> bool:
        """Whether the calls before had the same sizes, so that a graph for these is worth it."""
        forms = forms_of(tensors)
        last, count = self._last.get(key, (None, 0))
        count = count + 1 if last == forms else 0
        self._last[key] = forms, count
        return count >= self._patience.get(key, 1)

    def _for_these_sizes(self, key: Any, args: tuple[Any, ...],
                         kwargs: dict[str, Any]) -> Capture | None:
        """A graph in the place of one that leaves parts out, or of none."""
        self._last.pop(key, None)
        leaves, spec = tree_flatten((args, kwargs))
        with self._lock:
            patience = self._patience.get(key, 1)
            try:
                capture = self._capture(key, leaves, spec, sized=True)
            except Refused:
                self._patience[key] = patience * FRUITLESS
                return None
            self._patience[key] = patience * (LATER if patience < LONGEST else 2)
            return capture

    def _anew(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
              tensors: Any) -> Capture | None:
        state = (key, self.module.training)
        if state in self.refusals:
            again = state in self._passing and self._comes_again(key, tensors)
            return self._for_these_sizes(key, args, kwargs) if again else None
        if len(self.refusals) >= MOST:  # texts that differ in every call are not kept
            return None
        with self._lock:
            if (capture := self._held(key, tensors)) is not None:  # by another thread meanwhile
                return capture
            try:
                return self._capture(key, *tree_flatten((args, kwargs)))
            except Refused as reason:
                self.refusals[state] = str(reason)
                if isinstance(reason, Passing):
                    self._passing.add(state)
                    self._comes_again(key, tensors)
        for child in self.module.children():
            arm(child, self.max_error)
        return None

    def _capture(self, key: Any, leaves: list[Any], spec: Any, sized: bool = False) -> Capture:
        known = self.captures.get(key, [])
        own = [capture for capture in known if capture.forms is not None]
        if not sized and len(self.refusals) + sum(map(len, self.captures.values())) >= MOST:
            raise Refused(f"it changes: {MOST} graphs were made of it")
        capture = _made(self.module, leaves, spec, self.max_error, sized)
        if not capture.is_of_use:
            kind = Passing if capture.is_passing else Refused
            raise kind("nothing in it that tilewise computes")
        if sized and (capture.is_passing or capture.forms is None):
            raise Refused("these sizes are no help")
        for part in capture.opaque:
            arm(part, self.max_error)
        spare = own[SIZED - 1:] if sized else []
        self.captures[key] = [capture, *(old for old in known if old not in spare)]
        if capture.is_passing:
            self._comes_again(key, tensors_of(leaves))
        look_ahead(capture, tensors_of(leaves))
        return capture


def _made(module: nn.Module, *rest: Any) -> Capture:
    """A fault of ours is no reason not to run a model."""
    try:
        return Capture(module, *rest)
    except TilewiseError:
        raise
    except Exception as fault:
        what = f"{type(fault).__name__}: {fault}"
        warnings.warn(f"{type(module).__name__} runs by torch, since tilewise cannot make a graph "
                      f"of it, please report it: {what}", RuntimeWarning, stacklevel=5)
        raise Refused(what) from fault


def is_traced() -> bool:
    """Whether torch follows what runs, and must see all of it."""
    return (torch.compiler.is_dynamo_compiling() or torch._C._is_tracing() or is_transformed())


def form_of(leaves: list[Any], spec: Any) -> Any:
    """All of the arguments that a graph depends on; None where it cannot be compared."""
    form: list[Any] = [spec]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if type(leaf) not in PLAIN and not torch.compiler.is_compiling():
                return None
            form.append(Tensor)
        elif isinstance(leaf, FIXED) and not isinstance(leaf, slice):
            form += [type(leaf), repr(leaf) if type(leaf) is float else leaf]  # of zeros, two
        else:
            return None
    return tuple(form)


def arm(module: nn.Module, max_error: float | None) -> None:
    """Let a module be captured when it is called, and its parts: other methods than its forward,
    such as the `decode` of an autoencoder, call those alone."""
    _arm(module, max_error)
    for child in _parts(module):
        _arm(child, max_error)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """What a module holds; a lone convolution only where torch.export can look through it."""
    return (child for child in module.children()
            if EXPORTS_LAYERS or type(child) not in CONVOLUTIONS)


def _arm(module: nn.Module, max_error: float | None) -> None:
    """A module alone, or what it holds if it has no forward."""
    if "forward" in module.__dict__ or isinstance(module, torch.jit.ScriptModule) or not KNOWN:
        return
    if not any(type(part) in (*CONVOLUTIONS, nn.Linear) for part in module.modules()):
        return
    if type(module).forward is nn.Module.forward or _copies_itself(module):  # a list, for example
        for child in _parts(module):
            _arm(child, max_error)
    elif (type(module) in CONVOLUTIONS or isinstance(module, nn.Sequential)
          or not type(module).__module__.startswith("torch.nn.modules.")):
        module.__dict__["forward"] = Captured(module, max_error)


def _copies_itself(module: nn.Module) -> bool:
    """Whether a copy might be made without telling, so that its forward would run another."""
    return hasattr(type(module), "__deepcopy__") and not isinstance(module, fx.GraphModule)


def all_captured(model: nn.Module) -> Iterator[Captured]:
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, Captured):
            yield forward


def blocks(model: nn.Module) -> list[Block]:
    """The blocks of all graphs that were made so far, and those that a model itself holds."""
    found = [block for captured in all_captured(model) for captures in captured.captures.values()
             for capture in captures for block in capture.blocks]
    return found + [module for module in model.modules() if isinstance(module, Block)]


def prepare(model: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Make the graph for such arguments, without running anything."""
    forward = model.__dict__.get("forward")
    if isinstance(forward, Captured):
        forward.find(arguments, {})


def is_whole(model: nn.Module) -> bool:
    """Whether all of a model is in one graph, inside of which images lie channels-last."""
    forward = model.__dict__.get("forward")
    found = [capture for captures in getattr(forward, "captures", {}).values()
             for capture in captures]
    return bool(found) and all(c.is_channels_last and not c.opaque for c in found)
