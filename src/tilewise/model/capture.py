"""A module's graph for one form of its arguments, its convolutions fused, ready to run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_unflatten

from ..conv.batch_norm import CalledNorm
from ..conv.linear import Linear, is_worth
from . import operations
from .activations import MODULES, attributes
from .attempts import traced
from .contents import Refused, snapshot
from .deciding import forms_of
from .effects import Effects, is_number, is_query, is_whole_number, like_rank, name_of, only_adds
from .graphs import Graph
from .guards import Guards, Passing
from .kinds import kind_of
from .layout import LAST, Drawn, Inside
from .lowering import lower
from .nn import Block, TransposedBlock
from .patterns import (
    AXES,
    CONV2D,
    CONVOLUTION,
    CONVOLUTIONS,
    F_BATCH_NORM,
    NORMS,
    PADDINGS,
    TRANSPOSED,
    Chain,
    LinearChain,
    TransposedChain,
    arguments,
    is_quiet,
    padded_by,
)
from .placing import mark
from .shadows import granted
from .signals import turn_signals
from .stages import note, text_of
from .storing import Choice
from .tracer import is_hooked

WEIGHT = "first_weight"
NORM = ("running_mean", "running_var", "weight", "bias")
# what a block took from its modules when it was made
BAKED: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys(PADDINGS, ("padding", "value")),
    **dict.fromkeys(CONVOLUTIONS, ("padding_mode",)),
    **dict.fromkeys(NORMS.values(), ("track_running_stats",)),
    **{kind: attributes(kind) for kind in MODULES},
    **{kind: tuple(row.arguments) for kind, row in operations.MODULES.items()}}


class Ended:
    """A graph's results, and constants, in the structure of the model's result."""

    def __init__(self, leaves: list[Any], spec: Any) -> None:
        self._places = [isinstance(leaf, fx.Node) for leaf in leaves]
        self._constants = [None if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        self._spec = spec
        self._is_one = self._places == [True] and tree_unflatten([0], spec) == 0

    def __call__(self, results: Sequence[Any]) -> Any:
        if self._is_one:
            return results[0]
        found = iter(results)
        return tree_unflatten([next(found) if is_node else snapshot(constant)
                               for is_node, constant in zip(self._places, self._constants)],
                              self._spec)


class Capture(Graph):
    """What a module does with arguments of one form: `run(tensors)`, as long as guards hold.

    `sized` lets it be a graph for the sizes of these arguments alone; then they are its `forms`.
    """

    def __init__(self, module: nn.Module, leaves: list[Any], spec: Any,
                 max_error: float | None, sized: bool = False) -> None:
        tracer, (self.graph, results, result_spec) = traced(module, leaves, spec, sized)
        self.forms = forms_of(tensors_of(leaves)) if tracer.deciding.has_decided else None
        self.asked = frozenset(tracer.deciding.shadows.asked)
        self.granted = granted(tensors_of(leaves), self.asked)
        # whether a part was left out that a graph for one size may have
        self.is_passing = any(isinstance(why, Passing) for why in tracer.opaque.values())
        self.guards: Guards = tracer.guards
        self.opaque = [part for part in tracer.called.values() if part in tracer.opaque]
        self.steps: dict[str, Any] = dict(tracer.called)
        self.tensors = tracer.tensors
        self._note("captured")
        self._called: dict[fx.Node, CalledNorm | None] = {}  # for which function
        for node in self.graph.nodes:
            if node.op == "get_attr":  # the module that has the tensor
                node.meta["owner"] = self.tensors[node.target][0]
        if not any(map(is_whole_number, tensors_of(leaves))):  # which could be the same
            self._find_counters()
        self._leave_out()
        self._ask_earlier()
        self._note("normalised")
        self._fuse(max_error)
        tracer.guards.unhooked(part for part in tracer.paths if not is_hooked(part))
        if not tracer.guards.hold():
            raise Refused("what the model reads is changed by it")
        used = {node.target for node in self.graph.nodes if node.op == "call_module"}
        self.steps = {name: step for name, step in self.steps.items() if name in used}
        self.settle()
        self.ended = Ended(results, result_spec)
        self._choice = Choice(self, max_error)
        self._switches = any(node.target is torch._C._set_grad_enabled
                             for node in self.graph.nodes)

    def suits(self, tensors: Sequence[Tensor]) -> bool:
        if self.asked and self.granted != granted(tensors, self.asked):
            return False
        return self.forms is None or self.forms == forms_of(tensors)

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        if not self._switches:
            return self.ended(self.graph_of(tensors).results(tensors))
        before = torch.is_grad_enabled()
        try:
            return self.ended(self.graph_of(tensors).results(tensors))
        except Exception:  # a step may raise where they are switched off
            torch.set_grad_enabled(before)
            raise

    def graph_of(self, tensors: Sequence[Tensor]) -> Graph:
        """Itself, or with images that are stored in 16 bits."""
        return self._choice.of(tensors) or self

    @property
    def graphs(self) -> list[Graph]:
        """All that calls were run by."""
        return [self, *filter(None, [self._choice.stored])]

    @property
    def blocks(self) -> list[Block]:
        return [step for step in self.steps.values() if isinstance(step, Block)]

    @property
    def is_of_use(self) -> bool:
        return any(isinstance(step, Block | Linear) for step in self.steps.values())

    def _note(self, stage: str) -> None:
        note(stage, lambda: text_of(self.graph, self.module_of))

    def _find_counters(self) -> None:
        """Numbers that are only added to, as norms count batches: they share memory with nothing
        that is read. `meta` has which one it is."""
        known: dict[int, list[fx.Node]] = {}
        for node in (node for node in self.graph.nodes if node.op == "get_attr"):
            tensor: Tensor = getattr(*self.tensors[node.target])
            if is_whole_number(tensor):
                whole = tensor._base if tensor._is_view() else tensor
                known.setdefault(id(whole), []).append(node)
        for which, nodes in known.items():
            if all(only_adds(user, node) for node in nodes for user in node.users):
                for node in nodes:
                    node.meta["counts"] = which

    def _leave_out(self) -> None:
        """What hands on what it is given, and questions whose answers were needed only once."""
        numbers: set[fx.Node] = set()
        for node in self.graph.nodes:
            numbers.update([node] if is_number(node, numbers) else [])
        for node in reversed(list(self.graph.nodes)):
            if node in numbers and not node.users and _is_answered(node, numbers):
                self.graph.erase_node(node)
        for node in list(self.graph.nodes):
            module = self.module_of(node)
            if isinstance(module, nn.modules.dropout._DropoutNd) and (
                    module.p == 0 or not module.training):
                name = "p" if module.p == 0 else "training"
                self.guards.reads(module.__dict__, name, module.__dict__[name])
            elif type(module) is not nn.Identity and not is_quiet(node):
                continue
            if node.all_input_nodes == list(node.args[:1]):
                node.replace_all_uses_with(node.args[0])
                self.graph.erase_node(node)

    def _ask_earlier(self) -> None:
        """How many dimensions there are is asked of what a chain begins with."""
        first: dict[fx.Node, fx.Node] = {}  # a value that has as many as another
        for node in list(self.graph.nodes):
            source = node.args[0] if node.args else None
            if (isinstance(source, fx.Node) and name_of(node) in ("ndim", "dim")
                    and len(node.args) <= 2 and not node.kwargs):
                node.args = (first[source], *node.args[1:])
            same = {first[other] for other in like_rank(node, self.module_of(node))}
            first[node] = same.pop() if len(same) == 1 else node

    def _fuse(self, max_error: float | None) -> None:
        effects = Effects(self.graph, self.module_of)
        for node in list(self.graph.nodes):
            conv = self._conv_of(node)
            module = conv or self.module_of(node)
            if conv is None and (len(node.args) != 1 or node.kwargs or not isinstance(
                    node.args[0], fx.Node)):
                continue
            axes = AXES.get(type(module)) if conv is None else 2
            if axes is not None and (conv is not None or module.padding_mode == "zeros"):
                chain = Chain(effects, self.module_of, node, self._norm_of, axes)
                pad = node.args[0]
                x, around = self._padded(effects, chain, pad, module)
                block: Any = Block(module, self._norm(chain), chain.activation, chain.pool,
                                   max_error, around)
                block.adds_in_place = chain.adds_in_place
                self._put(chain, block, (x, chain.residual, self._slope(chain)))
                if around is not None:
                    self.graph.erase_node(pad)
            elif type(module) in TRANSPOSED:
                chain = TransposedChain(effects, self.module_of, node, self._norm_of,
                                        TRANSPOSED[type(module)])
                self._put(chain, TransposedBlock(module, self._norm(chain), chain.activation,
                                                 max_error=max_error), node.args)
            elif type(module) is nn.Linear and is_worth(module):
                chain = LinearChain(effects, self.module_of, node)
                self._put(chain, Linear(module, chain.activation, max_error),
                          (*node.args, self._slope(chain)))
        self._note("fused")
        inside = _Inside(self)  # to turn an image around one convolution does not pay
        several = sum(block.axes > 1 for block in self.blocks) > 1
        self.is_channels_last = several and inside.is_safe()
        if self.is_channels_last:
            inside.run()
        turn_signals(inside)
        self._note("laid_out")
        lower(self)
        self._note("lowered")
        if self.is_channels_last:
            mark(self.graph, self.module_of)

    def _norm(self, chain: Chain) -> Any:
        return None if chain.norm is None else (
            self.module_of(chain.norm) or self._norm_of(chain.norm))

    def _norm_of(self, node: fx.Node) -> CalledNorm | None:
        """What stands for a function that normalises with all numbers of one module."""
        if node not in self._called:
            self._called[node] = self._found_norm(node)
        return self._called[node]

    def _found_norm(self, node: fx.Node) -> CalledNorm | None:
        options = arguments(node, F_BATCH_NORM)
        owners = [self.tensors[part.target] if isinstance(part, fx.Node) and part.op == "get_attr"
                  else (None, part) for part in map(options.get, NORM)]
        module: Any = next((owner for owner, _ in owners if owner is not None), None)
        known = isinstance(module, tuple(NORMS.values()))
        if not known or owners != [
                (None, None) if getattr(module, name, None) is None else (module, name)
                for name in NORM]:
            return None
        training, numbers = options["training"], (options["momentum"], options["eps"])
        if type(training) is not bool or not all(type(one) in (int, float) for one in numbers):
            return None
        # in eval mode, a batch's own numbers are no running ones, which could be folded
        if training and not (module.training and self._moves_alone(node, module)):
            return None
        return CalledNorm(module, training, *numbers)

    def _moves_alone(self, norm: fx.Node, module: nn.Module) -> bool:
        """Whether nothing else reads the statistics that a norm moves: it may move them later."""
        moved = [getattr(module, name) for name in NORM[:2]]
        readers = {user for node in self.graph.nodes if node.op == "get_attr"
                   for user in node.users
                   if any(getattr(*self.tensors[node.target]) is one for one in moved)}
        return readers <= {norm}

    def _conv_of(self, node: fx.Node) -> Any:
        """The module whose convolution a function is: its tensors, and its own options."""
        if node.op != "call_function" or node.target not in CONV2D or not node.args:
            return None
        options = arguments(node, CONVOLUTION)
        weight, bias = ((None if part is None else self.tensors.get(getattr(part, "target", "")))
                        for part in (options["weight"], options["bias"]))
        module, name = weight or (None, "")
        if not isinstance(module, nn.Conv2d) or name != "weight" or not isinstance(
                options["input"], fx.Node) or "weight" not in module._parameters:
            return None
        if bias != (None if module._parameters["bias"] is None else (module, "bias")):
            return None
        own = {key: getattr(module, key) for key in ("stride", "padding", "dilation", "groups")}
        plain = all(isinstance(value, int | str | tuple) for key, value in own.items()
                    if key != "stride")
        same = plain and all(_both(options[key]) == _both(own[key]) for key in own)
        return module if same else None

    def _padded(self, effects: Effects, chain: Chain, pad: Any,
                module: Any) -> tuple[Any, tuple[int, ...] | None]:
        """What a convolution reads, and the zeros around it, where those come before it."""
        given = {"input": pad, "padding": module.padding}
        found = padded_by(given, 2, self.module_of) if isinstance(module, nn.Conv2d) else None
        if found is None or effects.is_written_between(pad, chain.last, [found[0]],
                                                       set(chain.links)):
            return pad, None
        self.guards.reads(module.__dict__, "padding", snapshot(module.padding))
        self.guard(self.module_of(pad))
        return found[0], tuple(found[1])

    def _slope(self, chain: Chain) -> fx.Node | None:
        """The slopes of a chain's activation, where its module has them now."""
        if not isinstance(chain.slope, nn.Module):
            return chain.slope
        name = f"slope{len(self.tensors)}"
        self.tensors[name] = (chain.slope, "weight")
        with self.graph.inserting_before(chain.last):
            return self.graph.get_attr(name)

    def _put(self, chain: Chain, block: Any, args: tuple[Any, ...]) -> None:
        """A block in the place of a chain."""
        while args[-1] is None:
            args = args[:-1]
        for module in chain.modules:
            self.guard(module)
        with self.graph.inserting_after(chain.last):
            fused = self.graph.call_module(self.add(block), args)
        chain.replace_by(self.graph, fused)

    def guard(self, module: Any) -> None:
        """What a step took from a module when it was made must stay as it is."""
        for name in BAKED.get(type(module), ()):
            if name in module.__dict__:
                self.guards.reads(module.__dict__, name, snapshot(module.__dict__[name]))

    def add(self, step: Any) -> str:
        name = f"s{len(self.steps)}"
        self.steps[name] = step
        return name

    def forget_weight(self) -> None:
        """Results in the layout of images alone: no weight is held for what its own would be."""
        self.tensors.pop(WEIGHT, None)
        for node in list(self.graph.nodes):
            if node.op == "get_attr" and node.target == WEIGHT:
                for user in list(node.users):
                    user.args = user.args[:2]
                self.graph.erase_node(node)


def _both(value: Any) -> Any:
    """An option down and across."""
    return (value, value) if isinstance(value, int) else tuple(value)


class _Inside(Inside):
    """Channels-last in a graph that calls blocks."""

    def __init__(self, capture: Capture) -> None:
        super().__init__(capture.graph, capture.module_of)
        self._capture = capture
        self.ranks = tuple(sorted({block.axes + 2 for block in capture.blocks} & set(LAST)))

    def is_block(self, node: fx.Node) -> bool:
        return isinstance(self.module_of(node), Block)

    def drawn(self, call: Drawn, args: Any, kwargs: Any) -> fx.Node:
        return self.graph.call_module(self._capture.add(call), (tuple(self.inputs), *args), kwargs)

    def weight(self) -> fx.Node | None:
        """The weight of the first convolution: its layout is also that of torch's results."""
        block = next(iter(self._capture.blocks), None)
        if block is None:
            return None
        self._capture.tensors[WEIGHT] = (block._parts[0], "weight")
        return self.graph.get_attr(WEIGHT)


def _is_answered(number: fx.Node, numbers: set[fx.Node]) -> bool:
    """Whether it would not raise: `size(3)` may."""
    if not is_query(number):
        return name_of(number) != "exactly" and numbers.issuperset(number.all_input_nodes)
    source = number.args[0] if number.args else None
    named = 2 if number.target is getattr else 1
    return isinstance(source, fx.Node) and kind_of(source) is Tensor and (
        len(number.args) == named and not number.kwargs)


def tensors_of(leaves: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
