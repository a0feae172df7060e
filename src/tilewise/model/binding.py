"""A graph bound to the sizes of a call: run node by node once, and recorded as a program.

A node whose work is all done by launches over known memory becomes kernels of the program. A view
becomes an address. Everything else is a step of torch's between them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.nn.modules.batchnorm import _NormBase

from ..conv.again import PLAIN
from ..conv.batch_norm import CalledNorm
from ..conv.linear import Linear
from ..core.plan import Plan
from ..core.watching import telling
from ..runtime.program import Alias, Program, Stale, Step, Value, View, alias_of
from ..runtime.recording import ARENA, CONSTANT, FRESH, INPUT, STEP, Launch, Recorder, Root
from .contents import FIXED, Refused
from .effects import QUERIES, Effects, is_random, name_of
from .guards import Guards
from .labels import Label, described
from .layout import Drawn
from .native import Native, function_of
from .nn import Block
from .placing import Form, Places
from .structure import filled, hollow, leaves, tensors_in
from .tuning import observed

# what a step reads of its modules besides tensors
SETTINGS = ("stride", "padding", "dilation", "groups", "output_padding")
NORMED = ("training", "eps")  # of a norm


class NotNow(Refused):
    """No program of this call; another of the same form may give one."""


class Binder:
    """Runs a graph with tensors; `results`, and the `program` that would do the same again."""

    def __init__(self, graph: fx.Graph, steps: dict[str, Any],
                 tensors: dict[str, tuple[Any, str]],
                 module_of: Callable[[fx.Node], Any], places: Places | None = None) -> None:
        self._graph, self._modules, self._tensors = graph, steps, tensors
        self._places, self.forms = places, dict[fx.Node, Form]()
        self.by_torch = set[fx.Node]()  # nodes that torch computes
        self._module_of, self._effects = module_of, Effects(graph, module_of)
        self._recorder, self._steps = Recorder(), list[Launch | Step]()
        self.labels: list[Label] = []  # of the steps
        self._plans: list[Plan] = []  # of the node that runs
        self._values: dict[fx.Node, Any] = {}
        self._owns: dict[int, weakref.ref[Tensor]] = {}  # what a root is, and not a view of it
        self.guards = Guards()
        self.named: list[tuple[Any, str, Tensor | None]] = []  # that modules must still have
        self._uses = _last_uses(graph)
        self.refused: Refused | None = self._effects_outside()  # why there is no program

    def _effects_outside(self) -> Refused | None:
        """What must not happen twice, where a program gives up and the graph runs anew."""
        modules = [self._modules[str(node.target)] for node in self._graph.nodes
                   if node.op == "call_module"]
        parts = [part for module in modules for part in (module, *getattr(module, "parts", ()))]
        if any(isinstance(part, _NormBase | CalledNorm) and part.training for part in parts):
            return Refused("a norm learns")
        if any(isinstance(module, Drawn) for module in modules) or any(
                is_random(node, self._module_of(node)) for node in self._graph.nodes):
            return Refused("it draws random numbers")
        return None

    def _check_writes(self, node: fx.Node) -> None:
        """Nothing may be written to that the caller or the model holds."""
        for value in self._effects.written(node):
            for tensor in tensors_in(self._values[value]):
                root = self._root(tensor)
                if root is not None and root.kind in (INPUT, CONSTANT):
                    raise Refused("it writes to its inputs, or to parameters")

    def run(self, inputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], Program | None]:
        """The results of this call, and the program for the next; None where it is refused."""
        given = iter(inputs)
        roots = []
        for node in self._graph.nodes:
            if node.op == "placeholder":
                tensor = next(given)
                roots.append(self._recorder.add(INPUT, tensor))
                self._owns[roots[-1].number] = weakref.ref(tensor)
                self._values[node] = tensor
            elif node.op == "output":
                results = self._arguments(node.args[0])
                return results, self._tried(self._program, roots, results)
            elif node.op == "get_attr":
                module, name = self._tensors[str(node.target)]
                self._values[node] = getattr(module, name)
                self._tried(self._named, module, name)
            else:
                self._values[node] = self._run(node)
            value = self._values[node]
            if isinstance(value, Tensor) and value.layout is torch.strided:
                self.forms[node] = Form(tuple(value.shape), value.stride(), value.dtype,
                                        value.data_ptr())
            self._forget(node)
        raise AssertionError("a graph without an output")

    def _tried(self, record: Callable[..., Any], *args: Any) -> Any:
        """What is recorded; once refused, nothing more."""
        if self.refused is not None:
            return None
        try:
            return record(*args)
        except Refused as reason:
            self.refused = reason
            return None

    def _program(self, roots: list[Root], results: tuple[Any, ...]) -> Program:
        given = list(leaves(results))
        views = [self._kept(leaf) for leaf in given]
        same = [next(i for i, other in enumerate(given) if other is leaf) for leaf in given]
        self.form = hollow(results)
        if not any(isinstance(step, Launch) for step in self._steps):
            raise Refused("none of its steps are kernels")
        if self._recorder.is_ambiguous():
            raise NotNow("inputs share memory with each other or with parameters")
        program = Program(self._recorder, self._steps, roots, views, same)
        self._recorder.let_go()
        return program

    def _named(self, module: Any, name: str) -> None:
        """A tensor that a module has, or that it has none."""
        value = getattr(module, name)
        if value is not None and (type(value) not in PLAIN or not value.is_cpu
                                  or value.layout is not torch.strided):
            raise Refused("a parameter is no plain tensor of the CPU")
        self.named.append((module, name, value))
        if value is not None:
            self._recorder.knows(value)

    def _arguments(self, args: Any) -> Any:
        return map_arg(args, lambda node: self._values[node])

    def _run(self, node: fx.Node) -> Any:
        call = self._function(node)
        args, kwargs = self._arguments(node.args), self._arguments(node.kwargs)
        self._tried(self._watch, self._module_of(node))
        if self.refused is not None:
            return call(*args, **kwargs)
        self._recorder.begin()
        self._plans = []
        with telling(self._recorder), observed(self._plans.append):
            value = self._in_place(node, call, args)
            if value is None:
                value = call(*args, **kwargs)
        self._tried(self._record, node, call, (args, kwargs), value)
        return value

    def _in_place(self, node: fx.Node, call: Any, args: tuple[Any, ...]) -> Tensor | None:
        """What a node gives, where it is a part of something larger."""
        if self._places is None or node not in self._places:
            return None
        return self._places.call(node, call, args)

    def _record(self, node: fx.Node, call: Callable[..., Any], args: Any, value: Any) -> None:
        """A node that ran, as steps of the program."""
        before = len(self._steps)
        found = list(leaves(value))
        if any(type(leaf) not in (Tensor, *PLAIN) for leaf in found):
            raise Refused(f"{name_of(node)} gives something else than tensors")
        if any(leaf.layout is not torch.strided or leaf.is_conj() or leaf.is_neg()
               for leaf in found):
            raise Refused(f"{name_of(node)} gives a tensor that is not simply memory")
        if node.op != "call_module" or self._module_of(node) is not None:
            self._check_writes(node)
        if not found:
            self._check_number(node, args)
        elif not self._is_recorded(node, found):
            if self._places is not None and node in self._places:
                raise Refused(f"{node.name}, a part of a concatenation, is torch's")
            self._by_torch(node, call, found, value)
        else:
            self._append(self._recorder.launches)
        self._label(node, len(self._steps) - before)

    def _label(self, node: fx.Node, count: int) -> None:
        """A node's name for its steps; the first has its products."""
        module = self._modules.get(node.target) if node.op == "call_module" else None
        parts = getattr(module, "parts", None) or (module,)
        name = getattr(module, "name", None) or name_of(node)
        if isinstance(module, Block | Linear):
            name = described(parts[0])
        who = ", ".join(dict.fromkeys(plan.algorithm for plan in self._plans))
        flops = sum(plan.problem.flops for plan in self._plans)
        self.labels += [Label(parts[0], name, who, flops if i == 0 else 0) for i in range(count)]

    def _function(self, node: fx.Node) -> Callable[..., Any]:
        call: Callable[..., Any] = (self._modules[str(node.target)] if node.op == "call_module"
                                    else function_of(node))
        return call

    def _watch(self, step: Any) -> None:
        """The settings and tensors of a step's modules, which it would look at in every call.

        A module that is not known is called in any case.
        """
        if not isinstance(step, Block | Linear | Native):
            for name, value in getattr(step, "__dict__", {}).items():
                if not name.startswith("_") and isinstance(value, (*FIXED, tuple)):
                    self.guards.reads(step.__dict__, name, value)
            return
        for module in filter(None, step.parts):
            for name in NORMED if hasattr(module, "eps") else SETTINGS:
                if name in module.__dict__:
                    self.guards.reads(module.__dict__, name, module.__dict__[name])
            for name in (*module._parameters, *module._buffers):
                self._named(module, name)

    def _check_number(self, node: fx.Node, args: Any) -> None:
        """Numbers may depend on the forms of tensors, which are a program's, not on values."""
        if tensors_in(args) and name_of(node) not in QUERIES:
            raise Refused(f"{name_of(node)} makes a number of values")

    def _is_recorded(self, node: fx.Node, found: list[Tensor]) -> bool:
        """Whether launches alone wrote the results, or they are views of what is known."""
        if self._recorder.problem is not None or self._effects.written(node):
            return False
        roots = [self._root(tensor) for tensor in found]
        return all(root is not None and root.is_written for root in roots)

    def _root(self, tensor: Tensor) -> Root | None:
        """The memory that a tensor lies in as a whole, with values of its type."""
        if tensor.numel() == 0:
            return None
        root = self._recorder.find(tensor.data_ptr())
        if root is None or root.dtype != tensor.dtype:
            return None
        return root

    def _append(self, steps: Sequence[Launch | Step]) -> None:
        for step in steps:
            for root in _roots(step):
                root.is_used(len(self._steps))
            self._steps.append(step)

    def _by_torch(self, node: fx.Node, call: Callable[..., Any], found: list[Tensor],
                  value: Any) -> None:
        """A step of torch's; what it gives is a new root, unless it lies where it was read."""
        self._recorder.drop_new()
        self.by_torch.add(node)
        inputs = list(node.all_input_nodes)
        unknown = node.op == "call_module" and self._module_of(node) is None
        places, reads = [], list[Value]()
        for source in inputs:
            given = tensors_in(self._values[source])
            places.append(slice(len(reads), len(reads) + len(given)))
            reads += [self._kept(tensor, unknown) for tensor in given]
        shapes = [hollow(self._values[source]) for source in inputs]
        known = [self._root(tensor) is not None for tensor in found]
        given_on = self._given_on(found, known, inputs) if unknown else []
        form = hollow(value) if unknown else None

        def run(tensors: list[Tensor]) -> Sequence[Tensor]:
            values = {source: filled(shape, iter(tensors[place]))
                     for source, shape, place in zip(inputs, shapes, places, strict=True)}
            made = call(*map_arg(node.args, values.__getitem__),
                        **map_arg(node.kwargs, values.__getitem__))
            results = list(leaves(made))
            if len(results) != len(known) or (unknown and hollow(made) != form) or any(
                    _lies(results[i], tensors[j]) != place for i, j, place in given_on):
                raise Stale
            return [leaf for leaf, old in zip(results, known, strict=True) if not old]

        new = [tensor for tensor, old in zip(found, known, strict=True) if not old]
        makes = tuple(self._recorder.add(STEP, tensor) for tensor in new)
        self._owns |= {root.number: weakref.ref(t) for root, t in zip(makes, new, strict=True)}
        self._append([Step(run, tuple(reads), makes)])
        for root in makes:
            root.is_used(len(self._steps) - 1)

    def _given_on(self, found: list[Tensor], known: list[bool],
                  inputs: list[fx.Node]) -> list[tuple[int, int, Any]]:
        """Which results of a module that is not known lie in which of its operands, and where."""
        given = [leaf for source in inputs for leaf in tensors_in(self._values[source])]
        roots = [self._root(leaf) for leaf in given]
        places = []
        for i in [i for i, old in enumerate(known) if old]:
            root = self._root(found[i])
            j = next((j for j, other in enumerate(roots) if other is root), None)
            if j is None:
                raise Refused("a module that is not known gives memory of another's")
            places.append((i, j, _lies(found[i], given[j])))
        return places

    def _kept(self, tensor: Any, escapes: bool = True) -> Value:
        """Where a tensor lies; what others may keep is no memory that is used again."""
        root = self._root(tensor)
        if root is None or root.kind == CONSTANT:
            if any(tensor is known for *_, known in self.named):
                return tensor
            if root is None and tensor.numel() > 0:
                raise Refused("a tensor comes from nowhere")
            return Alias(alias_of(tensor))  # the caller has the tensor itself
        if escapes and root.kind == ARENA:
            root.kind = FRESH
        own = self._owns.setdefault(root.number, weakref.ref(tensor))() is tensor
        return View(root, (tensor.data_ptr() - root.start) // root.itemsize, tensor.shape,
                    tensor.stride(), own, tensor.requires_grad)

    def _forget(self, node: fx.Node) -> None:
        """Values that no later node reads, and memory that no value lies in."""
        for value in self._uses.get(node, ()):
            self._values.pop(value, None)
        if self.refused is not None:
            return
        alive = set()
        for value in self._values.values():
            for tensor in tensors_in(value):
                if (root := self._root(tensor)) is not None:
                    alive.add(root.number)
        self._recorder.release(alive)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The values that each node is the last to read."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for source in (node, *node.all_input_nodes):
            last[source] = node
    found: dict[fx.Node, list[fx.Node]] = {}
    for source, node in last.items():
        found.setdefault(node, []).append(source)
    return found


def _lies(tensor: Tensor, there: Tensor) -> tuple[Any, ...]:
    """Where a tensor lies, seen from another."""
    return tensor.data_ptr() - there.data_ptr(), tensor.shape, tensor.stride()


def _roots(step: Launch | Step) -> Iterator[Root]:
    if isinstance(step, Launch):
        yield from (place.root for place in step.places)
    else:
        yield from (view.root for view in step.reads if isinstance(view, View))
