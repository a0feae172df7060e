"""Chains of elementwise operations in a graph, each one kernel: activations, arithmetic, norms."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ..conv.batch_norm import normalised
from ..conv.excitation import scaled
from ..core.activations import SLOPED, is_activation
from ..kernels.cpu.between.pointwise import LARGEST, arguments_of
from ..runtime.pointwise import Pointwise
from ..runtime.weights import made
from .activations import of_call, of_module
from .effects import Effects, is_number, name_of

# functions and methods of torch, by the name of their step in a kernel
ARITHMETIC: dict[Any, str] = {
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add", "add_"), "add"),
    **dict.fromkeys((operator.sub, operator.isub, torch.sub, "sub", "sub_"), "sub"),
    **dict.fromkeys((operator.mul, operator.imul, torch.mul, "mul", "mul_"), "mul"),
    **dict.fromkeys((operator.truediv, operator.itruediv, torch.div, "div", "div_"), "div"),
    **dict.fromkeys((operator.neg, torch.neg, "neg", "neg_"), "neg"),
    **dict.fromkeys((torch.sqrt, "sqrt", "sqrt_"), "sqrt"),
    **dict.fromkeys((torch.maximum, "maximum"), "maximum"),
    **dict.fromkeys((torch.minimum, "minimum"), "minimum")}
NORMS = {nn.BatchNorm2d: 4, nn.BatchNorm3d: 5}  # and the rank of what they take
PRODUCTS = (operator.mul, torch.mul, "mul")  # which leave their operands as they are
ADDCMUL = (torch.addcmul, "addcmul")
MOST = 4  # operands of one kernel
# what makes small images of large ones: pools and reductions, which a chain of small ones begins
POOLS = ("mean", "sum", "norm", "linalg_vector_norm", "amax", "adaptive_avg_pool2d",
         "adaptive_max_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool3d")
POOLING = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d)


def rank_of(module: Any) -> int:
    """Of what a batch norm takes; 0 for what is none."""
    known = getattr(module, "of", module)  # a function's stands for a module
    return next((rank for kind, rank in NORMS.items() if isinstance(known, kind)), 0)


class Chain:
    """Nodes that one kernel computes: operands in the graph, steps as a kernel has them.

    Numbers of a step are those of operands, then of norms (a scale and a shift each), then of
    steps before it; they are settled when all operands are known.
    """

    def __init__(self, nodes: list[fx.Node], operands: list[fx.Node], norms: list[nn.Module],
                 steps: list[tuple[Any, ...]]) -> None:
        self.nodes, self.operands, self.norms, self.steps = nodes, operands, norms, steps

    @property
    def last(self) -> fx.Node:
        return self.nodes[-1]

    @property
    def name(self) -> str:
        return " ".join(step[1] for step in self.steps)

    @property
    def learners(self) -> list[tuple[fx.Node, Any]]:
        """Nodes that are norms, and these."""
        return [(step[0], step[3][0]) for step in self.steps
                if step[1] == "fma" and isinstance(step[3], tuple)]

    @property
    def learns(self) -> bool:
        """Whether a norm in it does, as far as is known."""
        return any(norm.training for norm in self.norms)

    @property
    def fits(self) -> bool:
        return len(self.operands) + 2 * len(self.norms) <= MOST

    def learn(self) -> Callable[..., Tensor | None] | None:
        """What computes it with a gradient: a product of two alone, if they are such, or a norm
        with its activation."""
        alone = len(self.nodes) == 1 and len(self.operands) == 2
        if alone and self.last.target in PRODUCTS:
            return scaled
        names = [step[1] for step in self.steps]
        if len(self.norms) == len(self.operands) == 1 and names[0] == "fma" and (
                len(names) == 1 or (len(names) == 2 and is_activation(names[1]))):
            return LearnedNorm(self.norms[0], *names[1:])
        return None

    def run(self) -> Fused:
        """What computes it; it is called with the operands."""
        numbers: dict[Any, int] = {node: i for i, node in enumerate(self.operands)}
        count = len(self.operands)
        for i, norm in enumerate(self.norms):
            numbers[norm, 0], numbers[norm, 1] = count + 2 * i, count + 2 * i + 1
        count += 2 * len(self.norms)
        for i, step in enumerate(self.steps):
            numbers[step[0]] = count + i
        steps = [(name, *(arg if isinstance(arg, float) else numbers[arg] for arg in args))
                 for _, name, *args in self.steps]
        return Fused(steps, len(self.operands), self.norms)


class LearnedNorm:
    """A batch norm that no convolution does, where it learns, with the activation behind it."""

    def __init__(self, norm: Any, activation: str | None = None) -> None:
        self._norm, self._activation = norm, activation

    def __call__(self, x: Any) -> Tensor | None:
        learns = self._norm.training and isinstance(x, Tensor)
        return normalised(self._norm, x, None, self._activation) if learns else None


class Fused:
    """fused(*operands): one kernel."""

    def __init__(self, steps: list[tuple[Any, ...]], operands: int,
                 norms: list[nn.Module]) -> None:
        self._norms = norms
        kinds = (*[None] * operands, *["norm"] * (2 * len(norms)))
        self._steps, self._kinds = steps, kinds
        self._kernel = Pointwise(steps, kinds)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_kernel"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._kernel = Pointwise(self._steps, self._kinds)

    slices = halves = True  # it reads and writes them

    def __call__(self, *operands: Any, out: Tensor | None = None) -> Tensor | None:
        if not all(isinstance(x, Tensor) for x in operands):
            return None
        given = list(operands)
        for norm in self._norms:
            if norm.training or norm.running_mean is None or operands[0].dim() != rank_of(norm):
                return None
            given += _affine(norm)
        return self._kernel(given, out)


def _affine(norm: Any) -> tuple[Tensor, Tensor]:
    """What a batch norm multiplies with and adds, remembered as long as its tensors last."""
    sources = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    found: tuple[Tensor, Tensor] = made(("affine", norm.eps), lambda: _scale(*sources, norm.eps),
                                        *sources).value
    return found


@torch.no_grad()
def _scale(mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None,
           eps: float) -> tuple[Tensor, Tensor]:
    factor = (variance.double() + eps).rsqrt()
    factor = factor if weight is None else factor * weight.double()
    offset = -mean.double() * factor
    offset = offset if bias is None else offset + bias.double()
    return factor.float(), offset.float()


class Chains:
    """All chains of a graph: `found`, by their last node."""

    def __init__(self, graph: fx.Graph, module_of: Callable[[fx.Node], Any],
                 norm_of: Callable[[fx.Node], Any]) -> None:
        self._module_of, self._norm_of = module_of, norm_of
        self.effects = Effects(graph, module_of)
        self.found: dict[fx.Node, Chain] = {}
        self._numbers: set[fx.Node] = set()  # which are no tensors
        self._small: set[fx.Node] = set()  # which have a value for an image's channel
        for node in graph.nodes:
            if is_number(node, self._numbers):
                self._numbers.add(node)
            if self._is_small(node):
                self._small.add(node)
            self._look(node)

    def _is_small(self, node: fx.Node) -> bool:
        """By its name: whoever is mistaken for small is computed apart, and right."""
        module = self._module_of(node)
        if isinstance(module, POOLING):
            return True
        if isinstance(module, nn.Upsample) or name_of(node) == "interpolate":
            return False
        inputs = [source for source in node.all_input_nodes if source.op != "get_attr"]
        return name_of(node) in POOLS or (bool(inputs) and self._small.issuperset(inputs))

    def _look(self, node: fx.Node) -> None:
        own = self._chain(node)
        if own is None or not (own.learns or self._may_move(node)):
            return
        whole = own
        for source in own.operands:
            before = self.found.get(source)
            if before is None or (source in self._small and node not in self._small):
                continue  # a small chain in a large one would be computed for every pixel
            if len(source.users) == 1 and self._stays(before, node) and self._suit(before, own):
                joined = self._joined(before, whole)
                whole = joined if joined.fits else whole
        for node_ in whole.nodes[:-1]:
            self.found.pop(node_, None)
        if whole.fits:
            self.found[node] = whole

    def _chain(self, node: fx.Node) -> Chain | None:
        """The node alone."""
        module = self._module_of(node)
        image = node.args[0] if node.args else None
        if type(module) in NORMS or node.target is F.batch_norm:
            return self._norm(node, module, image)
        if node.op in ("call_function", "call_method") and node.target in ARITHMETIC:
            return None if self._numbers.issuperset(node.all_input_nodes) else _arithmetic(node)
        if node.op in ("call_function", "call_method") and node.target in ADDCMUL:
            return _product_added(node)
        if not isinstance(image, fx.Node) or node.op not in ("call_module", "call_function",
                                                             "call_method"):
            return None
        rest = node.args[1:], node.kwargs
        if node.op == "call_module":
            step = of_module(module) if module is not None and not any(rest) else None
        else:
            step = of_call(node.target, *rest)
        if step is None or step in SLOPED:
            return None
        return Chain([node], [image], [], [(node, step, image)])

    def _norm(self, node: fx.Node, module: Any, image: Any) -> Chain | None:
        """A batch norm that no convolution does."""
        if node.op == "call_function":
            module = self._norm_of(node)
        if module is None or not (module.training or module.track_running_stats):
            return None
        if not rank_of(module) or not isinstance(image, fx.Node):
            return None
        step = (node, "fma", image, (module, 0), (module, 1))
        return Chain([node], [image], [module], [step])

    def _may_move(self, node: fx.Node) -> bool:
        """Whether nobody notices that the result has memory of its own."""
        written = self.effects.written(node)
        if not written:
            return True
        return all(map(self._is_alone, written))

    def _is_alone(self, value: fx.Node) -> bool:
        """Whether one node alone reads a value, and all that it is a view of."""
        if len(value.users) != 1 or value.op in ("placeholder", "get_attr"):
            return False
        if value.op == "call_module" and self._module_of(value) is None:
            return False  # which may give memory that it keeps
        return value in self.found or all(
            isinstance(source, fx.Node) and self._is_alone(source)
            for source in self.effects.shares(value))

    def _joined(self, before: Chain, after: Chain) -> Chain:
        operands = [*before.operands, *(x for x in after.operands
                                        if x is not before.last and x not in before.operands)]
        norms = [*before.norms, *(norm for norm in after.norms if norm not in before.norms)]
        nodes = sorted({*before.nodes, *after.nodes}, key=self.effects.at)
        return Chain(nodes, operands, norms, [*before.steps, *after.steps])

    def _suit(self, before: Chain, own: Chain) -> bool:
        """A norm that learns is alone with its activation, and moves with it, if nobody sees it.
        One that does not may learn later."""
        if any(self.effects.is_met_between(node, own.last, getattr(norm, "of", norm))
               for node, norm in before.learners):
            return False
        if not (before.learns or own.learns):
            return True
        return (not own.learns and len(before.nodes) == 1 and is_activation(own.steps[0][1])
                and not self.effects.is_unknown_between(before.last, own.last))

    def _stays(self, before: Chain, node: fx.Node) -> bool:
        """Whether what a chain reads is still the same where a later node stands."""
        return not self.effects.is_written_between(
            before.last, node, list(before.operands), set(before.nodes))


def _product_added(node: fx.Node) -> Chain | None:
    """A value, and the product of two others."""
    if node.kwargs or len(node.args) != 3 or not all(isinstance(a, fx.Node) for a in node.args):
        return None
    value, a, b = node.args
    return Chain([node], list(dict.fromkeys(node.args)), [], [(node, "fma", a, b, value)])


def _arithmetic(node: fx.Node) -> Chain | None:
    """Of one or two values, or of a value and a number."""
    step = ARITHMETIC[node.target]
    if node.kwargs or len(node.args) != arguments_of(step):
        return None
    args: list[Any] = []
    for arg in node.args:
        if isinstance(arg, fx.Node):
            args.append(arg)
        elif isinstance(arg, int | float) and type(arg) is not bool and abs(arg) <= LARGEST:
            args.append(float(arg))
        else:
            return None
    operands = list(dict.fromkeys(arg for arg in args if isinstance(arg, fx.Node)))
    if not operands:
        return None
    return Chain([node], operands, [], [(node, step, *args)])
